"""An afternoon in which nobody does anything wrong says nothing that worries: no line at WARNING or above.

Whoever reads a warning of each start, stop and change learns to read none of them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

import joining_peer
import pytest
from tiny import DELAYS, loader

import hivenb

#: As our log writes levels, in the kernel and in the files of local peers, and what Python prints of errors.
WORRYING = re.compile(r"\b(WARN|WARNING|ERROR|CRITICAL|Traceback|\w+Error\b)")

#: Of one epoch, on a machine that is busy.
PATIENCE = 90.0


def worrying(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if WORRYING.search(line)]


@pytest.mark.parametrize(
    ("line", "is_worrying"),
    [
        ("14:03:02 INFO GPU available: False, used: False", False),
        ("14:03:02 WARN Trigger is already set", True),
        ("14:03:02 ERROR This instance was already used", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("Traceback (most recent call last):", True),
    ],
)
def test_what_worries(line: str, is_worrying: bool) -> None:
    assert bool(worrying([line])) is is_worrying


@pytest.mark.process
@pytest.mark.long  # it takes two minutes or more
def test_an_honest_afternoon_logs_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Start, options, stop, start, pause, local peers that come and go, and a friend whose kernel is restarted."""
    logs: dict[str, tuple[str, ...]] = {}
    with hivenb.Swarm() as swarm:

        def keep_logs() -> None:
            logs.update({f"local peer {one.number}": one.log for one in swarm.local_peers if one.log})

        run = hivenb.TrainingRun(
            joining_peer.DiaryModel(tmp_path),
            (loader(4096, 8, shuffle=True), loader(64, 8)),
            swarm=swarm,
            options=hivenb.Options(target_batch_size=512, run_id="afternoon"),
            accelerator="cpu",
            check_val_every_n_epoch=None,
            val_check_interval=50,
        )
        earlier = frozenset(run.log_lines)  # of other swarms of this process, which share its log
        swarm.add_local_peers(2, run)
        run.start()
        assert run.wait(epochs=1, timeout=PATIENCE)
        for changes in (
            {"grad_compression": "float16"},
            DELAYS,
            {"target_batch_size": 384},
            {"reuse_grad_buffers": True},
        ):
            run.apply(**changes)
            assert run.wait(epochs=2, timeout=PATIENCE)
        run.stop()
        run.start()
        assert run.wait(epochs=2, timeout=PATIENCE)
        run.pause()
        run.resume()
        assert run.wait(epochs=1, timeout=PATIENCE)

        for is_killed in (True, False):  # whose kernel is restarted, and comes again
            with joining_peer.peer(swarm.invite, tmp_path, "afternoon", target_batch_size=384) as friend:
                assert friend.ask("wait", epochs=2, timeout=PATIENCE)
                logs[f"friend, killed: {is_killed}"] = friend.ask("look")["log"]
                if is_killed:
                    friend.process.kill()
                    friend.process.join()
                    assert friend.process.exitcode == -signal.SIGKILL
                assert run.wait(epochs=2, timeout=PATIENCE)

        keep_logs()
        swarm.remove_local_peers(1, run)
        swarm.add_local_peers(1, run)
        assert run.wait(epochs=2, timeout=PATIENCE)
        keep_logs()
        run.stop()
        keep_logs()
        logs["this kernel"] = tuple(line for line in run.log_lines if line not in earlier)
    keep_logs()
    assert len(logs) >= 5
    assert {name: found for name, log in logs.items() if (found := worrying(log))} == {}
    assert not [str(one.message) for one in recwarn if "hivenb" in str(one.filename)]
