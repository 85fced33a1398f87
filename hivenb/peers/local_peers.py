"""Further peers of a run as processes on this machine, for a demonstration, a test or a spare core."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hivenb._interrupts import interrupts_blocked
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.restart_count import RestartCount
from hivenb.errors import HivenbError, LocalPeerError
from hivenb.peers.followed_run import FollowedRun
from hivenb.peers.fork_server import fork_peer, wait_for_server
from hivenb.peers.local_peer import LocalPeer
from hivenb.peers.peer_recipe import make_recipe
from hivenb.peers.peers_of_next_start import ComingBack

# -- local peer restarts ---------------------------------------------------------------------------------------------
#
# Local peers that are started again when they die: killed, out of memory, or ended by an error.


logger = logging.getLogger(__name__)

#: Tells what a peer joins a swarm by at this moment: invites or multiaddresses, which can be others later.
WayIn = Callable[[], tuple[str, ...]]

#: Seconds between two looks whether one has died.
LOOK_EVERY = 0.5


class LocalPeerRestarts:
    """Watches local peers, in a thread that is there as long as any are watched. Any thread may call.

    :param start_again: starts one in the place of another, in the same run; may take its time, and has the new one
      watched
    """

    def __init__(self, start_again: Callable[[LocalPeer, FollowedRun], None]):
        self._start_again = start_again
        self._watched: dict[LocalPeer, weakref.ref[FollowedRun]] = {}
        self._counts: weakref.WeakKeyDictionary[FollowedRun, RestartCount] = weakref.WeakKeyDictionary()
        self._is_closed, self._is_working = False, False
        self._restarting = threading.Condition()

    def watch(self, peers: Iterable[LocalPeer], run: FollowedRun) -> None:
        """Start these again when they die."""
        with self._restarting:
            self._watched |= {peer: weakref.ref(run) for peer in peers}
            self._counts.setdefault(run, RestartCount())
            if self._watched and not self._is_working and not self._is_closed:
                self._is_working = True
                BackgroundThread(target=self._work, name="hivenb-local-peer-restarts").start()

    def watches(self, peers: Iterable[LocalPeer]) -> bool:
        """Whether one of these is started again when it dies."""
        with self._restarting:
            return any(peer in self._watched for peer in peers)

    def forget(self, peers: Iterable[LocalPeer]) -> None:
        """Start these again no longer."""
        with self._restarting:
            for peer in peers:
                self._watched.pop(peer, None)

    def close(self) -> None:
        """Watch nobody any more. Does not wait for one that is being started again."""
        with self._restarting:
            self._is_closed = True
            self._watched.clear()
            self._restarting.notify_all()

    def _work(self) -> None:
        while True:
            with self._restarting:
                self._restarting.wait_for(lambda: self._is_closed, LOOK_EVERY)
                if not self._watched:
                    self._is_working = False
                    return
                watched = dict(self._watched)
            for peer, known in watched.items():
                if peer.state == "left":  # of its own accord: its run has ended
                    self.forget([peer])
                elif peer.state == "failed":
                    self._replace(peer, known())

    def _replace(self, peer: LocalPeer, run: FollowedRun | None) -> None:
        with self._restarting:
            if self._watched.pop(peer, None) is None or run is None:  # it was removed meanwhile
                return
            count = self._counts[run]
        died = f"local peer {peer.number} has died"
        try:
            count.add(died)
            run.followers.notify(f"{died}: it is started again")
            logger.warning(f"{died} ({peer.last_words}); it is started again")
            self._start_again(peer, run)
        except HivenbError as e:
            if not self._is_closed:
                run.followers.notify(f"{died}: it is not started again")
                logger.warning(f"{e}. It is not started again; its last words: {peer.last_words}")


# -- local peers -----------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: Seconds that a peer is given to report itself; the first one waits for the imports as well.
START_TIMEOUT = 120.0

#: Seconds that a peer is given to leave of its own accord.
LEAVE_TIMEOUT = 20.0


class LocalPeers:
    """The local peers of one swarm; :class:`hivenb.Swarm` is what people use. Any thread may call.

    Peers belong to the thread that adds them until they have started, to the swarm until they are removed, and then to
    the thread that removes them. Nobody holds the lock while waiting for a peer.

    :param way_in: of the swarm
    """

    def __init__(self, way_in: WayIn) -> None:
        self._way_in = way_in
        self._peers: tuple[LocalPeer, ...] = ()
        self._starting: set[LocalPeer] = set()
        self._numbers = itertools.count(1)
        self._at_work = 0
        self._is_closed = False
        self._restarts = LocalPeerRestarts(self._start_again)
        self._coming: dict[str, ComingBack] = {}
        self._banned: weakref.WeakSet[LocalPeer] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    @property
    def all(self) -> tuple[LocalPeer, ...]:
        """All that were added and not removed."""
        return self._peers

    def add(self, count: int, run: FollowedRun, *, restart: bool = False) -> tuple[LocalPeer, ...]:
        """See :meth:`hivenb.Swarm.add_local_peers`."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LocalPeerError(f"cannot add {count!r} peers; give a whole number of at least 1")
        run.take_name()
        coming = self._coming_to(run)
        with coming.arriving:
            there, too_many = coming.give_way(run, count)
        self._let_go(list(too_many))
        if restart:
            self._restarts.watch(there, run)
        return there + (self._start(count - len(there), run, restart=restart) if len(there) < count else ())

    def _start(self, count: int, run: FollowedRun, *, restart: bool) -> tuple[LocalPeer, ...]:
        new: list[LocalPeer] = []
        with self._working():
            self._require_open()  # from here on, close() waits for this to end
            try:
                for _ in range(count):
                    self._launch(run, new)
                    with self._changed:
                        self._require_open()  # from here on, close() knows of this one
                        self._starting.add(new[-1])
                for peer in new:
                    peer.wait_until_started(START_TIMEOUT)
                with interrupts_blocked():
                    self._take_in(new)
                    for peer in new:
                        run.followers.add(peer)
                    if restart:
                        self._restarts.watch(new, run)
            except BaseException as e:
                self._give_up(new)
                if isinstance(e, LocalPeerError):
                    self._require_open()  # if it is not, that is why
                raise
        return tuple(new)

    def start_again_if_dead(self, run: FollowedRun, are_to: bool) -> None:
        """Start the peers of a run again when they die, three times a minute at most; or no longer.

        :param are_to: whether they are to be started again
        """
        meant = [peer for peer in self._peers if peer in run.followers]
        if are_to:
            self._restarts.watch(meant, run)
        else:
            self._restarts.forget(meant)

    def leave_with(self, run: FollowedRun) -> None:
        """Let those of a run leave, as it trains no more; they come back with it, or with what takes its place."""
        coming = self._coming_to(run)
        coming.is_open = False
        with coming.arriving:  # none comes from here on
            self._leave(run, [peer for peer in self._peers if peer in run.followers])

    def remove_of_earlier_runs(self, run: FollowedRun) -> None:
        """Let those leave that follow another run of the same experiment; as many come with this one instead."""
        self._leave(None, left_behind(self._peers, run))

    def _leave(self, run: FollowedRun | None, leaving: Sequence[LocalPeer]) -> None:
        alive = [peer for peer in leaving if peer.state in ("ready", "training")]
        for experiment in {peer.experiment for peer in alive}:
            of_it = [peer for peer in alive if peer.experiment == experiment]
            coming = self._coming.setdefault(experiment, ComingBack())
            coming.note(run, len(of_it), self._restarts.watches(of_it))
        self._let_go(list(leaving))

    def come_back_with(self, run: FollowedRun) -> None:
        """Let as many come to a run that begins to train as have left with it, or with what it takes the place of.

        Returns at once.
        """
        coming = self._coming_to(run)
        if coming.begin(run):
            work = partial(self._bring_back, weakref.ref(run), coming)
            BackgroundThread(target=work, name="hivenb-local-peers-back").start()

    def _bring_back(self, of: weakref.ref[FollowedRun], coming: ComingBack) -> None:
        while (run := of()) is not None:
            with coming.arriving:
                if not coming.take_one():
                    return
                try:
                    coming.note_arrival(self._start(1, run, restart=coming.restart), run)
                except HivenbError as e:
                    coming.forget()
                    if not self._is_closed:
                        run.followers.notify("a local peer has not come back")
                        logger.warning(f"A local peer has not come back with its run: {e}")

    def rename(self, run: FollowedRun, experiment: str) -> None:
        """Let those of a run that does not train, and those that are to come to it, be of another experiment."""
        for peer in self._peers:
            if peer in run.followers:
                peer.experiment = experiment
        before = self._coming_to(run)
        if before.is_of(run):
            with self._changed:
                self._coming[experiment] = self._coming.pop(_experiment_of(run))
        run.followers.experiment = experiment

    def to_come_to(self, run: FollowedRun) -> int:
        """How many are to come to a run when it starts, or are on their way."""
        coming = self._coming.get(_experiment_of(run))
        return 0 if coming is None else coming.count

    def forget_those_to_come(self, run: FollowedRun | None = None, count: int | None = None) -> None:
        """Let nobody come to a run by itself, or to any.

        :param count: of those to come; by default all of them
        """
        for coming in list(self._coming.values()) if run is None else [self._coming_to(run)]:
            with coming.arriving:
                coming.forget(count)

    def _coming_to(self, run: FollowedRun) -> ComingBack:
        with self._changed:
            return self._coming.setdefault(_experiment_of(run), ComingBack())

    def leave_dead(self, peer_id: str) -> None:
        """Do not start this one again, if it is one of these: somebody wants it out."""
        self._restarts.forget(peer for peer in self._peers if peer.peer_id == peer_id)

    def end_banned(self, ids: Collection[str]) -> None:
        """Let those end that were banned from the swarm. They stay on the list, with the reason. Returns at once.

        :param ids: of all peers that were
        """
        if not ids:
            return
        out = [peer for peer in self._peers if peer.peer_id in ids and peer.state in ("ready", "training")]
        new = [peer for peer in out if peer not in self._banned]
        if new:
            self._banned.update(new)
            self._restarts.forget(new)
            for peer in new:
                peer.ask_to_end("it was banned from the swarm")
            BackgroundThread(target=self._end_those, args=(new,), name="hivenb-local-peers-banned").start()

    def _end_those(self, peers: Sequence[LocalPeer]) -> None:
        with self._working():
            _end(peers, LEAVE_TIMEOUT)

    def remove(self, count: int | None = None, run: FollowedRun | None = None) -> None:
        """See :meth:`hivenb.Swarm.remove_local_peers`."""
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise LocalPeerError(f"cannot remove {count!r} peers; give a whole number, or None for all")
        with self._changed:
            meant = [peer for peer in self._peers if run is None or peer in run.followers]
            leaving = meant[0 if count is None else max(0, len(meant) - count) :]
        self._let_go(leaving)
        self.forget_those_to_come(run, None if count is None else max(0, count - len(meant)))

    def _let_go(self, leaving: list[LocalPeer]) -> None:
        if not leaving:
            return
        with self._working():
            try:
                with self._changed:
                    self._peers = tuple(peer for peer in self._peers if peer not in leaving)
                self._restarts.forget(leaving)
                _end(leaving, LEAVE_TIMEOUT)
            except BaseException:  # interrupted: nobody else knows of them
                self._give_up(leaving)
                raise

    def close(self) -> None:
        """Let all leave, and end those that are being added. May be called twice."""
        self._restarts.close()
        with self._changed:
            self._is_closed = True
            starting = tuple(self._starting)
        for peer in starting:
            peer.kill()  # who waits for it takes notice, and ends what it has launched
        self._let_go(list(self._peers))
        with self._changed:
            self._changed.wait_for(lambda: self._at_work == 0, LEAVE_TIMEOUT)
        if self._logs is not None:
            self._logs.cleanup()
        atexit.unregister(self.close)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._changed:
            self._at_work += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _take_in(self, new: list[LocalPeer]) -> None:
        with self._changed:
            self._require_open()
            self._starting.difference_update(new)
            self._peers += tuple(new)

    def _give_up(self, peers: list[LocalPeer]) -> None:
        with interrupts_blocked():  # whoever interrupts once may do so twice
            self._restarts.forget(peers)
            _end(peers, timeout=0.0)
            with self._changed:
                self._starting.difference_update(peers)
                self._peers = tuple(peer for peer in self._peers if peer not in peers)

    def _start_again(self, dead: LocalPeer, run: FollowedRun) -> None:
        (new,) = self._start(1, run, restart=True)
        with self._changed:
            was_there = dead in self._peers
            self._peers = tuple(peer for peer in self._peers if peer is not dead)
        if was_there:
            _end([dead], timeout=0.0)
        else:  # it was removed meanwhile
            self._give_up([new])

    def _ask_the_way_in(self) -> tuple[str, ...]:
        try:
            return self._way_in()
        except HivenbError:
            raise
        except Exception as e:  # of several libraries: the daemon may just be ending, and is then started anew
            raise LocalPeerError(f"the swarm does not say how it is joined: {e!r}") from e

    def _launch(self, run: FollowedRun, launched: list[LocalPeer]) -> None:
        number = next(self._numbers)
        run_id = run.options.run_id
        recipe = make_recipe(run, self._ask_the_way_in(), seed=number)
        log_path = self._folder() / f"peer-{number}.log"
        with _errors_of_the_system(number):
            wait_for_server()
            with interrupts_blocked():  # one in between would leave a peer that is nobody's
                process, connection = fork_peer(f"hivenb-peer-{number}", recipe, log_path)
                launched.append(LocalPeer(number, process, connection, log_path, run_id, run.followers.experiment))

    def _folder(self) -> Path:
        with self._changed:
            if self._logs is None:
                self._require_open()
                self._logs = tempfile.TemporaryDirectory(prefix="hivenb-peers-")
                # multiprocessing would wait at exit for processes that nobody has told to end
                atexit.register(self.close)
            return Path(self._logs.name)

    def _require_open(self) -> None:
        if self._is_closed:
            raise LocalPeerError("the swarm was closed before the peers on this machine had started; open it anew")


@contextlib.contextmanager
def _errors_of_the_system(number: int) -> Iterator[None]:
    """Tells in words that the system has no process to give.

    :raises LocalPeerError: in place of what it says itself
    """
    try:
        yield
    except (OSError, EOFError) as e:  # the latter where the server that forks could not
        raise LocalPeerError(
            f"local peer {number} could not be started ({type(e).__name__}: {e}). Memory, processes or open files may "
            "have run short on this machine: end what is not needed, or add fewer peers"
        ) from e


def left_behind(peers: Sequence[LocalPeer], run: FollowedRun) -> tuple[LocalPeer, ...]:
    """Those of some local peers that take part in another run of the same experiment.

    :param peers: of the run's swarm
    """
    experiment = _experiment_of(run)
    return tuple(peer for peer in peers if peer.experiment == experiment and peer not in run.followers)


def _experiment_of(run: FollowedRun) -> str:
    return run.followers.experiment or run.options.run_id


def _end(peers: Sequence[LocalPeer], timeout: float) -> None:
    for peer in peers:
        peer.ask_to_leave()
    deadline = time.monotonic() + timeout
    for peer in peers:
        peer.wait_until_gone(max(0.0, deadline - time.monotonic()))
