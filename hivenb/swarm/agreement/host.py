"""A peer's part in agreeing on swarm-wide options: as the host that decides, or as one that follows it."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hivemind.utils import get_dht_time

from hivenb.errors import OptionsError
from hivenb.options.swarm_wide import Shared
from hivenb.swarm.agreement.options_record import EXPIRATION, Declaration, Plan, Records, host_of
from hivenb.swarm.peer_id import short_id

if TYPE_CHECKING:
    from hivenb.engine.dht.dht import DHT
    from hivenb.engine.progress.peer_reports import PeerInfo

#: Seconds between two renewals of a declaration.
RENEWAL = EXPIRATION / 3

#: Peers that declare themselves: the host, and those that follow it if it leaves. Of a thousand, not all have to.
CANDIDATES = 4

#: Seconds that all peers are given at least to learn of a change before it counts; each looks once a second.
NOTICE = 4.0

#: Seconds that a goodbye may take.
_GOODBYE = 2.0

_first_started: weakref.WeakKeyDictionary[DHT, dict[str, float]] = weakref.WeakKeyDictionary()


def epochs_ahead(seconds_left: float | None, seconds_per_epoch: float | None) -> int:
    """How many epochs ahead a change is announced, so that no peer learns of it too late.

    :param seconds_left: of the present epoch, as estimated; ``None`` if unknown
    :param seconds_per_epoch: of the last ones; ``None`` if unknown
    """
    if seconds_left is not None and seconds_left >= 2 * NOTICE:
        return 1
    return 2 if not seconds_per_epoch else 1 + max(1, math.ceil(NOTICE / seconds_per_epoch))


class Hosting:
    """What a run's host has decided, and whether this peer is the host. Any thread may ask.

    :param dht: a running one
    :param peers: gives the peers of the run that are here; may wait for the DHT
    :param run_id: name of the run
    :param may_host: whether this peer can be the host
    """

    def __init__(self, dht: DHT, peers: Callable[[], Sequence[PeerInfo]], run_id: str, may_host: bool = True):
        self._dht, self._peers, self._run_id, self._may_host = dht, peers, run_id, may_host
        self._records = Records(dht, run_id)
        self._lock = threading.RLock()
        self._host: Declaration | None = None
        self._plan: Plan | None = None
        self._since: float | None = None
        self._declared: tuple[float, Plan] | None = None
        self._taken = 0
        self._others, self._swarm_epoch = 0, 0
        self._epochs_at: deque[float] = deque(maxlen=6)

    # -- what is agreed on --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """What is agreed on; ``None`` while nobody has declared anything."""
        return self._plan

    @property
    def is_alone(self) -> bool:
        """Whether no other peer trains, so that nobody has to be waited for."""
        return self._others == 0

    @property
    def why_not_host(self) -> str | None:
        """Who decides instead of this peer, in words; ``None`` if this peer does."""
        host = self._host
        if self._may_host and (host is None or host.owner == self._records.owner):
            return None
        who = "there is none at the moment" if host is None else f"peer {short_id(host.peer_id)}"
        return f"the host of the run decides on them for all peers ({who})"

    def wanted(self, epoch: int, is_paused: bool) -> Shared | None:
        """What this peer should train with.

        :param epoch: that it has reached
        :param is_paused: whether it leaves it to the others to reach epochs
        :returns: ``None`` if nobody has declared anything
        """
        with self._lock:
            if self._plan is None:
                return None
            if self.is_alone:
                return self._plan.newest
            return self._plan.at(max(epoch, self._taken, self._swarm_epoch if is_paused else 0))

    # -- taking part --------------------------------------------------------------------------------------------

    def join(self, shared: Shared) -> Shared:
        """Learn what is agreed on, and declare it for those who come later. Waits for the DHT.

        :param shared: what this peer would train with, and does if nobody else is there
        :returns: what is agreed on for the present
        :raises SwarmError: if the DHT does not answer
        :raises OptionsError: if what this peer declares is too long to travel
        """
        self._note_peers(self._peers())
        declarations = self._records.read()
        with self._lock:
            if self._may_host:
                started = _first_started.setdefault(self._dht, {})
                # whoever is there already is the elder, whatever this machine's clock says
                newcomer = max([get_dht_time(), *(one.since + 1e-3 for one in declarations)])
                self._since = started.setdefault(self._run_id, newcomer)
                # a host that comes back goes on with what was decided meanwhile
                before = host_of(one for one in declarations if one.owner != self._records.owner)
                self._plan = Plan(0, ((0, shared),)) if before is None else before.plan
                self._declaration(self._plan, self._since).require_short()
            self._update(declarations)
            wanted = self.wanted(self._swarm_epoch, is_paused=False)
            return shared if wanted is None else wanted

    def look(self, peers: Sequence[PeerInfo]) -> None:
        """See what has been decided meanwhile, and renew what this peer declares. Waits for the DHT.

        :param peers: that are here
        :raises SwarmError: if the DHT does not answer
        """
        self._note_peers(peers)
        declarations = self._records.read()
        with self._lock:
            self._update(declarations)

    def note_epoch(self) -> None:
        """An epoch of the swarm has ended."""
        self._epochs_at.append(time.monotonic())

    def decide(self, shared: Shared, epoch: int, seconds_left: float | None) -> int:
        """As the host, let all peers change at the same epoch. Does not wait.

        :param shared: what they are to train with
        :param epoch: that this peer has reached
        :param seconds_left: until it is over, as estimated
        :returns: the epoch from which it counts; the present one if nobody else is there
        :raises OptionsError: if another peer is the host, or that is too long to travel
        """
        with self._lock:
            present = max(epoch, self._swarm_epoch)
            if self._plan is not None and self._plan.newest == shared:
                return self._plan.newest_epoch
            since = present if self.is_alone else present + epochs_ahead(seconds_left, self._pace)
            self._declare_changed(shared, since, present)
            return since

    def decide_at_once(self, shared: Shared, epoch: int) -> None:
        """As the host, let this count now, whoever comes too late for it.

        :raises OptionsError: if another peer is the host, or that is too long to travel
        """
        with self._lock:
            self._declare_changed(shared, epoch, epoch)

    def take_early(self) -> None:
        """What was decided for a coming epoch is in force here already."""
        with self._lock:
            if self._plan is not None:
                self._taken = self._plan.newest_epoch

    def leave(self) -> None:
        """Withdraw, so that the next peer is host at once. Returns within seconds."""
        if self._declared is not None:
            self._records.withdraw(_GOODBYE)

    @property
    def _pace(self) -> float | None:
        at = tuple(self._epochs_at)
        return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None

    def _note_peers(self, peers: Sequence[PeerInfo]) -> None:
        with self._lock:
            self._others = sum(not peer.is_self for peer in peers)
            self._swarm_epoch = max((peer.epoch for peer in peers), default=0)

    def _declare_changed(self, shared: Shared, since: int, present: int) -> None:
        if self._plan is None or self._since is None or self.why_not_host is not None:
            raise OptionsError(f"swarm-wide options cannot be changed at this peer: {self.why_not_host}")
        plan = self._plan.changed(shared, since, present)
        self._declaration(plan, self._since).require_short()
        self._declare(plan, self._since)
        self._plan = plan

    def _update(self, declarations: Sequence[Declaration]) -> None:
        own = self._records.owner
        others = [one for one in declarations if one.owner != own]
        elders = [one for one in others if self._since is None or one.rank < (self._since, own)]
        if elders:
            self._host = host_of(elders)
            self._plan = elders[0].plan
        elif self._since is not None and self._plan is not None:
            self._host = self._declaration(self._plan, self._since)
        else:
            self._host = None
        if self._since is not None and self._plan is not None and len(elders) < CANDIDATES:
            declared_at, declared = self._declared or (-math.inf, None)
            if declared != self._plan or time.monotonic() - declared_at > RENEWAL:
                self._declare(self._plan, self._since)

    def _declare(self, plan: Plan, since: float) -> None:
        self._records.write(self._declaration(plan, since))
        self._declared = (time.monotonic(), plan)

    def _declaration(self, plan: Plan, since: float) -> Declaration:
        return Declaration(self._records.owner, self._records.peer_id, since, plan)
