"""A swarm of real peers on this machine that faults happen to, and the checks that it has withstood them."""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from faults import trapped_peer
from faults.case import BrokeError
from strategy.peers import Peer, difference, meet, processes, starting_peers

#: Peers of the swarm.
SIZE = 3

#: Seconds within which the processes of a peer that has died are gone.
GONE_WITHIN = 15.0

#: How far apart the parameters of two peers may be after a round: of sums that were added up in another order.
APART = 1e-4

#: Of each peer: an epoch takes about half a second.
SETTINGS: dict[str, Any] = {
    "epochs": None,
    "target": 192,
    "model": {"optimizer": torch.optim.SGD, "lr": 0.01, "momentum": 0.5},
    "strategy": {"matchmaking_time": 5.0, "averaging_timeout": 30.0, "next_chunk_timeout": 5.0},
}


class Field:
    """Three peers that train together, each in processes of its own, and what has become of them.

    :param settings: of the peers, over :data:`SETTINGS`
    """

    def __init__(self, settings: dict[str, Any], start: Callable[..., Peer], folder: str):
        self._settings, self._start, self.folder = settings, start, folder
        self._numbers: dict[Peer, int] = {}
        self._doomed: set[psutil.Process] = set()
        self.peers: list[Peer] = []
        self._before: dict[Peer, int] = {}
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The latest swarm epoch that anybody has ended."""
        return max((peer.moments[-1].epoch for peer in self.peers if peer.moments), default=self._epoch)

    def number(self, peer: Peer) -> int:
        """By which a peer knows its traps."""
        return self._numbers[peer]

    def add(self, *prepare: Callable[[], None], wait: bool = True, **settings: Any) -> Peer:
        """Start one more peer, which joins through those that are there.

        :param prepare: what its process does first; functions of modules
        :param wait: until it has addresses
        :param settings: over those of the others
        """
        number = len(self._numbers)
        # any of them will do, the first one may have left
        addresses = [address for peer in self.peers for address in peer.addresses]
        whole = {**self._settings, "save": f"{self.folder}/{number}", **settings, "prepare": prepare}
        target = functools.partial(trapped_peer.train, folder=self.folder)
        peer = self._start(number, whole, addresses=addresses, target=target)
        self._numbers[peer] = number
        self.peers.append(peer)
        if wait:
            peer.wait_until(lambda: peer.addresses, "its addresses")
        return peer

    def forget(self, peer: Peer) -> None:
        """It is none of the swarm's any more: whatever becomes of it is not looked at."""
        self.peers.remove(peer)

    def gather(self) -> None:
        """Have as many peers as there should be, all training together."""
        while len(self.peers) < SIZE:
            self.add()
        meet(self.peers, self._epoch)
        self._epoch = self.epoch

    def note(self) -> None:
        """Remember where everybody is, before a fault."""
        self._epoch = self.epoch
        self._before = {peer: len(peer.moments) for peer in self.peers}

    def forget_epoch(self, epoch: int) -> None:
        """Count from an earlier epoch: nobody was there any more, and a checkpoint is all that is left."""
        self._epoch = min(self._epoch, epoch - 1)

    @property
    def next_number(self) -> int:
        """By which the next peer that is added will know its traps."""
        return len(self._numbers)

    def trap(self, who: int | str, moment: str) -> None:
        """Let a peer die as soon as it comes to a moment of its work.

        :param who: its number, or :data:`faults.trapped_peer.ANYBODY` for whoever comes first
        """
        trapped_peer.trap(self.folder, who, moment).touch()

    def doom(self, *peers: Peer) -> None:
        """All processes of these peers are to be gone soon."""
        for peer in peers:
            self._doomed |= _tree(peer)
            self.peers.remove(peer)

    def wait_for_death(self, seconds: float = 90.0) -> Peer:
        """Wait until one of the peers has died, all of whose processes are to be gone soon."""
        trees = {peer: _tree(peer) for peer in self.peers}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for peer in self.peers:
                if peer.process.exitcode is not None:
                    self._doomed |= trees[peer]
                    self.peers.remove(peer)
                    return peer
            time.sleep(0.02)
        raise BrokeError(f"no peer has died within {seconds:.0f} s")

    # -- what must be so afterwards ---------------------------------------------------------------------------------

    def check(self) -> str:
        """Whether the swarm has withstood what has happened since :meth:`note`; gathers as many peers as before.

        :returns: how, in a few words
        :raises BrokeError: if anything is lost, or left
        """
        began, lost_at = time.monotonic(), self._epoch
        while len(self.peers) < SIZE:
            self.add()
        try:
            epoch = meet(self.peers, lost_at + 1, self._agree)
        except AssertionError as e:
            raise BrokeError(f"no two epochs together, and alike: {e}") from e
        together = time.monotonic() - began
        for peer in self.peers:
            self._check_course(peer)
        self._check_processes()
        self._epoch = self.epoch
        return f"together again at epoch {epoch}, {together:.0f} s later"

    def _agree(self, epoch: int) -> bool:
        after = [peer.history()[epoch] for peer in self.peers]
        if not all(bool(tensor.isfinite().all()) for tensors in after for tensor in tensors):
            raise BrokeError(f"parameters are not finite in epoch {epoch}")
        return all(difference(after[0], other) < APART for other in after[1:])

    def _check_course(self, peer: Peer) -> None:
        number, known = self.number(peer), self._before.get(peer)
        epochs = [moment.epoch for moment in list(peer.moments) if moment.report is not None]
        if any(later < earlier for earlier, later in pairwise(epochs)):
            raise BrokeError(f"peer {number} has gone back: {epochs}")
        if known is None and epochs and epochs[0] <= self._epoch:
            raise BrokeError(f"peer {number} has begun at epoch {epochs[0]}, when the swarm had ended {self._epoch}")
        check_checkpoint(f"{self.folder}/{number}.ckpt")

    def _check_processes(self) -> None:
        _, left = psutil.wait_procs([one for one in self._doomed if _is_there(one)], GONE_WITHIN)
        left = [one for one in left if _is_there(one)]
        self._doomed.clear()
        if left:
            names = ", ".join(f"{one.pid} {' '.join(one.cmdline())[:60]}" for one in left)
            for one in left:
                one.kill()
            raise BrokeError(f"left behind: {names}")


