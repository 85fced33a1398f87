"""What the peers of a run report of themselves in the DHT, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import hivemind
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from hivenb.engine.network.record_board import ANSWER_TIMEOUT, RecordBoard
from hivenb.engine.network.untrusted_values import PEER_ID_BYTES, finite, named, raw, truth, whole

#: Fields of a report at most; a newer version may add some.
MAX_FIELDS = 32


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


@dataclass(frozen=True)
class Look:
    """Who was there when this process looked at a run's peers.

    :param taken_at: when the DHT answered, by ``time.monotonic()``
    :param peers: all that are on the swarm's list, this process included if it is; it comes first, then by id
    :param gone: ids of those among them that have gone without a goodbye
    :param uncounted: ids of those whose reports do not count, for what they did in rounds
    """

    taken_at: float
    peers: tuple[PeerInfo, ...]
    gone: frozenset[str] = frozenset()
    uncounted: frozenset[str] = frozenset()


def read_peers(dht: hivemind.DHT, run_id: str, timeout: float = ANSWER_TIMEOUT) -> tuple[PeerInfo, ...]:
    """What the peers of a run have reported, read from the DHT without being one of them.

    Reports of other shapes are passed over: anybody may write to a DHT.

    :param timeout: seconds that the DHT is given to answer
    :returns: one entry for each peer; this process first, then by id
    :raises SwarmError: if the DHT does not answer in time
    """
    reports = parse_reports(RecordBoard(dht, f"{run_id}_progress", timeout=timeout).read())
    return as_infos(reports.values(), dht.peer_id)


def as_infos(reports: Iterable[LocalTrainingProgress], own: PeerID) -> tuple[PeerInfo, ...]:
    """Reports as people read them; this process first, then by id.

    :param own: id of this process
    """
    now = get_dht_time()
    found = (
        PeerInfo(
            peer_id=peer.to_base58(),
            epoch=report.epoch,
            samples=report.samples_accumulated,
            samples_per_second=report.samples_per_second,
            client_mode=report.client_mode,
            age=max(0.0, now - report.time),
            is_self=peer == own,
        )
        for report in reports
        for peer in [PeerID(report.peer_id)]
    )
    return tuple(sorted(found, key=lambda peer: (not peer.is_self, peer.peer_id)))


def parse_reports(entries: Mapping[Any, Any]) -> dict[Any, LocalTrainingProgress]:
    """The reports in a record of the DHT, by its subkeys; what is none is left out.

    :param entries: what stands there
    """
    found = {key: parse_report(one.value) for key, one in entries.items() if isinstance(one, ValueWithExpiration)}
    return {key: report for key, report in found.items() if report is not None}


def parse_report(value: Any) -> LocalTrainingProgress | None:
    """A peer's report as it was found, or ``None`` if it has withdrawn it or it is something else."""
    try:
        fields = named(value, MAX_FIELDS)
        return LocalTrainingProgress.construct(
            peer_id=raw(fields["peer_id"], PEER_ID_BYTES, least=1),
            epoch=whole(fields["epoch"]),
            samples_accumulated=whole(fields["samples_accumulated"]),
            samples_per_second=finite(fields["samples_per_second"]),
            time=finite(fields["time"]),
            client_mode=truth(fields["client_mode"]),
        )
    except (KeyError, ValueError):
        return None
