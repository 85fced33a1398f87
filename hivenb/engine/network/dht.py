"""The DHT process: survives bad messages, dies with its daemon and this with it, and is then started anew."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import io
import multiprocessing as mp
import os
import pickle
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle
import hivemind
import psutil
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils import MPFuture, get_logger, switch_to_uvloop
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.access.ban_list import SharedBanList
from hivenb.engine.network.access.ban_list_sync import (
    BAN_LIST_KEY_ID,
    WAITS_AT_START,
    BanListRecords,
    keep_ban_list,
    look,
)
from hivenb.engine.network.access.guard import BANNED, EXPIRED, AdmissionStatus
from hivenb.engine.network.access.identity import identity_in, new_identity, prove
from hivenb.engine.network.access.strangers import disconnect_strangers
from hivenb.engine.network.access.tokens import InviteKey, Membership, Secret, membership_of
from hivenb.engine.network.addresses import Reach, is_loopback, is_of_one_link, routes
from hivenb.engine.network.clock import ClockStatus, compare_clocks
from hivenb.engine.network.daemon import (
    Admission,
    BlockedPeers,
    DaemonRecord,
    Earlier,
    Relaying,
    TiedP2P,
    addresses_of,
    start_daemon,
)
from hivenb.engine.network.node import KnownPeers, Node, find_lost_peers
from hivenb.engine.network.reachability import Way, WayFound, answer_who_asks, start_reachable
from hivenb.engine.network.records import Kind, RunRecords, SignatureValidator
from hivenb.engine.network.relays import LostPlaces, keep_place, start_relay
from hivenb.engine.network.untrusted_values import bound_this_process
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.engine.process.restart_count import RestartCount
from hivenb.engine.process.watched_child import LOOK_EVERY, AnsweredPipe, WatchedProcess, how_it_ended
from hivenb.errors import NotInvitedError, ProcessEndedError, SwarmError

# -- requests --------------------------------------------------------------------------------------------------------
#
# What the DHT's process is asked for: with functions and classes of cells, which it was forked too early to know.
#
# hivemind pickles them by their names. Its process cannot read such a request, and drops it with the future in it: who
# asked would wait for ever.


class _Pickler(cloudpickle.Pickler):
    """Packs what the main module defines by value, and as multiprocessing does what processes share."""

    dispatch_table: ClassVar[Any] = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]


class RequestPipe(AnsweredPipe):
    """The way into the DHT's process, whose messages :func:`request_in` reads."""

    def send(self, message: tuple[str, Any, dict[str, Any]]) -> None:
        method, args, kwargs = message
        answers = {name: value for name, value in kwargs.items() if isinstance(value, MPFuture)}
        others = {name: value for name, value in kwargs.items() if name not in answers}
        super().send((method, [_packed((args, others))], answers))


def request_in(message: bytes) -> tuple[str, Any, dict[str, Any]]:
    """Name of the method that is asked for, and its arguments; if they cannot be unpacked, who waits is told.

    :raises Exception: whatever came of unpacking it
    """
    method, (packed,), answers = pickle.loads(message)
    try:
        args, kwargs = pickle.loads(packed)
    except Exception as e:
        for answer in answers.values():
            answer.set_exception(
                SwarmError(
                    f"the DHT's process could not unpack what it was asked for: {type(e).__name__}: {e}. It has the "
                    "modules and the sys.path that there were when the swarm was opened or joined: define it in a cell "
                    "or in the main script, or import its module before"
                )
            )
        raise
    return method, args, {**kwargs, **answers}


