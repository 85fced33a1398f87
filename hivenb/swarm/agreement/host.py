"""A peer's part in agreeing on swarm-wide options: as the host that decides, or as one that follows it."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hivemind.utils import get_dht_time

from hivenb.errors import OptionsError
from hivenb.options.largest_change import too_large_a_change
from hivenb.options.swarm_wide import Shared
from hivenb.swarm.agreement.options_record import EXPIRATION, Declaration, Plan, Records, Return, epochs_ahead
from hivenb.swarm.agreement.seniority import Seniority
from hivenb.swarm.peer_id import short_id

if TYPE_CHECKING:
    from hivenb.engine.network.dht import DHT
    from hivenb.engine.progress.peer_reports import PeerInfo

logger = logging.getLogger(__name__)

#: Seconds between two renewals of a declaration.
RENEWAL = EXPIRATION / 3

#: Peers that declare themselves: the host, and those that follow it if it leaves. Of a thousand, not all have to.
CANDIDATES = 4

#: Seconds that a goodbye may take.
_GOODBYE = 2.0

_known: weakref.WeakKeyDictionary[DHT, dict[str, Seniority]] = weakref.WeakKeyDictionary()


class Hosting:
    """What a run's host has decided, and whether this peer is the host. Any thread may ask.

    :param dht: a running one
    :param peers: gives the peers of the run that are here; may wait for the DHT
    :param run_id: name of the run
    :param may_host: whether this peer can be the host
    """

    def __init__(self, dht: DHT, peers: Callable[[], Sequence[PeerInfo]], run_id: str, may_host: bool = True):
        self._dht, self._peers, self._run_id, self._may_host = dht, peers, run_id, may_host
        dht.know_run(run_id)
        self._records = Records(dht, run_id)
        self._proof = dht.prove(self._records.owner)
        self._lock = threading.RLock()
        self._host: Declaration | None = None
        self._plan: Plan | None = None
        self._seniority = _known.setdefault(dht, {}).setdefault(run_id, Seniority(self._records.owner))
        self._inviting = frozenset(str(one).rpartition("/p2p/")[2] for one in dht.initial_peers or ())
        self._order: tuple[str, ...] = ()
        #: what the host has decided and this peer does not follow, in words; ``None`` if it follows
        self.refusal: str | None = None
        self._declared: tuple[float, Plan, tuple[str, ...]] | None = None
        self._own_plan: Plan | None = None
        self._unsure_until = -math.inf
        # when another peer's declaration was read last, as DHT time, which goes on while this machine sleeps
        self._saw_others_at = -math.inf
        self._taken = 0
        self._others, self._swarm_epoch = 0, 0
        self._epochs_at: deque[float] = deque(maxlen=6)

    # -- what is agreed on --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """What is agreed on; ``None`` while nobody has declared anything."""
        return self._plan

    @property
    def returned(self) -> Return | None:
        """The last return to an earlier state that was decided on; ``None`` if there was none."""
        plan = self._plan
        return None if plan is None else plan.returned

    @property
    def is_alone(self) -> bool:
        """Whether no other peer trains, so that nobody has to be waited for."""
        return self._others == 0

    @property
    def not_host_reason(self) -> str | None:
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
            others = [one for one in declarations if one.owner != self._records.owner]
            self._seniority.meet(others, self._inviting)
            elders = self._seniority.elders(others)
            if self._may_host:
                # of those who come in the same second, none may find what others declare: the node that it asks is new
                somebody_may_be_there = self._others > 0 or bool(self._inviting)
                self._seniority.is_unsure = self._seniority.since is None and not others and somebody_may_be_there
                # whoever is there already is the elder, whatever this machine's clock says
                self._seniority.come(max([get_dht_time(), *(one.since + 1e-3 for one in declarations)]))
                self._unsure_until = time.monotonic() + EXPIRATION
                # a host that comes back goes on with what was decided meanwhile
                before = next(iter(elders or self._seniority.juniors(others)), None)
                self._own_plan = Plan(0, ((0, shared),))
                self._plan = self._own_plan if before is None else before.plan
                self._declaration(self._plan).require_short()
            elif elders:
                self._plan = elders[0].plan
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
        """A swarm epoch has ended."""
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
            if not self.is_alone and self._plan is not None:
                self._check_step(self._plan.at(present), shared)
            since = present if self.is_alone else present + epochs_ahead(seconds_left, self._pace)
            self._declare_changed(shared, since, present)
            return since

    def decide_at_once(self, shared: Shared, epoch: int) -> None:
        """As the host, let this count now, whoever comes too late for it.

        :raises OptionsError: if another peer is the host, or that is too long to travel
        """
        with self._lock:
            self._declare_changed(shared, epoch, epoch)

    def decide_return(self, to: int, epoch: int) -> int:
        """As the host, let all peers return to an earlier state. Does not wait.

        :param to: the epoch of that state
        :param epoch: that the swarm has reached
        :returns: the epoch at which they go on with it, which none of them has reached before it knows of this
        :raises OptionsError: if another peer is the host
        """
        with self._lock:
            if self._plan is None or self._seniority.since is None or self.not_host_reason is not None:
                raise OptionsError(f"this peer cannot let all return to an earlier state: {self.not_host_reason}")
            at = max(epoch, self._swarm_epoch) + epochs_ahead(None, self._pace)
            plan = self._plan.with_return(Return(to, at))
            self._declaration(plan).require_short()
            self._declare(plan)
            self._plan = plan
            return at

    def take_early(self) -> None:
        """What was decided for a coming epoch is in force here already."""
        with self._lock:
            if self._plan is not None:
                self._taken = self._plan.newest_epoch

    def leave(self) -> None:
        """Withdraw, so that the next peer is host at once. Returns within seconds."""
        if self._declared is not None:
            self._records.withdraw(_GOODBYE)

    def stop_following_host(self) -> str:
        """Follow the present host no more, and go back to what this peer would train with.

        :returns: id of the peer that was the host
        :raises OptionsError: if this peer is the host, or there is none
        """
        with self._lock:
            host = self._host
            if host is None or host.owner == self._records.owner:
                raise OptionsError(
                    "there is no other peer that decides for this one, so that there is none to stop following"
                )
            self._seniority.stop_following(host.owner)
            self._plan, self.refusal = self._own_plan, None
            return host.peer_id

    @staticmethod
    def _check_step(before: Shared, after: Shared) -> None:
        if (reason := too_large_a_change(before, after)) is not None:
            raise OptionsError(f"no peer would follow a change of {reason}: make it in several steps")

    @property
    def _pace(self) -> float | None:
        at = tuple(self._epochs_at)
        return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else None

    def _note_peers(self, peers: Sequence[PeerInfo]) -> None:
        with self._lock:
            self._others = sum(not peer.is_self for peer in peers)
            self._swarm_epoch = max((peer.epoch for peer in peers), default=0)

    def _declare_changed(self, shared: Shared, since: int, present: int) -> None:
        if self._plan is None or self._seniority.since is None or self.not_host_reason is not None:
            raise OptionsError(f"swarm-wide options cannot be changed at this peer: {self.not_host_reason}")
        plan = self._plan.changed(shared, since, present)
        self._declaration(plan).require_short()
        self._declare(plan)
        self._plan = plan

    def _update(self, declarations: Sequence[Declaration]) -> None:
        others = [one for one in declarations if one.owner != self._records.owner]
        known = [one for one in others if self._seniority.knows(one.owner)]
        self._meet(others)
        elders = self._seniority.elders(others)
        if not elders:
            self._catch_up(known)
        if others:
            self._saw_others_at = get_dht_time()
        self._order = self._seniority.labels(declarations)
        if elders:
            self._host = elders[0]
            self._follow(elders[0])
        elif self._seniority.since is not None and self._plan is not None:
            self._host, self.refusal = self._declaration(self._plan), None
        else:
            self._host = None
        if self._seniority.since is not None and self._plan is not None and self._has_to_declare(len(elders)):
            self._declare(self._plan)

    def _catch_up(self, known: Sequence[Declaration]) -> None:
        """As the host that was away, asleep or cut off, go on with what was decided meanwhile, as one that comes back.

        :param known: the declarations of peers that were there before
        """
        was_away = get_dht_time() - self._saw_others_at > EXPIRATION
        if not was_away or self._plan is None or self._seniority.since is None:
            return
        in_its_place = next(iter(self._seniority.juniors(known)), None)  # none of those that it follows no more
        if in_its_place is not None and in_its_place.plan.version > self._plan.version:
            self._follow(in_its_place)

    def _has_to_declare(self, elders: int) -> bool:
        if self._declared is None:
            return elders < CANDIDATES
        declared_at, plan, order = self._declared
        if elders >= CANDIDATES:  # it stands for a while yet, and whoever follows this peer goes by it
            return order[:1] != self._order[:1]
        return (plan, order) != (self._plan, self._order) or time.monotonic() - declared_at > RENEWAL

    def _meet(self, others: Sequence[Declaration]) -> None:
        self._seniority.meet(others, self._inviting)
        # one that came with it is no proof that nobody was there before
        if self._seniority.elders(others) or time.monotonic() > self._unsure_until:
            self._seniority.is_unsure = False

    def _follow(self, host: Declaration) -> None:
        """Take over what the host has decided, unless it is too large a change for one step."""
        # while it has agreed on nothing yet, there is nothing to be changed
        if self._plan is None or self._plan is self._own_plan or host.plan == self._plan:
            self._plan, self.refusal = host.plan, None
            return
        present = self._plan.at(max(self._taken, self._swarm_epoch))
        changes = (too_large_a_change(present, shared) for _, shared in host.plan.steps)
        reason = next((change for change in changes if change is not None), None)
        if reason is None:
            self._plan, self.refusal = host.plan, None
        else:
            who = f"peer {short_id(host.peer_id)}, the host of the run, wants to change {reason}"
            refusal = f"{who}: this peer goes on as before. To follow it all the same, stop and start this run"
            if refusal != self.refusal:
                logger.warning(refusal)
            self.refusal = refusal

    def _declare(self, plan: Plan) -> None:
        self._records.write(self._declaration(plan))
        if self._declared is None:
            self._seniority.be_seen()
        self._declared = (time.monotonic(), plan, self._order)

    def _declaration(self, plan: Plan) -> Declaration:
        since = self._seniority.since or 0.0
        return Declaration(self._records.owner, self._records.peer_id, since, plan, self._order, self._proof)
