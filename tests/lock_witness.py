"""A program that trains with everything on, and tells which of hivenb's locks were taken within which, and all threads.

To be run in an interpreter of its own: the locks that modules and classes have are made when those are imported.
Prints ``{"nested": [[outer, inner], ...], "threads": [...]}``; a lock is named ``run/pause_and_stop.py changed``.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1] / "hivenb"
_NAME = re.compile(r"(?:self\.|cls\.)?(\w+)(?:: [^=]+)? = ")

nested: set[tuple[str, str]] = set()
threads: set[str] = set()
_held = threading.local()
_make_lock, _make_rlock, _Condition = threading.Lock, threading.RLock, threading.Condition


class Witness:
    """A lock of hivenb's that writes down within which others it is taken.

    :param lock: what it does is left to this one
    :param name: where it is made, and what it is called there
    """

    def __init__(self, lock: Any, name: str):
        self._lock, self._name = lock, name

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        """Take it, and note what this thread holds already."""
        taken: bool = self._lock.acquire(*args, **kwargs)
        if taken:
            held = self._stack()
            if self._name not in held:
                nested.update((outer, self._name) for outer in held)
            held.append(self._name)
        return taken

    def release(self) -> None:
        """Let it go."""
        stack = self._stack()
        del stack[len(stack) - 1 - stack[::-1].index(self._name)]
        self._lock.release()

    @staticmethod
    def _stack() -> list[str]:
        if not hasattr(_held, "names"):
            _held.names = []
        names: list[str] = _held.names
        return names

    __enter__ = acquire

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _witnessed(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(_PACKAGE):
            return make()
        line = file.read_text().splitlines()[frame.f_lineno - 1]
        name = _NAME.search(line)
        assert name is not None, f"{file}:{frame.f_lineno} makes a lock without a name"
        return Witness(make(), f"{file.relative_to(_PACKAGE)} {name[1]}")

    return made


class _WitnessedCondition(_Condition):
    def __init__(self, lock: Any = None):
        super().__init__(lock if lock is not None else _witnessed_by_caller())


def _witnessed_by_caller() -> Any:
    frame = sys._getframe(2)
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(_PACKAGE):
        return _make_rlock()
    name = _NAME.search(file.read_text().splitlines()[frame.f_lineno - 1])
    assert name is not None, f"{file}:{frame.f_lineno} makes a condition without a name"
    return Witness(_make_rlock(), f"{file.relative_to(_PACKAGE)} {name[1]}")


def train_with_everything_on() -> None:
    """A run with a dashboard, local peers, changes, a pause and an end, as a person would have it."""
    import tiny

    import hivenb
    from hivenb.run.local_peer_count import local_peer_count
    from hivenb.run.status import RunState

    delays = {**tiny.DELAYS, "matchmaking_time": 2.0, "averaging_timeout": 20.0}
    options = hivenb.Options(target_batch_size=128, **delays)
    with hivenb.Swarm("witness", public_name="Ann") as swarm:
        run = hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(shuffle=True), swarm=swarm, options=options)
        dashboard = hivenb.Dashboard(run)
        run.start()
        swarm.add_local_peers(1, run)
        assert run.wait(epochs=2, timeout=60)
        threads.update(thread.name for thread in threading.enumerate())
        run.apply(grad_compression="float16")
        run.apply(target_batch_size=64, wait=False)
        local_peer_count(run).ask_for(2)
        assert run.wait(epochs=3, timeout=60)
        threads.update(thread.name for thread in threading.enumerate())
        run.pause()
        run.wait_for(RunState.PAUSED, timeout=30)
        run.resume()
        run.wait(epochs=1, timeout=60)
        swarm.peers()
        run.stop()
        dashboard.close()


if __name__ == "__main__":
    threading.Lock, threading.RLock = _witnessed(_make_lock), _witnessed(_make_rlock)  # type: ignore[assignment, misc]
    threading.Condition = _WitnessedCondition  # type: ignore[misc]
    train_with_everything_on()
    sys.stdout.write(json.dumps({"nested": sorted(nested), "threads": sorted(threads)}) + "\n")
