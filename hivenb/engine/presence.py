"""Who of those on the swarm's list is really there: whoever has not reported for a second is asked.

A peer that leaves without a goodbye stays on the list until its last report expires, and each round of the others
would wait for it until the deadline of matchmaking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MPFuture, get_logger

logger = get_logger(__name__)

#: Seconds without a new report after which a peer is asked, and between two questions to it. One that trains reports
#: once a second at least.
ASK_AFTER = 1.2

#: Questions under way at a time; in a large swarm of slow peers nearly everybody is silent for a second.
MAX_QUESTIONS = 8


@dataclass
class _Sighting:
    """What is known of a peer since its last report.

    :param reported_at: time of that report, by the peer's own clock
    :param asked_at: when it was last asked or heard of, by ours
    :param was_reached: whether it has ever answered; one that we could never reach may be there for others
    :param is_gone: whether it could be reached before, and no longer can
    """

    reported_at: float
    asked_at: float
    was_reached: bool = False
    is_gone: bool = False
    answer: MPFuture | None = None


class Presence:
    """Watches the peers of a swarm. To be used by one thread.

    :param dht: which asks them
    """

    def __init__(self, dht: hivemind.DHT):
        self._dht = dht
        self._sightings: dict[bytes, _Sighting] = {}

    def find_gone(self, reports: Iterable[LocalTrainingProgress]) -> frozenset[bytes]:
        """Ids of the peers that have gone without a goodbye. Does not wait: whoever is asked now is known later.

        :param reports: the last one of each peer, without this one's own
        """
        present = {report.peer_id: report for report in reports if not report.client_mode}
        self._sightings = {peer: self._look_at(peer, report.time) for peer, report in present.items()}
        return frozenset(peer for peer, sighting in self._sightings.items() if sighting.is_gone)

    def _look_at(self, peer: bytes, reported_at: float) -> _Sighting:
        now, sighting = time.monotonic(), self._sightings.get(peer)
        if sighting is None:
            sighting = _Sighting(reported_at, asked_at=-math.inf)  # at once: can it be reached at all?
        elif reported_at != sighting.reported_at:
            # an answer that is still on its way is no longer of interest
            sighting.reported_at, sighting.asked_at, sighting.is_gone, sighting.answer = reported_at, now, False, None
        if sighting.answer is not None and sighting.answer.done():
            is_reached = _answer(sighting.answer)
            sighting.is_gone = is_reached is False and sighting.was_reached
            sighting.was_reached |= bool(is_reached)
            sighting.answer = None
        if sighting.answer is None and not sighting.is_gone and now - sighting.asked_at >= ASK_AFTER:
            self._ask(peer, sighting)
        return sighting

    def _ask(self, peer: bytes, sighting: _Sighting) -> None:
        if sum(other.answer is not None for other in self._sightings.values()) >= MAX_QUESTIONS:
            return
        sighting.asked_at = time.monotonic()
        try:
            sighting.answer = self._dht.run_coroutine(partial(can_be_reached, PeerID(peer)), return_future=True)
        except OSError as e:
            logger.debug(f"The DHT was closed first: {e!r}")


async def can_be_reached(peer: PeerID, dht: hivemind.DHT, node: DHTNode) -> bool | None:
    """In the DHT's process: whether a peer answers, or ``None`` if that cannot be told, such as from a late answer."""
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    for _ in range(2):  # the first question may go into a connection that is about to be closed
        try:
            await node.protocol.get_stub(peer).rpc_ping(request, timeout=node.protocol.wait_timeout)
            return True
        except P2PDaemonError as e:
            logger.debug(f"{peer} cannot be dialled: {e!r}")
        except Exception as e:
            logger.debug(f"{peer} does not answer: {e!r}")
            return None
    return False


def _answer(future: Any) -> bool | None:
    try:
        return future.result()
    except Exception as e:
        logger.debug(f"A question to a peer failed: {e!r}")
        return None
