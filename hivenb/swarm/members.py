"""Who takes part in a run: who is here, who has gone without a goodbye, and what each has put in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from hivenb.engine.network.addresses import Reach
from hivenb.swarm.contributions import Contributions

if TYPE_CHECKING:
    from hivenb.engine.progress.peer_reports import Look, PeerInfo


#: Peers that are not here any more and are still listed, for what they have put in.
MAX_ABSENT = 50


class Presence(Enum):
    """Whether a peer is there, as the tracker of this process found out."""

    HERE = "here"
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
    :param why_excluded: why no round of this peer waits for it; empty if they do
    :param route: how this process is connected with it, or others with this process
    """

    peer: PeerInfo
    presence: Presence
    here_for: float
    samples: float
    share: float
    name: str = ""
    why_excluded: str = ""
    route: Reach = Reach.UNKNOWN


@dataclass(frozen=True)
class _Entry:
    """What is kept of a peer from one look to the next.

    :param peer: what it reported last
    :param first_seen: when it came, by ``time.monotonic()``
    :param reported_at: when it reported last
    :param presence: whether it is there
    """

    peer: PeerInfo
    first_seen: float
    reported_at: float
    presence: Presence


class MemberList:
    """Remembers the peers of a run. One thread writes, any number read :attr:`members`."""

    def __init__(self) -> None:
        self._contributions = Contributions()
        self._entries: dict[str, _Entry] = {}
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

    @property
    def excluded_peers(self) -> dict[str, str]:
        """Why no round waits for peers, by their ids."""
        return {member.peer.peer_id: member.why_excluded for member in self._members if member.why_excluded}

    def update(
        self,
        look: Look,
        target_batch_size: int,
        names: Mapping[str, str],
        excluded: Mapping[str, str] = MappingProxyType({}),
        routes: Mapping[str, Reach] = MappingProxyType({}),
    ) -> None:
        """Take in who is there.

        :param look: the newest; it may be the same one again
        :param target_batch_size: samples that make an epoch
        :param names: of peers, by their ids
        :param excluded: why no round waits for them, by their ids
        :param routes: how they are connected, by their ids
        """
        seconds = 0.0 if self._looked_at is None else look.taken_at - self._looked_at
        self._contributions.note(look.peers, target_batch_size, seconds)
        self._looked_at = look.taken_at
        entries = {peer.peer_id: _seen(self._entries.get(peer.peer_id), peer, look) for peer in look.peers}
        absent = [_missed(entry, look) for peer_id, entry in self._entries.items() if peer_id not in entries]
        for entry in sorted(absent, key=lambda entry: -entry.reported_at)[:MAX_ABSENT]:
            entries[entry.peer.peer_id] = entry
        self._entries = entries
        self._publish(names, excluded, routes, look.taken_at)

    def stop_watching(self) -> None:
        """From now on it is not known who is there."""
        self._members = tuple(replace(member, presence=Presence.UNKNOWN) for member in self._members)

    def _publish(
        self, names: Mapping[str, str], excluded: Mapping[str, str], routes: Mapping[str, Reach], now: float
    ) -> None:
        known = self._contributions
        order = list(Presence)
        members = [
            Member(
                peer=entry.peer,
                presence=entry.presence,
                here_for=now - entry.first_seen,
                samples=known.samples(peer_id),
                share=known.share(peer_id),
                name=names.get(peer_id, ""),
                why_excluded=excluded.get(peer_id, ""),
                route=Reach.NOT if entry.peer.client_mode else routes.get(peer_id, Reach.UNKNOWN),
            )
            for peer_id, entry in self._entries.items()
        ]
        members.sort(key=lambda m: (order.index(m.presence), -m.samples, not m.peer.is_self, m.peer.peer_id))
        self._members = tuple(members)


def _seen(before: _Entry | None, peer: PeerInfo, look: Look) -> _Entry:
    presence = Presence.GONE if peer.peer_id in look.gone else Presence.HERE
    came_back = before is not None and presence is Presence.HERE and before.presence is not Presence.HERE
    first_seen = look.taken_at if before is None or came_back else before.first_seen
    return _Entry(peer, first_seen, look.taken_at - peer.age, presence)


def _missed(before: _Entry, look: Look) -> _Entry:
    presence = Presence.AWAY if before.presence is Presence.HERE else before.presence
    return replace(before, presence=presence, peer=replace(before.peer, age=look.taken_at - before.reported_at))
