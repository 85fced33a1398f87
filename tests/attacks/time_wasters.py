"""Attacks that waste the others' time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from attacks import hostile_peer, raw_peer
from attacks.attacked_swarm import OPTIONS, RUN_ID, pace_under
from attacks.case import Attack, Outcome
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from tiny import LOOPBACK

import hivenb.engine.averaging.state_download as state_download
import hivenb.engine.matchmaking.matchmaking as search
import hivenb.engine.network.access.streams as stream_limits
import hivenb.engine.network.daemon as message_limits
import hivenb.engine.optimizer.catch_up as unverified_claims
import hivenb.engine.trust.reliability as reliability
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.dht import DHT

#: Megabytes of the message.
_HUGE = 400

#: Megabytes that a process may grow by meanwhile.
_TOLERATED = 60

#: Streams that are opened for nothing.
_SILENT = 250

#: Descriptors for them that a process may need at most, in part for the daemon's side of them.
_MOST_DESCRIPTORS = 180

#: Seconds for which the state is downloaded in a loop.
_DOWNLOADING = 10.0

#: Share of its pace that a swarm keeps, in the first seconds of an attack and later.
_HELD = 0.7

#: Seconds after which each victim has been kept waiting twice, and knows by whom: 35 on a machine that is quiet.
_JUDGED = 75.0

#: The same, of one that takes part in every second round: it is forgiven a few times.
_JUDGED_LATE = 150.0

#: Times its pace of a swarm that one peer has joined, which trains with the others: half as much again, and a margin.
_NO_SHORTER = 2.0


def _forget_reliability() -> None:
    def forget(self: Any, epoch: int) -> tuple[Any, ...]:
        return ()

    reliability.PeerReliability.excluded_peers = forget  # type: ignore[method-assign]
    search.LeadersOfASearch.may_be_asked = lambda self, leader: True  # type: ignore[method-assign]


def _under(attack: Callable[[str], Any], seconds: float = 30.0, warm_up: float = 10.0) -> Outcome:
    pace = pace_under(attack, seconds, warm_up=warm_up)
    return Outcome(pace.share >= _HELD, str(pace))


def _lists_itself() -> Outcome:
    return _under(lambda invite: hostile_peer.start(hostile_peer.list_itself, invite, RUN_ID))


def _claims_an_epoch() -> Outcome:
    return _under(lambda invite: hostile_peer.start(hostile_peer.claim_an_epoch, invite, RUN_ID), warm_up=25.0)


def _believe_epochs() -> None:
    unverified_claims.UnverifiedClaims.excluded_peers = lambda self: ()  # type: ignore[method-assign]


def _reports_samples() -> Outcome:
    """Epochs of fewer samples than were asked for are over sooner."""
    attack = partial(hostile_peer.start, hostile_peer.train_and, hostile_peer.report_samples)
    pace = pace_under(lambda invite: attack(invite, OPTIONS), 30.0, warm_up=25.0)
    return Outcome(pace.share <= _NO_SHORTER, str(pace))


def _stalls(change: Callable[[], None]) -> Outcome:
    attack = partial(hostile_peer.start, hostile_peer.train_and, change)
    warm_up = _JUDGED_LATE if change is hostile_peer.stall_by_turns else _JUDGED
    return _under(lambda invite: attack(invite, OPTIONS), warm_up=warm_up)


# -- memory ---------------------------------------------------------------------------------------------------------


async def _send_huge(p2p: P2P, victim: PeerID, handler: str) -> None:
    _, _, writer = await p2p.call_binary_stream_handler(victim, handler)
    writer.write(P2P.MESSAGE_MARKER + (_HUGE << 20).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    chunk = bytes(1 << 20)
    with contextlib.suppress(OSError):  # the victim closes the stream
        for _ in range(_HUGE):
            writer.write(chunk)
            await writer.drain()
        await asyncio.sleep(1.0)


def _megabytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def _descriptors(process: psutil.Process) -> float:
    return float(process.num_fds())


@contextlib.contextmanager
def _growth(of: Callable[[psutil.Process], float]) -> Iterator[list[float]]:
    """By how much a child of this process grows at most; told at the end."""
    before = {process: of(process) for process in psutil.Process().children(recursive=True)}
    largest, is_over = [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            largest[0] = max(largest[0], *(of(process) - known for process, known in before.items()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield largest
    finally:
        is_over.set()
        looking.join()


@contextlib.contextmanager
def _averager() -> Iterator[tuple[list[str], Callable[[str], str]]]:
    """An averager that anybody can call: its addresses, and what tells the full name of a method."""
    dht = DHT(start=True, **LOOPBACK)
    averager = GradientAverager([torch.nn.Parameter(torch.zeros(3))], dht=dht, prefix=RUN_ID, start=True)
    try:
        yield [str(one) for one in dht.get_visible_maddrs()], partial(averager._get_handle_name, RUN_ID)
    finally:
        averager.shutdown()
        dht.shutdown()


def _attack(deed: raw_peer.Deed, addresses: list[str], *args: Any) -> None:
    attacker = raw_peer.start(deed, addresses, *args)
    attacker.join(60)
    attacker.kill()


def _huge_message() -> Outcome:
    with _averager() as (addresses, name), _growth(_megabytes) as grown:
        _attack(_send_huge, addresses, name("rpc_aggregate_part"))
    return Outcome(grown[0] < _TOLERATED, f"{grown[0]:.0f} MB more for a message of {_HUGE} MB")


# -- descriptors and downloads --------------------------------------------------------------------------------------


async def _be_silent(p2p: P2P, victim: PeerID, handler: str) -> None:
    opened = []
    for _ in range(_SILENT):
        with contextlib.suppress(Exception):  # libp2p's daemon has a limit of its own
            opened.append(await p2p.call_binary_stream_handler(victim, handler))
    await asyncio.sleep(3.0)


def _silent_streams() -> Outcome:
    with _averager() as (addresses, name), _growth(_descriptors) as grown:
        _attack(_be_silent, addresses, name("rpc_join_group"))
    return Outcome(grown[0] < _MOST_DESCRIPTORS, f"{grown[0]:.0f} descriptors more for {_SILENT} silent streams")


async def _download(p2p: P2P, victim: PeerID, handler: str, tell: Connection) -> None:
    count, end = 0, time.monotonic() + _DOWNLOADING
    while time.monotonic() < end:
        request, kind = averaging_pb2.DownloadRequest(), averaging_pb2.DownloadData
        with contextlib.suppress(P2PHandlerError, P2PDaemonError, OSError):
            async with contextlib.aclosing(await p2p.iterate_protobuf_handler(victim, handler, request, kind)) as state:
                async for message in state:
                    count += bool(message.metadata)
                    break
    tell.send(count)


def _downloads_in_a_loop() -> Outcome:
    told, tell = mp.Pipe(duplex=False)
    with _averager() as (addresses, name):
        _attack(_download, addresses, name("rpc_download_state"), tell)
    count = told.recv() if told.poll() else 0
    return Outcome(0 < count < 2.5 * _DOWNLOADING, f"{count} downloads in {_DOWNLOADING:.0f} s")


def _open_all() -> None:
    stream_limits.MOST_STREAMS = 1 << 30


def _download_all() -> None:
    state_download.PERIOD = 0.0


def _read_all() -> None:
    async def readexactly(self: message_limits.BoundedReader, count: int) -> bytes:
        return await self._reader.readexactly(count)

    message_limits.BoundedReader.readexactly = readexactly  # type: ignore[method-assign]


_STALLS = {
    "sends-nothing": ("joins each group, and has no part for anybody", hostile_peer.send_nothing),
    "stalls-by-turns": ("has no part for anybody in each second round", hostile_peer.stall_by_turns),
    "trickles": ("joins each group, and sends a byte now and then", hostile_peer.trickle),
    "never-averages": (
        "joins each group, takes the parts of the others and answers nothing",
        hostile_peer.never_average,
    ),
    "never-begins": ("lets the others into its group, and does not begin", hostile_peer.never_begin),
}

ATTACKS = [
    Attack("one-huge-message", f"sends a message of {_HUGE} MB", _read_all, _huge_message),
    Attack("silent-streams", f"opens {_SILENT} streams, and says nothing in them", _open_all, _silent_streams),
    Attack("downloads-in-a-loop", "downloads the state again and again", _download_all, _downloads_in_a_loop),
    Attack(
        "lists-itself",
        "is on the list of peers, and comes to no round",
        _forget_reliability,
        _lists_itself,
        seconds=150.0,
    ),
    Attack(
        "claims-an-epoch",
        "reports epoch 1,000,000,000, of which nobody has a state",
        _believe_epochs,
        _claims_an_epoch,
        seconds=150.0,
    ),
    Attack(
        "reports-samples",
        "trains with the others, and reports more samples than it has",
        _forget_reliability,
        _reports_samples,
        seconds=150.0,
    ),
    *(
        Attack(name, about, _forget_reliability, partial(_stalls, change), seconds=300.0)
        for name, (about, change) in _STALLS.items()
    ),
]
