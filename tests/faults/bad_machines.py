"""Machines that lack something: time, descriptors, a disk, memory that processes share. A peer joins from there."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from faults.case import BrokeError, Fault
from faults.field import GONE_WITHIN, Field
from strategy.peer import WideModel

#: Seconds by which a clock is wrong.
CLOCK = 180.0

_CLONE_NEWNS = 0x00020000

_FULL = f"{tempfile.gettempdir()}/hivenb-faults-full"


class LargeModel(WideModel):
    """Whose parameters and gradients do not fit into 64 MB."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(4, 4096), torch.nn.Linear(4096, 2048), torch.nn.Linear(2048, 2)
        )


def shift_clock(seconds: float) -> None:
    """Let this process, and those that it forks, take it for later than it is."""
    real = time.time
    time.time = lambda: real() + seconds  # type: ignore[assignment]
    for module in list(sys.modules.values()):
        if getattr(module, "get_dht_time", None) is not None and module.__name__.startswith(("hivemind", "hivenb")):
            module.get_dht_time = time.time  # type: ignore[attr-defined]


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def have_full_disk(folder: str) -> None:
    """A folder on a disk of its own, on which there is room for a page and no more."""
    os.makedirs(folder, exist_ok=True)
    _mount(folder, "4k")


def lose_temporary_folder() -> None:
    os.environ["TMPDIR"] = "/proc/nowhere"
    tempfile.tempdir = None


def have_little_shared_memory() -> None:
    """A ``/dev/shm`` of 64 MB of this process's own, as Docker gives one to each container."""
    _mount("/dev/shm", "64m")


def _mount(folder: str, size: str) -> None:
    """Put memory of a size in the place of a folder, for this process alone and those that it starts."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)


def _needs_root() -> str | None:
    return None if os.geteuid() == 0 else "mounting needs root"


def _joins(prepare: Callable[[], None], **settings: Any) -> Callable[[Field, Random], str]:
    """A peer of such a machine takes the place of another one, and trains with the others."""

    def inject(field: Field, chance: Random) -> str:
        field.note()
        peer = chance.choice(field.peers)
        field.doom(peer)
        peer.tell("stop")
        peer.wait_for_end()
        return f"peer {field.number(field.add(prepare, **settings))} has joined"

    return inject


def _fails(words: str, prepare: Callable[[], None], **settings: Any) -> Callable[[Field, Random], str]:
    """A peer of such a machine ends by an error that says why, and the others go on."""

    def inject(field: Field, chance: Random) -> str:
        field.note()
        number = field.next_number
        peer = field.add(prepare, wait=False, **settings)
        peer.process.join(90.0)
        field.forget(peer)
        shutil.rmtree(_FULL, ignore_errors=True)
        log = Path(field.folder, f"{number}.log").read_text(errors="replace")
        if peer.process.exitcode != 1:
            raise BrokeError(f"it ended with {peer.process.exitcode}; the last it said: {log[-500:]}")
        if words not in log:
            raise BrokeError(f"it does not say {words!r}, but {log[-500:]}")
        return f"peer {number} has said so and ended"

    return inject


def _wrong_clock(seconds: float) -> Callable[[Field, Random], str]:
    """A peer whose clock is wrong comes, and is let in or not; the others go on in either case."""

    def inject(field: Field, chance: Random) -> str:
        field.note()
        number = field.next_number
        peer = field.add(partial(shift_clock, seconds), wait=False)
        at = field.epoch
        others = [one for one in field.peers if one is not peer]
        for one in others:
            one.wait_for_epoch(at + 5)
        field.forget(peer)
        has_joined = bool(peer.moments)
        peer.end()
        if peer.process.exitcode is None:
            raise BrokeError(f"it does not end within {GONE_WITHIN:.0f} s")
        return f"peer {number} {'trained' if has_joined else 'was not let in'}; the others went on for 5 epochs"

    return inject


FAULTS = [
    Fault("clock-ahead", "A peer's clock is three minutes ahead.", _wrong_clock(CLOCK), repeats=False),
    Fault("clock-behind", "A peer's clock is three minutes behind.", _wrong_clock(-CLOCK), repeats=False),
    Fault(
        "full-disk",
        "The disk of a peer is full when it saves a checkpoint: it ends by that error.",
        _fails("No space left on device", partial(have_full_disk, _FULL), save=f"{_FULL}/saved"),
        repeats=False,
        why_not=_needs_root,
    ),
    Fault(
        "small-dev-shm",
        "/dev/shm has 64 MB, as in a container, and the model needs more: a peer says so before it crashes.",
        _fails("/dev/shm", have_little_shared_memory, module=LargeModel),
        repeats=False,
        why_not=_needs_root,
    ),
    Fault("few-descriptors", "A peer may have 256 descriptors.", _joins(limit_descriptors), repeats=False),
    Fault("no-temporary-folder", "TMPDIR cannot be written to.", _joins(lose_temporary_folder), repeats=False),
]
