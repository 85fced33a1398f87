"""Lines between peers of one event loop, in place of libp2p's daemon: with delay, jitter, rate and loss; to be cut.

All above the daemon is real: hivenb's ``TiedP2P``, the framing of messages, and how streams end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.network.daemon import TiedP2P
from in_memory.clock import spawn

#: Seconds after which a daemon gives up to reach a peer that does not answer at all.
DIAL_TIMEOUT = 5.0

#: Seconds after which it gives up a connection on which nothing comes through.
KEPT_ALIVE = 40.0

#: Seconds after which TCP sends what was lost once more.
SENT_AGAIN_AFTER = 0.3

#: Seconds by which a line may be behind what is to be sent, before whoever writes to it has to wait.
BUFFERED = 0.1


@dataclass(frozen=True)
class Message:
    """What was written to a stream at once.

    :param handler: name of what answers the stream
    :param is_answer: whether it goes to the one that has opened it
    """

    sender: PeerID
    receiver: PeerID
    handler: str
    is_answer: bool
    data: bytes


@dataclass
class Host:
    """A peer, as the others see it.

    :param tasks: that are its own, with all that answer others
    :param rate: bytes that it can send in a second; ``None`` for any number
    :param free_at: when its line has sent all that it was given
    """

    peer_id: PeerID
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    unary: dict[str, Callable[..., Awaitable[bytes]]] = field(default_factory=dict)
    handlers: dict[str, Callable[..., Awaitable[None]]] = field(default_factory=dict)
    connected: set[PeerID] = field(default_factory=set)
    is_alive: bool = True
    rate: float | None = None
    free_at: float = 0.0


class Network:
    """All lines. By default each message takes some 20 milliseconds.

    :param seed: of what is random on them
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.hosts: dict[PeerID, Host] = {}
        self.latency, self.jitter, self.loss = 0.02, 0.005, 0.0
        self._cut: set[frozenset[PeerID]] = set()
        self._streams: list[_Direction] = []
        self._healed = asyncio.Event()
        #: called with each message; whether its stream breaks before it arrives
        self.breaks: Callable[[Message], bool] = lambda message: False
        #: requests and streams to each handler
        self.asked: Counter[str] = Counter()

    def p2p_of(self, peer_id: PeerID) -> TiedP2P:
        """What a peer that comes now talks to the others through."""
        self.hosts.setdefault(peer_id, Host(peer_id))
        return _P2P(_Control(self, self.hosts[peer_id]))

    # -- what becomes of it -------------------------------------------------------------------------------------

    def kill(self, peer_id: PeerID) -> None:
        """End a peer at once: its tasks stop where they are, and its connections break."""
        host = self.hosts[peer_id]
        host.is_alive = False
        for direction in list(self._streams):
            if peer_id in (direction.sender, direction.receiver):
                direction.break_off()
        for task in list(host.tasks):
            task.cancel()
        for other in self.hosts.values():
            other.connected.discard(peer_id)

    def cut(self, one: PeerID, *others: PeerID) -> None:
        """Let nothing through between a peer and some others, all if none are named; nobody is told."""
        for other in others or self.hosts:
            self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """Let all through again, with what has waited for it."""
        self._cut.clear()
        self._healed.set()
        self._healed = asyncio.Event()
        for direction in list(self._streams):
            direction.let_through()

    def is_cut(self, one: PeerID, other: PeerID) -> bool:
        """Whether nothing comes through."""
        return one != other and frozenset((one, other)) in self._cut

    async def stop_if_dead(self, peer_id: PeerID) -> None:
        """Let what goes on in spite of being cancelled, as a round that is tried again, go no further."""
        if not self.hosts[peer_id].is_alive:
            await asyncio.get_running_loop().create_future()

    # -- what travels -------------------------------------------------------------------------------------------

    def arrival(self, sender: PeerID, size: int) -> float:
        """When something would arrive that is sent now."""
        now, host = asyncio.get_running_loop().time(), self.hosts[sender]
        host.free_at = max(now, host.free_at) + (0.0 if host.rate is None else size / host.rate)
        late = SENT_AGAIN_AFTER if self.random.random() < self.loss else 0.0
        return host.free_at + self.latency + self.jitter * self.random.random() + late

    async def travel(self, sender: PeerID, receiver: PeerID, size: int = 0) -> None:
        """Wait until something has arrived.

        :raises ControlFailure: if the receiver is not there, or is not to be reached for long
        """
        loop = asyncio.get_running_loop()
        await self.stop_if_dead(sender)
        await asyncio.sleep(self.arrival(sender, size) - loop.time())
        is_connected = receiver in self.hosts[sender].connected
        given_up_at = loop.time() + (KEPT_ALIVE if is_connected else DIAL_TIMEOUT)
        while self.is_cut(sender, receiver):
            healing = asyncio.ensure_future(self._healed.wait())
            try:
                done, _ = await asyncio.wait({healing}, timeout=max(0.0, given_up_at - loop.time()))
            finally:
                healing.cancel()
            if not done:
                raise ControlFailure(f"failed to dial {receiver}: i/o timeout")
        if receiver not in self.hosts or not self.hosts[receiver].is_alive:
            raise ControlFailure(f"failed to dial {receiver}: connection refused")
        if sender != receiver:
            self.hosts[sender].connected.add(receiver)
            self.hosts[receiver].connected.add(sender)

    def open(self, opener: PeerID, callee: PeerID, handler: str) -> tuple[_Direction, _Direction]:
        """Both ways of a new stream."""
        there, back = _Direction(self, opener, callee, handler), _Direction(self, callee, opener, handler, True)
        there.other, back.other = back, there
        self._streams += [there, back]
        return there, back

    def forget(self, direction: _Direction) -> None:
        """Know of a stream that is over."""
        with contextlib.suppress(ValueError):
            self._streams.remove(direction)


