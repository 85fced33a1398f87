"""Attacks that waste the others' time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch
from attacks import hostile_peer, raw_peer
from attacks.attacked_swarm import OPTIONS, RUN_ID, pace_under
from attacks.case import Attack, Outcome
from hivemind.p2p import P2P, PeerID
from tiny import LOOPBACK

import hivenb.engine.dht.message_limits as message_limits
import hivenb.engine.rounds.conduct as conduct
import hivenb.engine.rounds.search as search
from hivenb.engine.averagers.gradient_averagers import GradientAverager
from hivenb.engine.dht.dht import DHT

#: Megabytes of the message.
_HUGE = 400

#: Megabytes that a process may grow by meanwhile.
_TOLERATED = 60

#: Share of its pace that a swarm keeps, in the first seconds of an attack and later.
_HELD = 0.5


def _forget_conduct() -> None:
    def forget(self: Any, epoch: int) -> tuple[Any, ...]:
        return ()

    conduct.Conduct.left_out = forget  # type: ignore[method-assign]
    search.LeadersOfASearch.may_be_asked = lambda self, leader: True  # type: ignore[method-assign]


def _under(attack: Callable[[str], Any], seconds: float = 30.0, warm_up: float = 10.0) -> Outcome:
    pace = pace_under(attack, seconds, warm_up=warm_up)
    return Outcome(pace.share >= _HELD, str(pace))


def _lists_itself() -> Outcome:
    return _under(lambda invite: hostile_peer.start(hostile_peer.list_itself, invite, RUN_ID))


def _stalls(change: Callable[[], None]) -> Outcome:
    return _under(lambda invite: hostile_peer.start(hostile_peer.train_and, change, invite, OPTIONS), warm_up=25.0)


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


@contextlib.contextmanager
def _growth(processes: list[psutil.Process]) -> Iterator[list[float]]:
    """Megabytes by which one of them has grown at most; told at the end."""
    before = {process: process.memory_info().rss for process in processes}
    largest, is_over = [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            grown = max(process.memory_info().rss - before[process] for process in processes)
            largest[0] = max(largest[0], grown / 2**20)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield largest
    finally:
        is_over.set()
        looking.join()


def _huge_message() -> Outcome:
    dht = DHT(start=True, **LOOPBACK)
    averager = GradientAverager([torch.nn.Parameter(torch.zeros(3))], dht=dht, prefix=RUN_ID, start=True)
    handler = averager._get_handle_name(RUN_ID, "rpc_aggregate_part")
    try:
        with _growth(psutil.Process().children(recursive=True)) as grown:
            attacker = raw_peer.start(_send_huge, [str(one) for one in dht.get_visible_maddrs()], handler)
            attacker.join(60)
    finally:
        attacker.kill()
        averager.shutdown()
        dht.shutdown()
    return Outcome(grown[0] < _TOLERATED, f"{grown[0]:.0f} MB more for a message of {_HUGE} MB")


def _read_all() -> None:
    async def readexactly(self: message_limits.BoundedReader, count: int) -> bytes:
        return await self._reader.readexactly(count)

    message_limits.BoundedReader.readexactly = readexactly  # type: ignore[method-assign]


_STALLS = {
    "sends-nothing": ("joins each group, and has no part for anybody", hostile_peer.send_nothing),
    "trickles": ("joins each group, and sends a byte now and then", hostile_peer.trickle),
    "never-averages": (
        "joins each group, takes the parts of the others and answers nothing",
        hostile_peer.never_average,
    ),
    "never-begins": ("lets the others into its group, and does not begin", hostile_peer.never_begin),
}

ATTACKS = [
    Attack("one-huge-message", f"sends a message of {_HUGE} MB", _read_all, _huge_message),
    Attack(
        "lists-itself", "is on the list of peers, and comes to no round", _forget_conduct, _lists_itself, seconds=150.0
    ),
    *(
        Attack(name, about, _forget_conduct, partial(_stalls, change), seconds=150.0)
        for name, (about, change) in _STALLS.items()
    ),
]
