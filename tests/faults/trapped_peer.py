"""A peer that dies at a certain moment of its work, if there is a trap for it. Runs in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileOpener
from strategy import peer

from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.averaging.state_download import SharesState
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking
from hivenb.engine.process.child import shared_locks

#: Where a peer can be made to die: the moment, and the method in which it comes, in whichever of its processes.
MOMENTS: dict[str, tuple[type, str]] = {
    "computing": (peer.TinyModel, "training_step"),
    "matchmaking": (EpochMatchmaking, "look_for_group"),
    "sending": (FaultTolerantRunner, "_communicate_with_peer"),
    "reducing": (FaultTolerantRunner, "rpc_aggregate_part"),
    "serving": (SharesState, "rpc_download_state"),
    "downloading": (TrainingStateAverager, "load_state_from_peers"),
    "saving": (LocalFileOpener, "commit"),  # written, and not in its place
}

#: The averager of gradients alone dies, with a lock that all processes of this peer share.
LOCKED = "locked"


#: In place of a number: whoever comes first.
ANYBODY = "any"


def trap(folder: str, number: int | str, moment: str) -> Path:
    """What a peer steps on at a moment."""
    return Path(folder) / f"{number}-{moment}"


def train(
    connection: Any, number: int, initial_peers: Sequence[str], stages: Sequence[dict[str, Any]], *, folder: str
) -> None:
    """As :func:`strategy.peer.train`, until it steps on something.

    :param folder: where its traps are, and what it prints
    """
    output = os.open(f"{folder}/{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    main = os.getpid()
    for moment, (owner, method) in MOMENTS.items():
        for who in (number, ANYBODY):
            _set(owner, method, functools.partial(_step_on, trap(folder, who, moment), main))
    _set(EpochMatchmaking, "look_for_group", functools.partial(_die_with_a_lock, trap(folder, number, LOCKED)))
    for prepare in stages[0].pop("prepare", ()):
        prepare()
    peer.train(connection, number, initial_peers, stages)


def _set(owner: type, method: str, step: Callable[[], None]) -> None:
    original = getattr(owner, method)

    @functools.wraps(original)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        step()
        return original(*args, **kwargs)

    @functools.wraps(original)
    def answering(self: Any, request: Any, context: Any) -> Any:
        return stepping(self, request, context)  # hivemind looks at how many arguments there are

    setattr(owner, method, answering if method.startswith("rpc_") else stepping)


def _step_on(path: Path, main: int) -> None:
    if not path.exists():
        return
    with contextlib.suppress(FileNotFoundError):  # somebody else was first
        path.unlink()
        os.kill(main, signal.SIGKILL)
        time.sleep(60.0)  # its children end with it


def _die_with_a_lock(path: Path) -> None:
    if path.exists():
        path.unlink()
        shared_locks()[1].acquire()  # of MPFuture, in the middle of an answer
        os.kill(os.getpid(), signal.SIGKILL)