class _Direction:
    """One way of a stream: what its sender writes to, and its receiver reads."""

    other: _Direction

    def __init__(self, network: Network, sender: PeerID, receiver: PeerID, handler: str, is_answer: bool = False):
        self.network, self.sender, self.receiver = network, sender, receiver
        self.handler, self.is_answer = handler, is_answer
        self.reader = asyncio.StreamReader()
        self.is_closed = False
        self._buffer, self._flushes = bytearray(), False
        self._last = 0.0
        #: on its way, and what has come to where the line is cut
        self._sent: deque[bytes | None] = deque()
        self._arrived: deque[bytes | None] = deque()

    # -- as an asyncio.StreamWriter -----------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        self._buffer += data
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def drain(self) -> None:
        self._flush()
        if self.is_closed:
            raise ConnectionResetError("Connection lost")
        behind = self.network.hosts[self.sender].free_at - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, behind - BUFFERED))

    def close(self) -> None:
        """Close both ways, as a socket; what was written arrives."""
        if not self.is_closed:
            self._flush()
            self.is_closed = True
            self._send(None)
            if not self.other.reader.at_eof():
                self.other.reader.feed_eof()

    def is_closing(self) -> bool:
        return self.is_closed

    async def wait_closed(self) -> None:
        return

    # -- on the line --------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flushes = False
        if self._buffer and not self.is_closed:
            data, self._buffer = bytes(self._buffer), bytearray()
            self._send(data)

    def _send(self, data: bytes | None) -> None:
        if data is not None and self.network.breaks(self._message(data)):
            self.break_off()
            self.other.break_off()
            return
        size = 0 if data is None else len(data)
        self._last = max(self._last, self.network.arrival(self.sender, size))
        self._sent.append(data)  # timers of one moment come in any order
        asyncio.get_running_loop().call_at(self._last, self._arrive)

    def _message(self, data: bytes) -> Message:
        return Message(self.sender, self.receiver, self.handler, self.is_answer, data)

    def _arrive(self) -> None:
        self._arrived.append(self._sent.popleft())
        self.let_through()

    def let_through(self) -> None:
        """Hand on what has arrived, unless the line is cut."""
        while self._arrived and not self.network.is_cut(self.sender, self.receiver):
            data = self._arrived.popleft()
            if data is None:
                self.break_off()
                self.other.is_closed = True
            elif not self.reader.at_eof():
                with contextlib.suppress(AssertionError):  # its receiver has closed it
                    self.reader.feed_data(data)

    def break_off(self) -> None:
        """Let nothing more through; whoever reads it sees its end."""
        self.is_closed = True
        self.reader.feed_eof()
        self.network.forget(self)


