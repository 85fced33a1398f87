"""In which order a peer believes those who declare something: by when it first saw them, not by what they claim.

A peer that has just come has seen nobody before. It believes the peer from whose invite it came, if that declares
something; or else the one whom most of those follow who are there. That one's order is its own from then on, and
whoever comes later is junior to it. What a peer's elders say of their own elders counts: one of them may have been
away when this peer came.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from hivenb.swarm.agreement.options_record import Declaration, label_of

#: Seconds within which two peers have come at the same time: neither could see the other, and what they claim decides.
AT_ONCE = 10.0

#: Seconds after which a peer has seen all who came at the same time; whoever claims that later does not count as one.
SEEN_WITHIN = 30.0

#: Peers that are remembered; of more, those who came last are forgotten.
MAX_REMEMBERED = 256


class Seniority:
    """The order of one peer. For one thread at a time.

    :param own: subkey of this peer
    """

    def __init__(self, own: bytes):
        self._own = own
        self._order: list[bytes] = []
        self._not_followed: set[bytes] = set()
        #: when this peer came, and when others began to see it, by a clock that nobody sets
        self._came_at, self._seen_since = -math.inf, math.inf
        #: when this peer came, as DHT time; ``None`` if it does not declare anything
        self.since: float | None = None
        #: whether there may have been others when it came, and it has not seen yet what they declare
        self.is_unsure = False

    def labels(self, declarations: Iterable[Declaration]) -> tuple[str, ...]:
        """The order of those who are there, and this peer, as it is told to others."""
        there = {one.owner for one in declarations} - self._not_followed | {self._own}
        return tuple(label_of(owner) for owner in self._order if owner in there)

    def come(self, since: float) -> None:
        """Take this peer's own place, after all whom it has met; one that comes back has it already.

        :param since: the present DHT time
        """
        if self._own not in self._order:
            self._order.append(self._own)
            self.since, self._came_at = since, time.monotonic()

    def be_seen(self) -> None:
        """From now on, others see what this peer declares, and give it a place."""
        self._seen_since = time.monotonic()

    def meet(self, declarations: Iterable[Declaration], trusted: frozenset[str] = frozenset()) -> None:
        """Give those a place who have none yet, after all others; those whom this peer's elders vouch for, before them.

        :param declarations: of those who are there
        :param trusted: ids of peers that are to be believed first among those who have no place yet
        """
        there = [one for one in declarations if one.owner != self._own]
        strangers = [one for one in there if one.owner not in self._order]
        for one in _in_order(strangers, trusted):
            self._order.insert(self._place_of(one), one.owner)
        self._believe_elders({one.owner: one for one in there})
        del self._order[MAX_REMEMBERED:]
        if self.since is not None and self._own not in self._order:
            self._order.append(self._own)

    def elders(self, declarations: Iterable[Declaration]) -> list[Declaration]:
        """Those who come before this peer, the most senior first; all others, if it has no place of its own."""
        places = {owner: place for place, owner in enumerate(self._order)}
        own = places.get(self._own, len(places))
        known = [
            one for one in declarations if places.get(one.owner, own) < own and one.owner not in self._not_followed
        ]
        return sorted(known, key=lambda one: places[one.owner])

    def juniors(self, declarations: Iterable[Declaration]) -> list[Declaration]:
        """All others that come after this peer, the most senior first."""
        elders = {one.owner for one in self.elders(declarations)} | self._not_followed
        known = [one for one in declarations if one.owner not in elders and one.owner != self._own]
        return sorted(
            known, key=lambda one: self._order.index(one.owner) if one.owner in self._order else MAX_REMEMBERED
        )

    def knows(self, owner: bytes) -> bool:
        """Whether a peer has a place already."""
        return owner in self._order

    def stop_following(self, owner: bytes) -> None:
        """Believe somebody no more."""
        self._not_followed.add(owner)

    def _place_of(self, one: Declaration) -> int:
        if self.since is None:
            return len(self._order)
        own = self._order.index(self._own)
        if _puts_first(one, label_of(self._own)):
            return len(self._order)
        came_before = one.rank < (self.since, self._own)
        has_just_come = time.monotonic() - self._came_at <= SEEN_WITHIN
        came_at_once = has_just_come and self.since - AT_ONCE <= one.since
        # those behind the first few do not declare anything, and do so all at once when these have gone
        has_just_begun = time.monotonic() - self._seen_since <= SEEN_WITHIN
        was_behind_others = own > 0 and not has_just_come
        # of two that are unsure, each would take the other one for the host if neither looked at what they claim
        yields = came_before and (
            self.is_unsure or (came_at_once and own == 0) or (was_behind_others and has_just_begun)
        )
        return own if yields else len(self._order)

    def _believe_elders(self, there: dict[bytes, Declaration]) -> None:
        owners = {label_of(owner): owner for owner in self._order}
        for elder in self._elders_of_own():
            if elder not in there or elder in self._not_followed:
                continue
            labels = there[elder].order
            before = labels[: labels.index(label_of(elder))] if label_of(elder) in labels else labels
            for owner in (owners[label] for label in before if label in owners):
                if owner != self._own and self._order.index(owner) > self._order.index(elder):
                    self._order.remove(owner)
                    self._order.insert(self._order.index(elder), owner)
        first = next((one for one in self._elders_of_own() if one in there and one not in self._not_followed), None)
        if first is not None:
            self._believe_order(there[first], owners)

    def _believe_order(self, elder: Declaration, owners: dict[str, bytes]) -> None:
        """Have those whom the first of this peer's elders has a place for, and this peer, in the order that it tells.

        :param elder: that is there
        :param owners: of this peer's order, by their labels
        """
        if label_of(self._own) not in elder.order:
            return
        told = [owners[label] for label in dict.fromkeys(elder.order) if label in owners]
        places = sorted(self._order.index(owner) for owner in told)
        for place, owner in zip(places, told, strict=True):
            self._order[place] = owner

    def _elders_of_own(self) -> list[bytes]:
        return self._order[: self._order.index(self._own)] if self._own in self._order else list(self._order)


def _puts_first(one: Declaration, label: str) -> bool:
    """Whether a peer says itself that another one was there before it."""
    own = label_of(one.owner)
    return label in one.order and (own not in one.order or one.order.index(label) < one.order.index(own))


def _in_order(declarations: Sequence[Declaration], trusted: frozenset[str]) -> list[Declaration]:
    """Those whom this peer has not seen before, whom to believe first: as the one to believe of them says."""
    by_claim = sorted(declarations, key=lambda one: one.rank)
    root = _root(by_claim, trusted)
    if root is None:
        return by_claim
    places = {label: place for place, label in enumerate(root.order)}
    places.setdefault(label_of(root.owner), len(places))
    return sorted(by_claim, key=lambda one: places.get(label_of(one.owner), len(places)))


def _root(declarations: Sequence[Declaration], trusted: frozenset[str]) -> Declaration | None:
    """The peer from whose invite this one came, or else whom most of them follow; in doubt, who claims to be first."""
    inviting = [one for one in declarations if one.peer_id in trusted and one.is_proven]
    if inviting:
        return inviting[0]
    labels = {label_of(one.owner): one for one in declarations}
    votes = Counter(
        next((label for label in one.order if label in labels), label_of(one.owner)) for one in declarations
    )
    return max(declarations, key=lambda one: votes[label_of(one.owner)], default=None)
