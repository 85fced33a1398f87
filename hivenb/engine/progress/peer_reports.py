"""What the peers of a run report of themselves in the DHT, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hivemind
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.dht.record_board import ANSWER_TIMEOUT, RecordBoard


@dataclass(frozen=True)
class PeerInfo:
    """One peer of a run, as it last reported itself.

    :param peer_id: its id in the DHT
    :param epoch: the epoch it works on
    :param samples: samples it has accumulated in that epoch
    :param samples_per_second: its speed
    :param client_mode: whether it can only connect to others, and not be connected to
    :param age: seconds since that report
    :param is_self: whether it is this process
    """

    peer_id: str
    epoch: int
    samples: int
    samples_per_second: float
    client_mode: bool
    age: float
    is_self: bool


def read_peers(dht: hivemind.DHT, run_id: str, timeout: float = ANSWER_TIMEOUT) -> tuple[PeerInfo, ...]:
    """What the peers of a run have reported, read from the DHT without being one of them.

    Reports of other shapes are passed over: anybody may write to a DHT.

    :param timeout: seconds that the DHT is given to answer
    :returns: one entry for each peer; this process first, then by id
    :raises SwarmError: if the DHT does not answer in time
    """
    records = RecordBoard(dht, f"{run_id}_progress", timeout=timeout).read()
    own_id, now = dht.peer_id.to_base58(), get_dht_time()
    found = []
    for record in records.values():
        progress = parse_report(record.value)
        if progress is None:
            continue
        peer_id = PeerID(progress.peer_id).to_base58()
        found.append(
            PeerInfo(
                peer_id=peer_id,
                epoch=progress.epoch,
                samples=progress.samples_accumulated,
                samples_per_second=progress.samples_per_second,
                client_mode=progress.client_mode,
                age=max(0.0, now - progress.time),
                is_self=peer_id == own_id,
            )
        )
    return tuple(sorted(found, key=lambda peer: (not peer.is_self, peer.peer_id)))


def parse_report(value: Any) -> LocalTrainingProgress | None:
    """A peer's report as it was found, or ``None`` if it has withdrawn it or it is something else."""
    try:
        progress = LocalTrainingProgress.parse_obj(value)
        PeerID(progress.peer_id)
    except (ValueError, TypeError):
        return None
    return progress