class _Control:
    """In place of hivemind's connection to a daemon, ``ControlClient``."""

    def __init__(self, network: Network, host: Host):
        self._network, self._host, self._own = network, host, host.peer_id

    async def identify(self) -> tuple[PeerID, tuple[Multiaddr, ...]]:
        return self._own, ()

    async def connect(self, peer_id: PeerID, maddrs: Sequence[Multiaddr]) -> None:
        if peer_id not in self._host.connected:
            await self._network.travel(self._own, peer_id)

    async def disconnect(self, peer_id: PeerID) -> None:
        self._host.connected.discard(peer_id)
        self._network.hosts[peer_id].connected.discard(self._own)

    async def list_peers(self) -> tuple[PeerInfo, ...]:
        return tuple(PeerInfo(peer, ()) for peer in sorted(self._host.connected))

    async def stream_handler(self, proto: str, handler_cb: Any, balanced: bool = False) -> None:
        self._host.handlers[proto] = handler_cb

    async def remove_stream_handler(self, proto: str) -> None:
        self._host.handlers.pop(proto, None)

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        self._host.unary[proto] = handler

    async def remove_unary_handler(self, proto: str) -> None:
        self._host.unary.pop(proto, None)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[_Control]:
        yield self

    def close(self) -> None:
        """Nothing is open."""

    async def stream_open(self, peer_id: PeerID, protocols: Sequence[str]) -> tuple[StreamInfo, Any, Any]:
        (name,) = protocols
        await self._network.stop_if_dead(self._own)
        if peer_id not in self._host.connected:
            await self._network.travel(self._own, peer_id)
            await self._network.travel(peer_id, self._own)
        # over a connection that is there, libp2p waits for no answer
        there, back = self._network.open(self._own, peer_id, name)
        spawn(self._network.hosts[peer_id].tasks, self._be_opened(there, back))
        return StreamInfo(peer_id, Multiaddr("/ip4/127.0.0.1/tcp/1"), name), back.reader, there

    async def _be_opened(self, there: _Direction, back: _Direction) -> None:
        callee, name = self._network.hosts[there.receiver], there.handler
        try:
            await self._network.travel(self._own, there.receiver)
        except P2PDaemonError:
            there.break_off()
            back.break_off()
            return
        if name not in callee.handlers:
            back.close()
            return
        self._network.asked[name] += 1
        info = StreamInfo(self._own, Multiaddr("/ip4/127.0.0.1/tcp/1"), name)
        await callee.handlers[name](info, there.reader, back)

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        await self._network.travel(self._own, peer_id, len(data))
        callee = self._network.hosts[peer_id]
        if proto not in callee.unary:
            raise P2PDaemonError(f"{peer_id} does not know {proto}")
        self._network.asked[proto] += 1
        answering = spawn(callee.tasks, callee.unary[proto](data, self._own))
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
        if answering.cancelled():
            raise P2PDaemonError(f"the connection to {peer_id} was lost")
        if (error := answering.exception()) is not None:
            raise P2PHandlerError(f"{error!r}")
        await self._network.travel(peer_id, self._own, len(answering.result()))
        return answering.result()


class _P2P(TiedP2P):
    """All that hivenb has above the daemon."""

    def __init__(self, control: _Control):
        super().__init__()
        self._daemon_listen_maddr = self._client_listen_maddr = "in memory"
        self._alive = True
        self.peer_id = control._own
        self._client = Client(_initialized_with_create=True)
        self._client.control = control
        self.admit_only(None)
