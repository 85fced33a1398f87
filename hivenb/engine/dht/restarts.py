"""A DHT that is started anew when its process or its daemon has ended, as the same peer and the same object."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing as mp
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hivemind
import psutil
from hivemind.dht import DHTNode
from hivemind.utils import MPFuture, get_logger

from hivenb.engine.dht.daemon import DaemonRecord, Earlier, addresses_of
from hivenb.engine.dht.requests import RequestPipe
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.engine.process.restart_count import RestartCount
from hivenb.engine.process.watched_process import LOOK_EVERY, WatchedProcess, how_it_ended
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)

#: Seconds that a DHT which is started anew is given until it works.
RESTART_TIMEOUT = 30.0


class Restarting(WatchedProcess):
    """Mixin to put *before* ``hivemind.DHT``.

    While it is started anew, whoever asks it for something waits. What was asked before fails.
    """

    title = "the process of the DHT"

    _daemon_listen_maddr: Any
    run_coroutine: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any):
        self._works = threading.Event()
        self._works.set()
        self._restarts = RestartCount()
        self._restarting = threading.Lock()
        self._restarter: threading.Thread | None = None
        self._daemon = DaemonRecord()
        self._earlier: Earlier | None = None
        self._neighbours: MPFuture | None = None
        #: addresses of connections to other peers, and those at which these listen
        self._last_neighbours: tuple[str, ...] = ()
        self._last_listeners: tuple[str, ...] = ()
        self._dependents: weakref.WeakSet[WatchedProcess] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    # -- for whoever uses it --------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether it works, or is just being started anew."""
        is_being_restarted = not self._works.is_set()
        return not self._is_dismissed and (self.ended is None or is_being_restarted)

    def require(self) -> None:
        """Wait until it works, if it is just being started anew.

        :raises ProcessEndedError: if it could not be
        """
        self._works.wait()
        if self.ended is not None:
            raise self.ended

    def revive(self) -> None:
        """Start it anew once more, after all that was tried in vain; otherwise without effect.

        :raises ProcessEndedError: if that fails as well
        """
        self._works.wait()  # for what is tried at present
        if (error := self.ended) is not None:
            self._works.clear()
            self._restart(error, was_given_up=True)
        self.require()

    def support(self, process: WatchedProcess, pid: int | None) -> None:
        """Let a process end with this one, through which it talks to others.

        :param process: that has been started
        :param pid: of this one when that was
        """
        self._dependents.add(process)
        if pid != self.pid or not self._works.is_set():  # it has ended meanwhile, and knew nothing of the other
            process.end_with(ProcessEndedError(f"{self.title} (process {pid}) {how_it_ended(None)}"))

    def shutdown(self) -> None:
        self._is_dismissed = True
        with self._restarting:  # if it is being started anew, that is given up
            super().shutdown()  # type: ignore[misc]

    @property
    def _outer_pipe(self) -> Any:
        if threading.current_thread() is not self._restarter:
            self._works.wait()
        return self._pipe

    @_outer_pipe.setter
    def _outer_pipe(self, pipe: Any) -> None:
        self._pipe = RequestPipe(pipe)

    # -- when it has ended ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Note with whom it is connected, to find them again."""
        if self._neighbours is not None and self._neighbours.done():
            with contextlib.suppress(Exception):
                neighbours, listeners = self._neighbours.result()
                self._last_neighbours = neighbours or self._last_neighbours
                self._last_listeners = listeners or self._last_listeners
            self._neighbours = None
        if self._neighbours is None and self._daemon.pid:
            # it is being closed; or torch's manager of shared memory does not answer, as on an overloaded machine
            with contextlib.suppress(OSError, RuntimeError):
                self._neighbours = self.run_coroutine(_list_neighbours, return_future=True)

    def _describe_end(self) -> ProcessEndedError:
        if (code := self._daemon.exit_code) is None:
            return super()._describe_end()
        title = "p2pd, the daemon of the DHT"
        return ProcessEndedError(f"{title} (process {self._daemon.pid}), {how_it_ended(code)}", title)

    def _has_ended(self, error: ProcessEndedError) -> None:
        self._restarter = threading.current_thread()
        self._works.clear()
        try:
            self._conclude(error)
            self._daemon.remove_sockets()
            for process in list(self._dependents):
                process.end_with(error)
        finally:
            self._restart(error)

    def _restart(self, error: ProcessEndedError, was_given_up: bool = False) -> None:
        with self._restarting:
            self._restarter = threading.current_thread()
            try:
                if self._is_dismissed or (was_given_up and self.ended is not error):  # another thread has revived it
                    return
                if was_given_up:
                    self._restarts.forget()
                self._restarts.add(error)
                logger.warning(f"{error}. It is started anew, as the same peer")
                self._start_anew()
                self.ended = None
            except Exception as e:
                self.ended = e if isinstance(e, ProcessEndedError) else _not_started_anew(error, e)
                self._pipe.end(self.ended)
                if not self._is_dismissed:
                    logger.error(str(self.ended))
            finally:
                self._restarter = None
                self._works.set()

    def _start_anew(self) -> None:
        got = tuple(self._ready.result(0) or ()) if self._earlier is None else self._earlier.addresses
        try:
            self._start_as(Earlier(got, self._last_listeners))
        except Exception as e:
            if self._is_dismissed:
                raise
            logger.warning(f"The DHT could not be started anew at its ports: {e}")
            self._start_as(Earlier((), self._last_listeners))
            self._earlier = Earlier(tuple(self._ready.result(0) or ()), self._last_listeners)

    def _start_as(self, earlier: Earlier) -> None:
        """Start the process again, which no process of multiprocessing's is meant for."""
        mp.process.BaseProcess.__init__(self, name=self.name, daemon=True)
        self._earlier, self._daemon, self._neighbours = earlier, DaemonRecord(), None
        self._inner_pipe, self._outer_pipe = mp.Pipe(duplex=False)
        self._ready = MPFuture()
        self._p2p_replica = None
        self.start()
        deadline = time.monotonic() + RESTART_TIMEOUT
        while True:
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                self._ready.result(0.2)
                return
            if self._is_dismissed or time.monotonic() > deadline:
                was_dismissed = self._is_dismissed
                self.kill()
                self._is_dismissed = was_dismissed
                raise TimeoutError(f"it does not answer within {RESTART_TIMEOUT:.0f} s")