def _packed(arguments: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(arguments)
    return file.getvalue()


# -- restarts --------------------------------------------------------------------------------------------------------
#
# What a DHT that is started anew has to know, and who ends with it.


logger = get_logger(__name__)

#: Seconds that a DHT which is started anew is given until it works.
RESTART_TIMEOUT = 30.0


class Neighbours:
    """With whom a DHT is connected, as seen some seconds ago."""

    def __init__(self) -> None:
        #: what it was asked last, until it has answered: addresses of connections, and at which the others listen
        self.answer: MPFuture | None = None
        #: addresses of connections to other peers, and those at which these listen
        self.connected: tuple[str, ...] = ()
        self.listeners: tuple[str, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether an answer is waited for."""
        return self.answer is not None

    def note(self) -> None:
        """Take in what it has answered, if it has; what it does not know any more stays."""
        if self.answer is None or not self.answer.done():
            return
        with contextlib.suppress(Exception):  # it may have ended meanwhile
            connected, listeners = self.answer.result()
            self.connected = connected or self.connected
            self.listeners = listeners or self.listeners
        self.answer = None


@contextlib.contextmanager
def ending_with(dht: hivemind.DHT, process: WatchedProcess) -> Iterator[None]:
    """Let a process that is started meanwhile end with the DHT through whose daemon it talks to others.

    :param dht: of ours, or one of plain hivemind's, which is not started anew
    :raises ProcessEndedError: if that has ended already
    """
    if isinstance(dht, DHT):
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
    parts = {dht_pid: DHT.title, **dict.fromkeys(_daemons_of(dht_pid), "p2pd, the daemon of the DHT")}
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


async def _join_also(initial_peers: Sequence[str], dht: DHT, node: DHTNode) -> None:
    dht._known_peers.join(initial_peers)


# -- dht -------------------------------------------------------------------------------------------------------------


#: Seconds that the daemon is given to start; hivemind's own 15 are too few on a busy free notebook.
STARTUP_TIMEOUT = 60.0

#: How much garbage the daemon, a Go program, lets pile up, in percent of what it uses; Go's own 100 cost 30 MB more.
DAEMON_GOGC = "20"

#: On how many processors the daemon of a relay runs. Of the two relays that it sets up, the one that was asked for is
#: the last one in nine of ten starts then, with the GOGC above, and in half of them on more: see ``start_relay``.
RELAY_GOMAXPROCS = "1"


_NOBODY = "the swarm does not let this peer in"


class DHT(WatchedProcess, hivemind.DHT):
    """``hivemind.DHT`` for a notebook kernel. Parameters and methods are those of ``hivemind.DHT``, and some more.

    It signs its records with a key of its own, :attr:`private_key`. hivemind has one key for each process instead,
    and two peers in one process count as one.

    When its process or its daemon ends by itself, both are started anew, as the same peer with the same object.
    Meanwhile, whoever asks it for something waits. What was asked before fails.

    :param secret: of a private swarm, or the key of an invite to it: this peer, and the averagers which use it, talk to
      members of that alone. Without one, they talk to everybody, as plain hivemind does
    :param client_mode: only connect to others, as behind a firewall that lets nobody in; ``None`` to find out from the
      initial peers whether they reach this one, which is else reached through them, if they relay, or is a client
    :param relay_service: whether its daemon relays between peers that cannot reach each other: all that they send, and
      in a private swarm between its members alone. By default as plain hivemind does where there is no secret
    :param is_walled: whether it is known, where that is to be found out, that nobody reaches this machine by itself
    """

    title = "the process of the DHT"

    _p2p_replica: P2P | None
    _parent_pid = None  # hivemind/dht/dht.py:__del__ asks for it, also of one whose making was interrupted

    def __init__(
        self,
        *args: Any,
        startup_timeout: float = STARTUP_TIMEOUT,
        record_validators: Iterable[RecordValidatorBase] = (),
        secret: Secret | InviteKey | str | None = None,
        relay_service: bool | None = None,
        is_walled: bool = False,
        **kwargs: Any,
    ):
        self.private_key, self._libp2p_key = RSAPrivateKey(), new_identity()
        #: why it is let into a private swarm; ``None`` in one that is open to all
        self.membership = membership = membership_of(secret)
        #: who is banned from it
        self.ban_list = ban_list = None if membership is None else SharedBanList(membership.key.admin)
        self._admission = Admission(membership, _relaying(relay_service, membership), ban_list)
        self._runs: set[str] = set()
        path = kwargs.get("identity_path")
        self._proving_key = self._libp2p_key if path is None else identity_in(path)
        # peers of plain hivemind's, who sign nothing, are only in swarms that are not private
        all_sign = membership is not None
        signatures = SignatureValidator(self.private_key, self._proving_key if all_sign else None, all_sign)
        validators: list[RecordValidatorBase] = [signatures, *record_validators]
        if membership is not None:
            signatures.kinds[BAN_LIST_KEY_ID] = Kind.BAN_LIST
            validators.append(BanListRecords(membership.key.admin))
        self._is_walled, self._found = is_walled, WayFound()
        #: to which nothing is answered, here and in the averagers that use this DHT
        self.blocked_peers = BlockedPeers()
        self._admission_status, self._clock, self._lost_places = AdmissionStatus(), ClockStatus(), LostPlaces()
        self._told_of_clock = False
        self._works = threading.Event()
        self._works.set()
        self._restarts = RestartCount()
        self._restarting = threading.Lock()
        self._restarter: threading.Thread | None = None
        self._daemon = DaemonRecord()
        self._earlier: Earlier | None = None
        self._neighbours = Neighbours()
        self._dependents: weakref.WeakSet[WatchedProcess] = weakref.WeakSet()
        super().__init__(
            *args,
            startup_timeout=startup_timeout,
            record_validators=validators,
            node_id=kwargs.pop("node_id", None) or DHTID.generate(),  # the same one when it is started anew
            **kwargs,
        )

    def add_validators(self, record_validators: Iterable[RecordValidatorBase]) -> None:
        validators = list(record_validators)
        self._record_validator.extend(validators)  # for the process that is started anew
        super().add_validators(validators)

    def know_run(self, run_id: str) -> None:
        """Let this node know the keys of a run: what stands there is its peers', each its own. Waits for the DHT."""
        if run_id not in self._runs:
            self._runs.add(run_id)
            self.add_validators([RunRecords(run_id)])

    def prove(self, statement: bytes) -> bytes:
        """A proof that this peer has said something; empty if its identity is an RSA key in a file."""
        return b"" if self._proving_key is None else prove(self._proving_key, statement)

    @property
    def _is_relay(self) -> bool:
        return self._admission.relaying is Relaying.ALL

    @property
    def reach(self) -> Reach:
        """How others reach this peer, as far as that is known."""
        return self._found.way.reach

    @property
    def routes(self) -> dict[str, Reach]:
        """How this peer is connected to others, and others to it, by their ids; as seen some seconds ago."""
        return routes(self._neighbours.connected) | {self.peer_id.to_base58(): self.reach}

    @property
    def clock_trouble(self) -> str | None:
        """That this machine's clock differs too much from those of other peers, in words; ``None`` if it does not."""
        return self._clock.trouble

    def require_invited(self) -> None:
        """Go on only while the others let this peer in.

        :raises NotInvitedError: if the invite has expired by which it came, or it was banned
        """
        if self.membership is not None and self.membership.key.has_expired:
            raise NotInvitedError(has_expired(self.membership.key))
        if (reason := self._admission_status.why_excluded) is not None:
            raise NotInvitedError(f"{_NOBODY}: {reason}. Ask for a new invite")

    # -- restarts -------------------------------------------------------------------------------------------------

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

    def restart_if_ended(self) -> None:
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

    def join_also(self, initial_peers: Sequence[str]) -> None:
        """Know further addresses of peers to join, such as those of a newer invite: they are looked for from now on.

        :param initial_peers: multiaddresses, with ids
        """
        known = [str(address) for address in self.initial_peers or ()]
        self.initial_peers = list(dict.fromkeys([*initial_peers, *known]))
        self.run_coroutine(partial(_join_also, list(initial_peers)), return_future=True)

    def shutdown(self) -> None:
        self._is_dismissed = True
        with self._restarting:  # if it is being started anew, that is given up
            super().shutdown()

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
        """Note with whom it is connected, to find them again, and whether its clock is as theirs."""
        if (trouble := self.clock_trouble) is not None and not self._told_of_clock:
            logger.warning(trouble)
        self._told_of_clock = trouble is not None
        self._neighbours.note()
        if not self._neighbours.is_asked and self._daemon.pid:
            # it is being closed; or torch's manager of shared memory does not answer, as on an overloaded machine
            with contextlib.suppress(OSError, RuntimeError):
                self._neighbours.answer = self.run_coroutine(_list_neighbours, return_future=True)

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
                if self._is_dismissed or (was_given_up and self.ended is not error):  # another thread has restarted it
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
            self._start_as(Earlier(got, self._neighbours.listeners))
        except Exception as e:
            if self._is_dismissed:
                raise
            logger.warning(f"The DHT could not be started anew at its ports: {e}")
            self._start_as(Earlier((), self._neighbours.listeners))
            self._earlier = Earlier(tuple(self._ready.result(0) or ()), self._neighbours.listeners)

    def _start_as(self, earlier: Earlier) -> None:
        """Start the process again, which no process of multiprocessing's is meant for."""
        mp.process.BaseProcess.__init__(self, name=self.name, daemon=True)
        self._earlier, self._daemon, self._neighbours.answer = earlier, DaemonRecord(), None
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

    # -- in its process -------------------------------------------------------------------------------------------

    def run(self) -> None:
        # Replaces hivemind/dht/dht.py:DHT.run, which sleeps three seconds for each message that cannot be read and
        # ends on most of them, and which leaves no room for a P2P class of our own.
        bound_this_process()  # what stands in records ends no process
        os.environ.setdefault("GOGC", DAEMON_GOGC)
        if self._is_relay:
            os.environ.setdefault("GOMAXPROCS", RELAY_GOMAXPROCS)
        loop = switch_to_uvloop()
        loop.run_until_complete(self._serve())
        loop.close()

    async def replicate_p2p(self) -> P2P:
        # Replaces hivemind/dht/dht.py:replicate_p2p, which knows hivemind's own P2P class only.
        if self._p2p_replica is None or self._origin_pid != os.getpid():
            self._origin_pid = os.getpid()
            self._p2p_replica = await self._replica_at(self.run_coroutine(DHT._get_p2p_daemon_listen_maddr))
        return self._p2p_replica

    async def _replica_at(self, daemon_listen_maddr: Any) -> TiedP2P:
        p2p = await TiedP2P.replicate(daemon_listen_maddr)
        p2p.admit_only(self.membership, self.ban_list)
        p2p.blocked = self.blocked_peers
        return p2p

    async def _serve(self) -> None:
        try:
            self._known_peers = KnownPeers(str(address) for address in self.initial_peers or ())
            self._node = await self._create_node()
        except Exception as e:
            self._ready.set_exception(e)
            return
        if self.ban_list is not None:
            await asyncio.wait([asyncio.create_task(look(self.ban_list, self._node))], timeout=WAITS_AT_START)
        messages: asyncio.Queue[tuple[str, Coroutine[Any, Any, Any]]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._inner_pipe.fileno(), self._receive, messages)
        self._ready.set_result([str(address) for address in await self._node.get_visible_maddrs()])
        tasks: set[asyncio.Task] = set()
        if self.ban_list is not None:
            tasks.add(asyncio.create_task(keep_ban_list(self.ban_list, self._node)))
            tasks.add(asyncio.create_task(disconnect_strangers(self._node)))
        tasks.add(asyncio.create_task(find_lost_peers(self._node, self._known_peers)))
        tasks.add(asyncio.create_task(compare_clocks(self._node, self._clock)))
        if relays := self._found.way.relays:
            tasks.add(asyncio.create_task(keep_place(self._node.p2p, relays, self._lost_places)))
        while True:
            method, request = await messages.get()
            if method == "_shutdown":
                self._daemon.is_to_end = True
            task = asyncio.create_task(request)
            tasks.add(task)  # the event loop itself keeps only weak references
            task.add_done_callback(partial(_finish, tasks))
            if method == "_shutdown":
                await task
                return

    async def _create_node(self) -> DHTNode:
        node_kwargs = {name: value for name, value in self.kwargs.items() if name in _NODE_PARAMETERS}
        initial_peers = self.initial_peers
        if self._daemon_listen_maddr is not None:
            p2p = await self._replica_at(self._daemon_listen_maddr)
        else:
            p2p, initial_peers = await self._start_daemon()
            self._daemon.watch(p2p)
            node_kwargs["client_mode"] = self.reach is Reach.NOT
        if self._earlier is not None:
            node_kwargs["ensure_bootstrap_success"] = False  # those who were there may have gone
        try:
            p2p.blocked = self.blocked_peers
            p2p.note_in(self._admission_status)
            node = await Node.create(
                p2p=p2p,
                initial_peers=initial_peers,
                num_workers=self.num_workers,
                record_validator=self._record_validator,
                **node_kwargs,
            )
            if self._daemon_listen_maddr is None:
                await answer_who_asks(p2p, self._is_relay)
        except BaseException:
            self._daemon.is_to_end = True
            await p2p.shutdown()
            if p2p.refusal or p2p.met_stranger:
                raise NotInvitedError(_why_not(p2p, self.membership)) from None
            raise
        node._should_shutdown_p2p = self._daemon_listen_maddr is None
        return node

    async def _start_daemon(self) -> tuple[TiedP2P, Any]:
        p2p_kwargs = {name: value for name, value in self.kwargs.items() if name not in _NODE_PARAMETERS}

        async def start(way: Way) -> tuple[TiedP2P, Any]:
            # a relay is one at once, and not when others have found out that it is reached
            kwargs = ({"force_reachability": "public"} if self._is_relay else {}) | p2p_kwargs | way.daemon
            once = partial(start_daemon, kwargs, self.initial_peers, self._libp2p_key, self._earlier, self._admission)
            return await (start_relay(once, map(str, kwargs.get("host_maddrs") or ())) if self._is_relay else once())

        addresses = [str(address) for address in self.initial_peers or ()]
        is_client = self.kwargs.get("client_mode", False)
        is_told = self._is_relay or any(map(p2p_kwargs.get, _TELLS_REACH))
        if self._earlier is None and is_client is None and not is_told and not all(map(is_loopback, addresses)):
            p2p, reached, self._found.way = await start_reachable(start, addresses, self._is_walled)
            return p2p, reached
        if is_client:
            self._found.way = Way(Reach.NOT)
        return await start(self._found.way)

    def _receive(self, messages: asyncio.Queue) -> None:
        while self._inner_pipe.poll():
            try:
                message = self._inner_pipe.recv_bytes()
            except (EOFError, OSError):
                asyncio.get_running_loop().remove_reader(self._inner_pipe.fileno())
                return
            try:
                method, args, kwargs = request_in(message)
                messages.put_nowait((method, getattr(self, method)(*args, **kwargs)))
            except Exception as e:
                # An averager that died takes along the descriptors of the messages it had sent: nobody waits for
                # their answer any more. Whoever else has sent what cannot be read has been told.
                logger.debug(f"Dropped a message that cannot be read: {e!r}")


def _relaying(relay_service: bool | None, membership: Membership | None) -> Relaying:
    if relay_service is None:
        return Relaying.A_LITTLE if membership is None else Relaying.NOTHING
    return Relaying.ALL if relay_service else Relaying.NOTHING


def _why_not(p2p: TiedP2P, membership: Membership | None) -> str:
    if membership is not None and membership.key.has_expired:
        return has_expired(membership.key)
    if not p2p.refusal:
        return (
            "the peers who answer have no credential for the swarm of the secret, or the invite, that was given. A "
            "swarm that is open to all, or has peers of plain hivemind, is joined by its addresses, without a secret"
        )
    if membership is None:
        return (
            "the swarm is private, and no secret was given: join it with its invite, or give secret= beside the "
            "addresses"
        )
    if p2p.refusal in (BANNED, EXPIRED):
        return f"{_NOBODY}: {p2p.refusal}. Ask for a new invite"
    return (
        "the swarm has another secret than the one given, or of which the invite was made. Has it been closed and "
        "opened anew since? Ask for a new invite, and copy it whole"
    )


def has_expired(key: InviteKey) -> str:
    """That an invite has expired, in words."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(key.expires))
    return f"the invite by which this peer came was good until {when}, and has expired; ask for a new invite"


def know_run(dht: hivemind.DHT, run_id: str) -> None:
    """Let a node know the keys of a run, if it is one of ours."""
    if isinstance(dht, DHT):
        dht.know_run(run_id)


def require_invited(dht: hivemind.DHT) -> None:
    """Go on only while the others let this peer in; one of plain hivemind's has no invite.

    :raises NotInvitedError: if the invite has expired by which it came, or it was banned
    """
    if isinstance(dht, DHT):
        dht.require_invited()


def _finish(tasks: set[asyncio.Task], task: asyncio.Task) -> None:
    tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        # the caller has received it through its future
        logger.debug(f"A request to the DHT failed: {task.exception()!r}")


def reachable_addresses(dht: hivemind.DHT) -> tuple[str, ...]:
    """Addresses of a DHT at which others can reach it; those of this machine alone only if there are no others."""
    addresses = [str(address) for address in dht.get_visible_maddrs(latest=True)]
    outside = [address for address in addresses if not (is_loopback(address) or is_of_one_link(address))]
    return tuple(outside or addresses)


#: Keyword arguments of a daemon with which somebody has said how it is reached.
_TELLS_REACH = ("announce_maddrs", "force_reachability")

_NODE_PARAMETERS = frozenset(inspect.signature(DHTNode.create).parameters) - {"kwargs"}
