"""Local peers that are started again when they die: killed, out of memory, or ended by an error."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.restart_count import RestartCount
from hivenb.errors import HivenbError
from hivenb.peers.followed_run import FollowedRun
from hivenb.peers.local_peer import LocalPeer

logger = logging.getLogger(__name__)

#: Tells what a peer joins a swarm by at this moment: invites or multiaddresses, which can be others later.
WayIn = Callable[[], tuple[str, ...]]

#: Seconds between two looks whether one has died.
LOOK_EVERY = 0.5


@dataclass(frozen=True)
class _Watched:
    """What a peer is started again with.

    :param run: whose peer it is; it is not kept for its peers
    :param way_in: of its swarm
    """

    run: weakref.ref[FollowedRun]
    way_in: WayIn


class LocalPeerRestarts:
    """Watches local peers, in a thread that is there as long as any are watched. Any thread may call.

    :param start_again: starts one in the place of another, with the same run and way in; may take its time, and has the
      new one watched
    """

    def __init__(self, start_again: Callable[[LocalPeer, FollowedRun, WayIn], None]):
        self._start_again = start_again
        self._watched: dict[LocalPeer, _Watched] = {}
        self._counts: weakref.WeakKeyDictionary[FollowedRun, RestartCount] = weakref.WeakKeyDictionary()
        self._is_closed, self._is_working = False, False
        self._changed = threading.Condition()

    def watch(self, peers: Iterable[LocalPeer], run: FollowedRun, way_in: WayIn) -> None:
        """Start these again when they die."""
        with self._changed:
            self._watched |= {peer: _Watched(weakref.ref(run), way_in) for peer in peers}
            self._counts.setdefault(run, RestartCount())
            if self._watched and not self._is_working and not self._is_closed:
                self._is_working = True
                BackgroundThread(target=self._work, name="hivenb-local-peer-restarts").start()

    def watches(self, peers: Iterable[LocalPeer]) -> bool:
        """Whether one of these is started again when it dies."""
        with self._changed:
            return any(peer in self._watched for peer in peers)

    def forget(self, peers: Iterable[LocalPeer]) -> None:
        """Start these again no longer."""
        with self._changed:
            for peer in peers:
                self._watched.pop(peer, None)

    def close(self) -> None:
        """Watch nobody any more. Does not wait for one that is being started again."""
        with self._changed:
            self._is_closed = True
            self._watched.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, LOOK_EVERY)
                if not self._watched:
                    self._is_working = False
                    return
                watched = dict(self._watched)
            for peer, how in watched.items():
                if peer.state == "left":  # of its own accord: its run has ended
                    self.forget([peer])
                elif peer.state == "failed":
                    self._replace(peer, how)

    def _replace(self, peer: LocalPeer, how: _Watched) -> None:
        run = how.run()
        with self._changed:
            if self._watched.pop(peer, None) is None or run is None:  # it was removed meanwhile
                return
            count = self._counts[run]
        died = f"local peer {peer.number} has died"
        try:
            count.add(died)
            run.followers.notify(f"{died}: it is started again")
            logger.warning(f"{died} ({peer.last_words}); it is started again")
            self._start_again(peer, run, how.way_in)
        except HivenbError as e:
            if not self._is_closed:
                run.followers.notify(f"{died}: it is not started again")
                logger.warning(f"{e}. It is not started again; its last words: {peer.last_words}")
