"""A notebook whose kernel is interrupted or restarted, or whose local peers lose the server they were forked from."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import psutil
from faults.case import BrokeError, Fault
from faults.field import GONE_WITHIN, Field

sys.path.append(str(Path(__file__).parents[1] / "kernel"))

from real_kernel import CellError, Kernel

IMPORTS = "import hivenb, tiny, hivenb.training"

TRAIN = """
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=64, matchmaking_time=2.0))
run.start()
peers = swarm.add_local_peers(1, run)
assert run.wait(epochs=3, timeout=90), run.status
"""

GO_ON = """
assert run.wait(epochs=3, timeout=90), run.status
"""

END = """
if "swarm" in globals():
    swarm.close()
"""

#: Seconds that the cell above takes, and some more.
LONGEST = 20.0


@contextmanager
def _kernel() -> Iterator[tuple[Kernel, str]]:
    """A real one, and the temporary folder by which its processes are known."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.run(IMPORTS)
            yield kernel, folder
        finally:
            kernel.close()
        _require_gone(_of(folder))


def _of(folder: str) -> list[psutil.Process]:
    """All processes, of whichever kernel, that have this temporary folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder:
                found.append(process)
    return found


def _require_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, GONE_WITHIN)
    if alive:
        raise BrokeError(f"left behind: {', '.join(' '.join(one.cmdline())[:60] for one in alive)}")


def _interrupt(field: Field, chance: Random) -> str:
    field.note()
    seconds = chance.uniform(0.0, LONGEST)
    with _kernel() as (kernel, folder):
        cell = kernel.begin(TRAIN)
        time.sleep(seconds)
        kernel.interrupt()
        try:
            kernel.finish(cell)
            seen = "after the cell"
        except CellError as e:
            seen = f"{e.name} in the cell"
            if e.name != "KeyboardInterrupt":
                raise BrokeError(f"interrupted after {seconds:.1f} s, the cell ends with {e}") from e
        kernel.run(f"{END}\n{TRAIN}\n{END}")
        _require_gone([one for one in _of(folder) if one.name().startswith("p2pd")])
    return f"{seconds:.1f} s into the cell: {seen}, and the same cell runs again"


def _restart(field: Field, chance: Random) -> str:
    field.note()
    seconds, by_force = chance.uniform(0.0, LONGEST), chance.random() < 0.5
    with _kernel() as (kernel, folder):
        kernel.begin(TRAIN)
        time.sleep(seconds)
        old = _of(folder)
        kernel.restart(by_force)
        _require_gone([*old, *(one for one in _of(folder) if one != kernel.process)])
        kernel.run(IMPORTS)
        kernel.run(f"{TRAIN}\n{END}")
    return f"{seconds:.1f} s into the cell, {'by force' if by_force else 'when asked to'}: the same cell runs again"


def _kill_fork_server(field: Field, chance: Random) -> str:
    field.note()
    with _kernel() as (kernel, folder):
        kernel.run(TRAIN)
        time.sleep(chance.uniform(0.0, 2.0))
        (server,) = (
            one for one in kernel.process.children() if "multiprocessing.forkserver" in " ".join(one.cmdline())
        )
        server.kill()
        kernel.run(GO_ON)
        kernel.run("assert [peer.state for peer in swarm.local_peers] == ['training'], swarm.local_peers")
        kernel.run(f"swarm.add_local_peers(1, run)\n{GO_ON}")
        kernel.run(END)
        _require_gone([one for one in _of(folder) if one.name().startswith("p2pd")])
    return "the local peer trains on, and another one can be added"


_FAULTS: dict[str, tuple[str, Callable[[Field, Random], str]]] = {
    "kernel-interrupted": ("A kernel is interrupted at any moment of opening, starting and training.", _interrupt),
    "kernel-restarted": ("A kernel is restarted at any such moment.", _restart),
    "fork-server-killed": ("The server is killed that a kernel's local peers are forked from.", _kill_fork_server),
}

FAULTS = [Fault(name, about, inject) for name, (about, inject) in _FAULTS.items()]
