"""How far this machine's clock is from those of the other peers.

What a peer writes expires by its own clock, and is read by theirs: with a clock that is half a minute behind, nobody
sees it, and it sees nobody. hivemind compares clocks when a peer joins, and never again; a machine that sleeps may wake
with another one.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import random
import statistics
from multiprocessing.sharedctypes import RawValue

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time, get_logger

logger = get_logger(__name__)

#: Seconds between two comparisons, and that an answer may take.
COMPARE_EVERY, ANSWERED_WITHIN = 30.0, 5.0

#: Peers that are asked at a time: of three, one that says what it likes changes nothing.
ASKED = 3

#: Seconds by which clocks may differ, without a word.
MOST_APART = 5.0


class ClockStatus:
    """What is known of this machine's clock, for the process of the DHT and the one that has started it."""

    def __init__(self) -> None:
        self._behind = RawValue(ctypes.c_double, 0.0)

    def note(self, behind: float) -> None:
        """Know by how much it is behind those of others, in seconds; less than 0 where it is ahead."""
        self._behind.value = behind

    @property
    def trouble(self) -> str | None:
        """That it differs too much from those of others, in words; ``None`` if it does not."""
        behind = self._behind.value
        if abs(behind) <= MOST_APART:
            return None
        return (
            f"The clock of this machine is {abs(behind):,.0f} s {'behind' if behind > 0 else 'ahead of'} those of the "
            "other peers, so that they do not see what it writes, or it does not see them. Set the one that is wrong, "
            "by `timedatectl set-ntp true` or, in WSL, `sudo hwclock -s`"
        )


async def compare_clocks(node: DHTNode, status: ClockStatus) -> None:
    """Compare this machine's clock with those of some peers, again and again, for as long as the DHT runs."""
    while True:
        await asyncio.sleep(COMPARE_EVERY)
        connected = list(node.protocol.routing_table.peer_id_to_uid)
        asked = random.sample(connected, min(ASKED, len(connected)))
        answers = await asyncio.gather(*(_seconds_ahead(peer, node) for peer in asked))
        known = [one for one in answers if one is not None]
        if len(known) == ASKED:
            status.note(statistics.median(known))
        elif known or not asked:  # of two, either may be wrong
            status.note(min(known, key=abs, default=0.0))


async def _seconds_ahead(peer: PeerID, node: DHTNode) -> float | None:
    """By how much the clock of a peer is ahead of this machine's; ``None`` if it does not say."""
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    stub = DHTProtocol.get_stub(node.protocol, peer)
    asked_at = get_dht_time()
    try:
        response = await stub.rpc_ping(request, timeout=ANSWERED_WITHIN)
    except (P2PDaemonError, P2PHandlerError, OSError, EOFError, asyncio.TimeoutError) as e:
        logger.debug(f"{peer} does not say what time it is: {e!r}")
        return None
    ahead = response.dht_time - (asked_at + get_dht_time()) / 2
    return ahead if response.dht_time and math.isfinite(ahead) else None
