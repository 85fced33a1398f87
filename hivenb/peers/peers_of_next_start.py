"""Local peers that have left with their run, and come back with its next start or with the run that takes its place."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hivenb.peers.followed_run import FollowedRun
    from hivenb.peers.local_peer import LocalPeer


class ComingBack:
    """Those of one experiment. Any thread may call.

    Those of a run itself come back to it, as many as there were. A run that takes its place has as many as well, until
    somebody adds some to it: those are its own then, however many came by themselves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._of: weakref.ref[FollowedRun] | None = None
        self._by_themselves: tuple[LocalPeer, ...] = ()
        self._added_to: weakref.WeakSet[FollowedRun] = weakref.WeakSet()
        #: whether the run trains to which they come
        self.is_open = False
        #: whether they were started again when they died
        self.restart = False
        #: to be held while one of them is started: whoever adds some meanwhile waits, and counts it
        self.arriving = threading.Lock()

    @property
    def count(self) -> int:
        """How many are still to come."""
        return self._count

    def is_of(self, run: FollowedRun) -> bool:
        """Whether they have left with this very run."""
        return self._of is not None and self._of() is run

    def note(self, run: FollowedRun | None, count: int, restart: bool) -> None:
        """So many more have just left with a run, or have followed one that is gone."""
        with self._lock:
            self._of = None if run is None else weakref.ref(run)
            self.restart = restart or (self.restart and self._count > 0)
            self._count, self._by_themselves = self._count + count, ()

    def forget(self, count: int | None = None) -> None:
        """So many are not to come any more; by default none is."""
        with self._lock:
            self._count = 0 if count is None else max(0, self._count - count)
            self._by_themselves = ()

    def begin(self, run: FollowedRun) -> int:
        """A run begins to train.

        :returns: how many are to come
        """
        with self._lock:
            if run in self._added_to and not self.is_of(run):
                self._count = 0
            self.is_open = True
            return self._count

    def take_one(self) -> bool:
        """Whether one more is to come; it is counted as there."""
        with self._lock:
            is_wanted = self.is_open and self._count > 0
            self._count -= is_wanted
            return is_wanted

    def note_arrival(self, peers: tuple[LocalPeer, ...], run: FollowedRun) -> None:
        """Some have come by themselves."""
        with self._lock:
            if not self.is_of(run):
                self._by_themselves += peers

    def give_way(self, run: FollowedRun, count: int) -> tuple[tuple[LocalPeer, ...], tuple[LocalPeer, ...]]:
        """Somebody adds local peers to a run.

        :param count: how many
        :returns: those that have come by themselves to be among them, and those that are too many now
        """
        with self._lock:
            self._added_to.add(run)  # be it that the run whose place it takes, and its peers, have yet to end
            self._count = max(0, self._count - count) if self.is_of(run) else 0
            came, self._by_themselves = self._by_themselves, ()
            came = tuple(peer for peer in came if peer in run.followers and peer.state in ("ready", "training"))
            return came[:count], came[count:]
