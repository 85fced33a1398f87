"""As many peers on this machine as a person asks for, without anybody having to wait for them."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hivenb._fresh_locks import free_in_children
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.errors import LocalPeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hivenb.peers.local_peer import LocalPeer
    from hivenb.run.training import TrainingRun

_counts: weakref.WeakKeyDictionary[TrainingRun, LocalPeerCount] = weakref.WeakKeyDictionary()
_registry_lock = threading.Lock()
free_in_children(_registry_lock)

_ENDED = ("left", "failed")


@dataclass(frozen=True)
class LocalCount:
    """How many peers there are on this machine, and how many there are to be.

    :param there: that run
    :param wanted: that are to run; the same unless work is under way
    :param error: why the last wish could not be met; empty if it could
    :param restarts: whether those that die are started again
    :param returning: that come when the run starts, or are on their way by themselves
    """

    there: int
    wanted: int
    error: str = ""
    restarts: bool = False
    returning: int = 0

    @property
    def shown(self) -> int:
        """How many a person is to see as wanted: those that come by themselves are among them."""
        return self.wanted + self.returning

    @property
    def is_changing(self) -> bool:
        """Whether peers are being added or removed."""
        return self.there != self.wanted


class LocalPeerCount:
    """Adds and removes peers of a run on this machine until there are as many as were asked for last.

    There is one for each run, so that two views of it do not work against each other: :func:`local_peer_count`. A
    thread works only while there is something to do. After an error it asks for nothing more.

    :param run: whose peers
    """

    def __init__(self, run: TrainingRun):
        self._run = weakref.ref(run)
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._error = ""
        self._restart = False

    @property
    def now(self) -> LocalCount:
        """The count at this moment. Does not wait."""
        with self._lock:
            wanted, error = self._wanted, self._error
        run = self._run()
        there = 0 if run is None else len(alive(run.local_peers))
        returning = 0 if run is None or wanted is not None else run.swarm.local.to_come_to(run)
        return LocalCount(there, there if wanted is None else wanted, error, self._restart, returning)

    def ask_for(self, count: int) -> None:
        """Let there be so many. Returns at once; what was asked for before does not count any more.

        :param count: how many peers on this machine, this process not included
        """
        with self._lock:
            is_working = self._wanted is not None
            self._wanted, self._error = max(0, count), ""
            if not is_working:
                BackgroundThread(target=self._work, name="hivenb-local-peers").start()

    @property
    def restart(self) -> bool:
        """Whether those that die are started again."""
        return self._restart

    @restart.setter
    def restart(self, restart: bool) -> None:
        self._restart = restart
        if (run := self._run()) is not None:
            run.swarm.local.start_again_if_dead(run, restart)

    def _work(self) -> None:
        added: list[LocalPeer] = []
        while True:
            run = self._run()
            if run is not None:  # waits for one that is on its way; this is how many there are to be, however they come
                run.swarm.local.forget_those_to_come(run)
            peers = () if run is None else run.local_peers
            there = len(alive(peers))
            with self._lock:
                wanted = self._wanted
                if run is None or wanted is None or wanted == there:
                    self._wanted = None
                    return
            try:
                if there < wanted:
                    # one by one: by then, another number may have been asked for
                    _require_alive(added)
                    added += run.swarm.add_local_peers(1, run, restart=self._restart)
                else:
                    run.swarm.remove_local_peers(_newest(peers, there - wanted), run)
            except Exception as e:  # whatever it is, it is shown; the thread has nobody to raise it to
                with self._lock:
                    self._wanted, self._error = None, f"{type(e).__name__}: {e}"
                return


def local_peer_count(run: TrainingRun) -> LocalPeerCount:
    """The one for a run."""
    with _registry_lock:
        if run not in _counts:
            _counts[run] = LocalPeerCount(run)
        return _counts[run]


def alive(peers: tuple[LocalPeer, ...]) -> tuple[LocalPeer, ...]:
    """Those that have not ended."""
    return tuple(peer for peer in peers if peer.state not in _ENDED)


def _require_alive(added: Sequence[LocalPeer]) -> None:
    """Refuse to go on where what was added has died: the next one would, too.

    :raises LocalPeerError: with the last words of one that has
    """
    for peer in added:
        if peer.state == "failed":
            raise LocalPeerError(f"local peer {peer.number} has died, and no more are added: {peer.last_words}")


def _newest(peers: tuple[LocalPeer, ...], count: int) -> int:
    """How many of the newest peers have to be removed, ended ones included, so that ``count`` fewer are alive."""
    for number in range(1, len(peers) + 1):
        if len(alive(peers[-number:])) == count:
            return number
    return len(peers)
