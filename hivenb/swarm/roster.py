"""Who takes part in a run: who is here, who has gone without a goodbye, and what each has put in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from hivenb.swarm.contributions import Contributions

if TYPE_CHECKING:
    from hivenb.engine.progress.peer_reports import PeerInfo

#: Seconds without a report after which a peer seems to be gone. One that is there reports every 5 s at least, and takes
#: itself off the list when it pauses; see :data:`hivenb.engine.progress.tracker.SILENCE`.
QUIET = 8.0

#: ... or that many times its longest pause so far, if that is longer: peers of plain hivemind report twice a minute.
_PATIENCE = 1.25

#: Peers that are not here any more and are still listed, for what they have put in.
MAX_ABSENT = 50


class Presence(Enum):
    """Whether a peer is there."""

    HERE = "here"
    GHOST = "gone?"  # listed still, and silent
    GONE = "gone"  # without a goodbye
    AWAY = "away"  # has left, or pauses
    UNKNOWN = "not watched"  # the run that watched has ended


@dataclass(frozen=True)
class Member:
    """One peer of a run, as this process has seen it.

    :param peer: what it reported last
    :param presence: whether it is there
    :param here_for: seconds since it was first seen; of one that came back, since then
    :param samples: samples that it has put into the run, as far as this process has watched
    :param share: its part of what all peers have put in, from 0 to 1
    :param name: what it calls itself; empty if it does not. Anybody may claim any name
    """

    peer: PeerInfo
    presence: Presence
    here_for: float
    samples: float
    share: float
    name: str = ""


@dataclass(frozen=True)
class _Sighting:
    peer: PeerInfo
    first_seen: float
    reported_at: float
    longest_pause: float
    presence: Presence


class Roster:
    """Remembers the peers of a run. One thread writes, any number read :attr:`members`."""

    def __init__(self) -> None:
        self._contributions = Contributions()
        self._sightings: dict[str, _Sighting] = {}
        self._members: tuple[Member, ...] = ()
        self._looked_at: float | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """All peers, those that are here first, and those before others that have put in more."""
        return self._members

    @property
    def present(self) -> tuple[PeerInfo, ...]:
        """What those that are here have reported; this process first, then by id."""
        here = (member.peer for member in self._members if member.presence is Presence.HERE)
        return tuple(sorted(here, key=lambda peer: (not peer.is_self, peer.peer_id)))

    def update(
        self, peers: Sequence[PeerInfo], target_batch_size: int, names: Mapping[str, str], now: float | None = None
    ) -> None:
        """Take in what was read from the swarm.

        :param peers: all reports
        :param target_batch_size: samples that make an epoch
        :param names: of peers, by their ids
        :param now: seconds of a clock that never goes back; by default ``time.monotonic()``
        """
        now = time.monotonic() if now is None else now
        self._contributions.note(peers, target_batch_size, 0.0 if self._looked_at is None else now - self._looked_at)
        self._looked_at = now
        reports = {peer.peer_id: peer for peer in peers}
        sightings = {peer_id: _seen(self._sightings.get(peer_id), peer, now) for peer_id, peer in reports.items()}
        absent = [_missed(sighting) for peer_id, sighting in self._sightings.items() if peer_id not in reports]
        for sighting in sorted(absent, key=lambda sighting: -sighting.reported_at)[:MAX_ABSENT]:
            sightings[sighting.peer.peer_id] = sighting
        self._sightings = sightings
        self._publish(names, now)

    def stop_watching(self) -> None:
        """From now on it is not known who is there."""
        self._members = tuple(replace(member, presence=Presence.UNKNOWN) for member in self._members)

    def _publish(self, names: Mapping[str, str], now: float) -> None:
        known = self._contributions
        order = list(Presence)
        members = [
            Member(
                peer=sighting.peer,
                presence=sighting.presence,
                here_for=now - sighting.first_seen,
                samples=known.samples(peer_id),
                share=known.share(peer_id),
                name=names.get(peer_id, ""),
            )
            for peer_id, sighting in self._sightings.items()
        ]
        members.sort(key=lambda m: (order.index(m.presence), -m.samples, not m.peer.is_self, m.peer.peer_id))
        self._members = tuple(members)


def _seen(before: _Sighting | None, peer: PeerInfo, now: float) -> _Sighting:
    reported_at = now - peer.age
    if before is None or before.presence in (Presence.AWAY, Presence.GONE):
        # one that has just come may need longer than that for its first batch
        is_ghost = peer.age > QUIET and (peer.samples > 0 or peer.epoch > 0) and not peer.is_self
        return _Sighting(peer, now, reported_at, 0.0, Presence.GHOST if is_ghost else Presence.HERE)
    pause, longest = reported_at - before.reported_at, before.longest_pause
    if pause > 0.1:  # a new report, and not the same one read a little faster
        longest = max(0.9 * longest, pause)
    else:
        reported_at = before.reported_at
    may_begin = longest == 0.0 and peer.samples == 0
    is_ghost = not peer.is_self and not may_begin and now - reported_at > max(QUIET, _PATIENCE * longest)
    return _Sighting(peer, before.first_seen, reported_at, longest, Presence.GHOST if is_ghost else Presence.HERE)


def _missed(sighting: _Sighting) -> _Sighting:
    left = {Presence.HERE: Presence.AWAY, Presence.GHOST: Presence.GONE}
    return replace(sighting, presence=left.get(sighting.presence, sighting.presence))
