"""Members talk, strangers get nothing: real daemons, real averagers, with and without plain hivemind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator as Items
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import hivemind
import psutil
import pytest
import torch
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError
from hivemind.proto import averaging_pb2
from tiny import LOOPBACK

from hivenb.engine.network.access import guarded_client
from hivenb.engine.network.access.tokens import Secret, membership_of
from hivenb.engine.network.daemon import NonRelayingP2P, Relaying, RelayingP2P, TiedP2P
from hivenb.engine.network.dht import DHT, reachable_addresses
from hivenb.engine.network.relays import RELAYED_BYTES
from hivenb.errors import NotInvitedError

SECRET, OTHER = Secret.random(), Secret.random()
BOUND = 60.0

Data = averaging_pb2.DownloadData
Request = averaging_pb2.DownloadRequest


class Echo(ServicerBase):
    """Answers what it is asked, at once and in a stream, and counts how often anything has come to it."""

    def __init__(self) -> None:
        self.asked = 0

    async def rpc_once(self, request: Data, context: P2PContext) -> Data:
        self.asked += 1
        return request

    async def rpc_stream(self, requests: AsyncIterator[Data], context: P2PContext) -> AsyncIterator[Data]:
        self.asked += 1
        async for request in requests:
            yield request


Talk = Callable[[Echo, Any, P2P], Awaitable[None]]


def talk(of_server: Secret | None, of_client: Secret | None, conversation: Talk, plain: bool = False) -> None:
    """Let one peer call another.

    :param of_server: its secret
    :param of_client: its secret
    :param conversation: given the server, a stub of it, and the caller
    :param plain: whether the caller is of plain hivemind
    """

    async def both() -> None:
        serving = await TiedP2P.create(host_maddrs=LOOPBACK["host_maddrs"])
        serving.admit_only(membership_of(of_server))
        kwargs = {"host_maddrs": LOOPBACK["host_maddrs"], "initial_peers": await serving.get_visible_maddrs()}
        calling: P2P = await (P2P if plain else TiedP2P).create(**kwargs)
        if isinstance(calling, TiedP2P):
            calling.admit_only(membership_of(of_client))
        try:
            server = Echo()
            await server.add_p2p_handlers(serving)
            await conversation(server, Echo.get_stub(calling, serving.peer_id), calling)
        finally:
            await calling.shutdown()
            await serving.shutdown()

    asyncio.run(asyncio.wait_for(both(), BOUND))


def part(text: str) -> Data:
    return Data(metadata=text.encode())


async def parts(*texts: str) -> AsyncIterator[Data]:
    for text in texts:
        yield part(text)


async def streamed(stub: Any, *texts: str) -> list[bytes]:
    answers: Items[Data] = await stub.rpc_stream(parts(*texts))
    return [answer.metadata async for answer in answers]


async def all_is_answered(server: Echo, stub: Any, calling: P2P) -> None:
    large = "x" * 1_000_000
    assert (await stub.rpc_once(part(large))).metadata == large.encode()
    assert await streamed(stub, "a", large, "b") == [b"a", large.encode(), b"b"]
    assert await streamed(stub) == []
    assert server.asked == 3


async def nothing_is_answered(server: Echo, stub: Any, calling: P2P) -> None:
    with pytest.raises(P2PHandlerError, match="this swarm is private"):
        await stub.rpc_once(part("let me in"))
    assert await streamed(stub, "let me in" * 10) == []
    assert server.asked == 0, "it was not even read"


@pytest.mark.process
def test_members_talk() -> None:
    talk(SECRET, SECRET, all_is_answered)


@pytest.mark.process
@pytest.mark.parametrize("plain", [True, False], ids=["plain hivemind", "hivenb"])
def test_without_a_secret_it_is_the_protocol_of_plain_hivemind(plain: bool) -> None:
    talk(None, None, all_is_answered, plain)


@pytest.mark.process
def test_a_stranger_with_another_secret_gets_nothing() -> None:
    talk(SECRET, OTHER, nothing_is_answered)


@pytest.mark.process
@pytest.mark.parametrize("plain", [True, False], ids=["plain hivemind", "hivenb"])
@pytest.mark.slow
def test_a_stranger_without_a_secret_gets_nothing(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_client, "PROVEN_WITHIN", 2.0)  # it is waited out: a stranger shows nothing
    talk(SECRET, None, nothing_is_answered, plain)


@pytest.mark.process
def test_what_a_stranger_answers_is_not_taken() -> None:
    """One who holds a leaked address, and answers whatever it is asked."""

    async def conversation(server: Echo, stub: Any, calling: P2P) -> None:
        async def lie(request: bytes, caller: Any) -> bytes:
            return request  # with the proof of the caller, which is the best that a stranger has

        async def lie_on(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(4096) + b"\x00" * 100)

        lying = await P2P.create(host_maddrs=LOOPBACK["host_maddrs"], initial_peers=await calling.get_visible_maddrs())
        try:
            await lying._client.add_unary_handler("Echo.rpc_once", lie)
            await lying.add_binary_stream_handler("Echo.rpc_stream", lie_on)
            to_liar = Echo.get_stub(calling, lying.peer_id)
            with pytest.raises(P2PHandlerError, match="has no credential for this swarm"):
                await to_liar.rpc_once(part("who are you?"))
            with pytest.raises(P2PHandlerError, match="has no credential for this swarm"):
                await streamed(to_liar, "who are you?")
        finally:
            await lying.shutdown()

    talk(SECRET, SECRET, conversation)


@pytest.mark.process
def test_a_member_that_cannot_answer_is_no_stranger() -> None:
    async def conversation(server: Echo, stub: Any, calling: P2P) -> None:
        assert isinstance(calling, TiedP2P)
        absent = Echo.get_stub(calling, stub._peer, namespace="not there")
        with pytest.raises((P2PHandlerError, P2PDaemonError)):
            await absent.rpc_once(part("anybody?"))
        assert not calling.met_stranger
        assert not calling.refusal

    talk(SECRET, SECRET, conversation)


@pytest.mark.process
def test_a_stream_of_one_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_client, "PROVEN_WITHIN", 0.5)

    async def conversation(server: Echo, stub: Any, calling: P2P) -> None:
        _, reader, writer = await calling.call_binary_stream_handler(stub._peer, "Echo.rpc_stream")
        assert await asyncio.wait_for(reader.read(1), BOUND / 2) == b""
        writer.close()
        assert server.asked == 0

    talk(SECRET, None, conversation, plain=True)


@pytest.mark.process
def test_streams_of_one_who_says_nothing_make_room_for_each_other() -> None:
    async def conversation(server: Echo, stub: Any, calling: P2P) -> None:
        opened = [await calling.call_binary_stream_handler(stub._peer, "Echo.rpc_stream") for _ in range(20)]
        reads = [asyncio.ensure_future(reader.read(1)) for _, reader, _ in opened]
        closed = asyncio.as_completed(reads, timeout=guarded_client.PROVEN_WITHIN / 2)
        assert [await next(closed) for _ in range(4)] == [b""] * 4
        assert sum(read.done() for read in reads) == 4
        for _, _, writer in opened:
            writer.close()
        assert server.asked == 0

    talk(SECRET, None, conversation, plain=True)


# -- whole peers --------------------------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:

        def add(made: Any) -> Any:
            stack.callback(made.shutdown)
            return made

        yield add


def join(other: DHT | hivemind.DHT, **kwargs: Any) -> DHT:
    return DHT(start=True, initial_peers=[str(a) for a in other.get_visible_maddrs()], **LOOPBACK, **kwargs)


@pytest.mark.process
def test_who_may_join_and_what_the_others_are_told(opened: Any) -> None:
    first = opened(DHT(start=True, secret=SECRET, **LOOPBACK))
    command = daemon_of(first).cmdline()
    assert "-relayService=0" in command
    assert not any(SECRET.reveal() in argument for argument in command)
    member = opened(join(first, secret=SECRET.reveal()))
    first.store("greeting", "hello", expiration_time=time.time() + 60)
    assert member.get("greeting", latest=True).value == "hello"
    with pytest.raises(NotInvitedError, match="is private, and no secret was given"):
        join(first)
    with pytest.raises(NotInvitedError, match="has another secret") as caught:
        join(first, secret=OTHER)
    assert OTHER.reveal() not in str(caught.value)
    with pytest.raises(RuntimeError, match="bootstrap failed"):
        hivemind.DHT(start=True, initial_peers=list(reachable_addresses(first)), host_maddrs=LOOPBACK["host_maddrs"])


@pytest.mark.process
def test_one_with_a_secret_does_not_take_an_open_swarm_for_its_own(opened: Any) -> None:
    plain = opened(hivemind.DHT(start=True, host_maddrs=LOOPBACK["host_maddrs"]))
    with pytest.raises(NotInvitedError, match=r"have no credential for the swarm.*plain hivemind"):
        join(plain, secret=SECRET)
    open_to_all = opened(join(plain))
    assert open_to_all.is_usable
    assert "-relayService=0" not in daemon_of(open_to_all).cmdline()


def average(averagers: list[hivemind.DecentralizedAverager]) -> list[Any]:
    return [one.result(BOUND) for one in [averager.step(wait=False, timeout=BOUND / 2) for averager in averagers]]


def make_averager(dht: hivemind.DHT, value: float) -> hivemind.DecentralizedAverager:
    tensors = [torch.full((3,), value)]
    return hivemind.DecentralizedAverager(
        tensors, dht=dht, prefix="guarded", start=True, target_group_size=2, min_matchmaking_time=2, request_timeout=1
    )


@pytest.mark.process
def test_averagers_have_the_secret_of_their_dht(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_client, "PROVEN_WITHIN", 1.0)
    # what is found of plain averagers here would be taken for that of their subclasses in all later tests
    monkeypatch.setattr(hivemind.DecentralizedAverager, "_rpc_handlers", None)
    monkeypatch.setattr(hivemind.DecentralizedAverager, "_stub_type", None)
    first = opened(DHT(start=True, secret=SECRET, **LOOPBACK))
    averagers = [
        opened(make_averager(dht, float(i))) for i, dht in enumerate((first, opened(join(first, secret=SECRET))))
    ]
    assert [len(group) for group in average(averagers)] == [2, 2]
    assert averagers[0].load_state_from_peers(timeout=BOUND / 2) is not None
    addresses = [address for averager in averagers for address in reachable_addresses(averager.dht)]
    assert len(asyncio.run(downloaded(addresses, SECRET))) >= 2, "there is something to be had"
    assert asyncio.run(downloaded(addresses, None)) == []


async def downloaded(addresses: list[str], secret: Secret | None) -> list[Any]:
    """What somebody gets who is connected to these peers, and knows what to ask for."""
    p2p = await TiedP2P.create(host_maddrs=LOOPBACK["host_maddrs"], initial_peers=addresses)
    p2p.admit_only(membership_of(secret))
    got = []
    try:
        for address in addresses:
            peer = PeerID.from_base58(address.rpartition("/")[2])
            stub = hivemind.DecentralizedAverager.get_stub(p2p, peer, namespace="guarded")
            got += [message async for message in await stub.rpc_download_state(Request())]
    finally:
        await p2p.shutdown()
    return got


@pytest.mark.process
def test_a_dht_that_is_started_anew_has_its_secret_still(opened: Any, eventually: Any) -> None:
    first = opened(DHT(start=True, secret=SECRET, **LOOPBACK))
    second = opened(join(first, secret=SECRET))
    for part in ("process", "daemon"):
        eventually(lambda: first._neighbours.connected)
        before = first.pid
        os.kill(before if part == "process" else daemon_of(first).pid, signal.SIGKILL)
        eventually(lambda before=before: first.pid not in (before, None))

        def reads(key: str = f"after that of the {part}") -> Any:
            with suppress(Exception):  # what was asked while it was started anew
                second.store(key, "here", expiration_time=time.time() + 60)
                return first.get(key, latest=True)
            return None

        eventually(reads)
        with pytest.raises(NotInvitedError, match="no secret was given"):
            join(first)


def daemon_of(dht: hivemind.DHT) -> psutil.Process:
    return next(child for child in psutil.Process(dht.pid).children() if child.name() == "p2pd")


# -- relays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "asked_to", "relaying"),
    [
        (None, None, Relaying.A_LITTLE),
        (None, False, Relaying.NOTHING),
        (None, True, Relaying.ALL),
        (SECRET, None, Relaying.NOTHING),
        (SECRET, True, Relaying.ALL),
    ],
)
def test_who_relays_for_strangers(secret: Secret | None, asked_to: bool | None, relaying: Relaying) -> None:
    dht = DHT(start=False, secret=secret, relay_service=asked_to, **LOOPBACK)
    assert dht._admission.relaying is relaying


def test_what_is_added_is_an_argument_of_the_daemon() -> None:
    arguments = NonRelayingP2P._make_process_args("p2pd", relay=True)
    assert arguments[-2:] == ["-relay=1", "-relayService=0"]
    arguments = TiedP2P._make_process_args("p2pd", trustedRelays="x")
    assert arguments[-2:] == ["-trustedRelays=x", "-relayDiscovery=0"], "each daemon relays a little, and is found"
    arguments = RelayingP2P._make_process_args("p2pd", relay=True)
    assert {"-relayService=1", f"-relayDataLimit={RELAYED_BYTES}", "-relayTimeLimit=168h"} < set(arguments)