def check_checkpoint(path: str) -> None:
    """Whether a checkpoint, if there is one, is whole.

    :raises BrokeError: if it is not
    """
    try:
        state = torch.load(path, weights_only=False)
    except FileNotFoundError:
        return
    except Exception as e:
        raise BrokeError(f"the checkpoint cannot be loaded: {e!r}") from e
    if not all(math.isfinite(float(one.sum())) for one in state["state_dict"].values()):
        raise BrokeError("the checkpoint is not finite")


def _tree(peer: Peer) -> set[psutil.Process]:
    with suppress(psutil.NoSuchProcess):  # it has died already
        return set(processes(peer))
    return set()


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def open_field(**settings: Any) -> Iterator[Field]:
    """A field whose peers have met; all of it is gone afterwards.

    :raises BrokeError: if a process is left
    """
    folder = tempfile.mkdtemp(prefix="hivenb-faults-")
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        with starting_peers() as start:
            field = Field({**SETTINGS, **settings}, start, folder)
            try:
                field.gather()
                yield field
            except BaseException:
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"--- {log.name}:\n{log.read_text(errors='replace')[-1500:]}")
                raise
            trees = [psutil.Process(peer.process.pid).children(recursive=True) for peer in field.peers]
        left = [one for tree in trees for one in psutil.wait_procs(tree, GONE_WITHIN)[1] if _is_there(one)]
        if left:
            raise BrokeError(f"left behind in the end: {left}")