@contextlib.contextmanager
def ending_with(dht: hivemind.DHT, process: WatchedProcess) -> Iterator[None]:
    """Let a process that is started meanwhile end with the DHT through whose daemon it talks to others.

    :param dht: of ours, or one of plain hivemind's, which is not started anew
    :raises ProcessEndedError: if that has ended already
    """
    if isinstance(dht, Restarting):
        dht.require()
        pid = dht.pid
        yield
        dht.support(process, pid)
        return
    yield
    if dht.pid is not None:
        BackgroundThread(
            target=_end_with_plain, args=(weakref.ref(process), dht.pid), name=f"end-with-{dht.pid}"
        ).start()


def _end_with_plain(reference: weakref.ref[WatchedProcess], dht_pid: int) -> None:
    parts = {dht_pid: Restarting.title, **dict.fromkeys(_daemons_of(dht_pid), "p2pd, the daemon of the DHT")}
    while not (ended := [pid for pid in parts if wait_for_exit(pid, LOOK_EVERY / len(parts))]):
        process = reference()
        if process is None or not process.is_alive():
            return
        del process
    if (process := reference()) is not None:
        process.end_with(ProcessEndedError(f"{parts[ended[0]]} (process {ended[0]}) {how_it_ended(None)}"))


def _daemons_of(dht_pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(dht_pid).children() if child.name() == "p2pd"]
    return []


def _not_started_anew(error: ProcessEndedError, reason: Exception) -> ProcessEndedError:
    return ProcessEndedError(f"{error}. It could not be started anew: {str(reason) or repr(reason)}")


async def _list_neighbours(dht: hivemind.DHT, node: DHTNode) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known = set(node.protocol.routing_table.peer_id_to_uid)
    connected = await node.p2p.list_peers()
    listeners = await node.p2p.listening_peers(connected)
    ours = [[peer for peer in peers if peer.peer_id in known] for peers in (connected, listeners)]
    return addresses_of(ours[0]), addresses_of(ours[1])
