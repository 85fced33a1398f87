"""The options of a run: those in force, those on their way, and how the one become the other while it trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hivenb.engine.progress.tracker import seconds_left
from hivenb.errors import OptionsError, TrainingError
from hivenb.figures.history import OptionChange
from hivenb.options.options import FIELDS, Options
from hivenb.options.swarm_wide import Shared, labels_of, shared_part, with_shared_part
from hivenb.run.raised_exits import in_words
from hivenb.run.status import RunState
from hivenb.strategy.live_changes import check_change

if TYPE_CHECKING:
    from hivenb.engine.optimizer.optimizer import Optimizer
    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.figures.history import History
    from hivenb.peers.followed_run import Followers
    from hivenb.run.pause_and_stop import Stage
    from hivenb.strategy.strategy import HivemindStrategy
    from hivenb.swarm.agreement.host import Hosting
    from hivenb.swarm.agreement.options_record import Plan


# -- options change --------------------------------------------------------------------------------------------------
#
# One change of a run's options, from when it is asked for until it is in force or refused.


@dataclass(eq=False)
class OptionsChange:
    """Options that were asked for, and what became of them.

    :param options: all of them
    :param shared: the part of them that all peers need alike
    :param is_shared: whether they change that part
    :param is_followed: whether they are those of the run of which this one is a local peer
    """

    options: Options
    shared: Shared
    is_shared: bool = False
    is_followed: bool = False
    #: what of them waits for an epoch to come, by name
    rest: dict[str, Any] = field(default_factory=dict, init=False)
    #: set, by the training thread or when that has ended, once they are in force, or with why they were refused
    outcome: Future[None] = field(default_factory=Future, init=False)


# -- run options -----------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class RunOptions:
    """Holds a run's options. They change on the training thread, between two batches; or at once while none trains.

    Those of this peer alone change at its next batch. Those on which all peers have to agree change at the epoch that
    the host has decided on, at all of them.

    :param options: the first ones
    :param stage: of the run
    :param history: where a change is marked
    :param followers: who train with them as well
    """

    def __init__(self, options: Options, stage: Stage, history: History, followers: Followers):
        self._stage, self._history, self._followers = stage, history, followers
        self._in_force, self._shared = options, shared_part(options)
        self._strategy: HivemindStrategy | None = None
        #: what the host of the run has decided, while the run trains
        self.hosting: Hosting | None = None
        self._changes: tuple[OptionsChange, ...] = ()
        self._refused: tuple[Shared, Options] | None = None
        self._offered: Options | None = None
        #: why the options that were asked for last could not be put in force
        self.error: Exception | None = None

    @property
    def in_force(self) -> Options:
        """What the run trains with, or will when it starts."""
        return self._in_force

    @property
    def pending(self) -> Options | None:
        """What was asked for, here or by the host, and is not in force yet."""
        if changes := self._changes[-1:]:
            return self._as_to_come(changes[0])
        plan = self._plan
        if plan is None or plan.newest == self._shared or self._refused is not None:
            return None
        try:
            return with_shared_part(self._in_force, plan.newest, self._offered)
        except OptionsError:  # take_step() will say so
            return None

    @property
    def pending_epoch(self) -> int | None:
        """The epoch from which on all peers train with what the host has decided last, if this one does not yet."""
        plan = self._plan
        return None if plan is None or plan.newest == self._shared else plan.newest_epoch

    @property
    def not_host_reason(self) -> str | None:
        """Why swarm-wide options cannot be changed here at the moment; ``None`` if they can."""
        hosting = self.hosting
        return None if hosting is None else hosting.not_host_reason

    def apply(self, options: Options | None, changes: dict[str, Any], wait: bool) -> Options:
        """See :meth:`hivenb.TrainingRun.apply`."""
        with self._stage.changed:
            base = self.pending or self._in_force
            new = (options or base).replace(**changes)
            if not self._stage.state.is_active:
                self.error = None
                self._put_in_force(new)
                return new
            check_change(self._in_force, new)  # before the host decides anything
            wanted = shared_part(new)
            is_shared = wanted != shared_part(base) and (wanted != self._shared or self.not_host_reason is None)
            if is_shared:
                self._check_host(labels_of(self._shared, wanted))
            self.error = None
            change = OptionsChange(new, wanted, is_shared)
            self._changes += (change,)
            self._stage.hand_in(partial(self._carry_out, change))
        if wait:
            change.outcome.result()
        return new

    def follow(self, options: Options) -> None:
        """Take over the options of the run of which this one is a local peer, at the next batch; waits for it.

        What all peers have to agree on still changes when the host says so, if it has said anything.

        :raises Exception: whatever goes wrong with them; the old ones stay
        """
        with self._stage.changed:
            self._offered, self._refused = options, None
            if not self._stage.state.is_active:
                self._put_in_force(options)
                return
            change = OptionsChange(options, shared_part(options), is_followed=True)
            self._stage.hand_in(partial(self._carry_out, change))
        change.outcome.result()

    def rename(self, run_id: str) -> None:
        """Have another name in the DHT, before training begins."""
        if run_id != self._in_force.run_id:
            self._put_in_force(self._in_force.replace(run_id=run_id))

    # -- the swarm ----------------------------------------------------------------------------------------------

    def begin(self, strategy: HivemindStrategy) -> None:
        """Change the options of another start of the run from now on.

        :param strategy: that it trains with
        """
        self._strategy = strategy

    def join(self, hosting: Hosting) -> None:
        """Take over what the swarm has agreed on, before training begins; waits for the DHT.

        :raises SwarmError: if the DHT does not answer
        :raises OptionsError: if what is agreed on does not go with this peer's own options
        """
        own = self._shared
        agreed = hosting.join(own)
        if agreed != own:
            try:
                options = with_shared_part(self._in_force, agreed, self._offered)
            except OptionsError as e:
                raise OptionsError(f"this peer cannot train with what its swarm has agreed on: {e}") from e
            self._put_in_force(options)
            logger.info(
                f"This peer trains with the swarm's {', '.join(labels_of(own, agreed))} instead of its own: "
                f"{hosting.not_host_reason or 'it was decided meanwhile'}"
            )
        self.hosting, self._refused = hosting, None

    def look(self, peers: Sequence[PeerInfo]) -> None:
        """See what the host has decided meanwhile; waits for the DHT, so this is for a thread that does nothing else.

        :param peers: that are here
        """
        if self.hosting is not None:
            self.hosting.look(peers)
            if (refusal := self.hosting.refusal) is not None and str(self.error) != refusal:
                self.error = OptionsError(refusal)
                self._history.mark("option", "the host's change is not followed: it is too large")
            if (reason := self.hosting.not_host_reason) is not None:
                for change in self._waiting():
                    if change.is_shared:
                        self._settle(change, OptionsError(f"they cannot be changed at this peer any more: {reason}"))
            self._step_if_due()

    def on_epoch(self) -> None:
        """A swarm epoch has ended at this peer; to be called on the training thread."""
        if self.hosting is not None:
            self.hosting.note_epoch()
            self._step_if_due()

    def leave(self) -> None:
        """Let somebody else be host; to be called when training has ended. What was asked for counts at once."""
        hosting, self.hosting = self.hosting, None
        self._strategy = None  # what is asked for from now on is for the next start
        if hosting is not None:
            hosting.leave()
        for change in self._waiting():
            try:
                self._put_in_force(self._in_force.replace(**change.rest))
            except OptionsError as e:  # other options came between
                self._settle(change, e)
            else:
                self._settle(change)

    # -- on the training thread, between two batches --------------------------------------------------------------

    def _carry_out(self, change: OptionsChange) -> None:
        """Put options that were asked for in force, or as much of them as counts by now, and let it be known."""
        before = self._shared
        try:
            self._put_in_force(self._as_now(change))
        except Exception as e:  # surfaces in apply(), in follow() and in the panel
            change.rest = {}
            try:
                if change.is_shared:
                    self._take_back(before)
            finally:
                self._settle(change, e)
        except BaseException as e:  # ends the run, as sys.exit() does: nobody may wait in vain
            self._settle(change, TrainingError(in_words(e)))
            raise
        else:
            if not change.rest:
                self._settle(change)
            self._step_if_due()

    def _as_now(self, change: OptionsChange) -> Options:
        """As much of a change as counts by now. As the host, decide first when the rest of it does."""
        hosting = self.hosting
        if hosting is None:
            return change.options
        if change.is_followed:
            return self._as_agreed(change, hosting)
        if change.is_shared:
            self._check_host(labels_of(self._shared, change.shared))
            if hosting.is_alone:
                hosting.decide_at_once(change.shared, self._epoch)
                return change.options
            hosting.decide(change.shared, self._epoch, self._seconds_left)
        elif change.shared == self._shared:
            return change.options
        return self._without_rest(change)

    def _take_step(self) -> None:
        """Go on with what the host has decided, if it counts by now."""
        hosting, wanted, before, shared = self.hosting, self._wanted(), self._in_force, self._shared
        if hosting is None or hosting.plan is None or wanted is None:
            return
        waiting = self._waiting()
        ours = [change for change in waiting if change.shared == wanted]
        try:
            if ours:
                self._put_in_force(before.replace(**ours[-1].rest))
            elif wanted != shared:
                self._put_in_force(with_shared_part(before, wanted, self._offered))
        except Exception as e:  # surfaces in apply() and in the panel
            self._refused = (wanted, before)
            for change in ours:
                self._settle(change, e)
            self._take_back(shared)
            if not ours:
                self.error = e
                self._history.mark("option", f"cannot follow the swarm: {type(e).__name__}")
                logger.warning(f"This peer cannot train with what its swarm has agreed on: {e}")
            return
        # when the last step is taken, what was asked for before it has been overtaken
        for change in waiting if wanted == hosting.plan.newest else ours:
            self._settle(change)

    def _take_back(self, shared: Shared) -> None:
        """As the host, decide that all stays, or becomes again, as it is here."""
        hosting = self.hosting
        if hosting is None or hosting.not_host_reason is not None or hosting.plan is None:
            return
        if hosting.plan.newest != shared:
            hosting.decide_at_once(shared, self._epoch)

    # -- what counts ----------------------------------------------------------------------------------------------

    @property
    def _plan(self) -> Plan | None:
        hosting = self.hosting
        return None if hosting is None else hosting.plan

    @property
    def _optimizer(self) -> Optimizer | None:
        strategy = self._strategy
        return None if strategy is None else strategy.optimizer

    @property
    def _epoch(self) -> int:
        """That this peer has reached."""
        optimizer = self._optimizer
        return 0 if optimizer is None else optimizer.local_epoch

    @property
    def _seconds_left(self) -> float | None:
        """Until that is over, if it can be told."""
        optimizer = self._optimizer
        return None if optimizer is None else seconds_left(optimizer.tracker.global_progress)

    def _wanted(self) -> Shared | None:
        hosting = self.hosting
        if hosting is None:
            return None
        return hosting.wanted(self._epoch, is_paused=self._stage.state is RunState.PAUSED)

    def _step_if_due(self) -> None:
        wanted = self._wanted()
        if wanted is None:
            return
        has_waited = any(change.shared == wanted for change in self._waiting())
        is_due = wanted != self._shared and self._refused != (wanted, self._in_force)
        if is_due or has_waited:
            self._stage.hand_in(self._take_step)
        elif wanted == self._shared:
            self._refused = None

    def _waiting(self) -> list[OptionsChange]:
        return [change for change in self._changes if change.rest]

    def _as_to_come(self, change: OptionsChange) -> Options:
        """All options as they will be once a change is in force: with what came into force while it waits."""
        if not change.rest:
            return change.options
        try:
            return with_shared_part(self._in_force.replace(**change.rest), change.shared, change.options)
        except OptionsError:  # what came between does not go with it
            return change.options

    def _without_rest(self, change: OptionsChange) -> Options:
        """As much of a change as goes with what all peers agree on for the present; the rest of it waits."""
        try:
            now = self._with_present(change.options)
        except OptionsError:
            plan = self._plan
            if plan is None or plan.newest != change.shared:
                raise
            now = self._in_force  # its parts need each other
        if now is self._in_force or change.is_shared:
            change.rest = {name: value for name, (_, value) in now.difference(change.options).items()}
        return now

    def _with_present(self, options: Options) -> Options:
        return with_shared_part(options, self._shared, self._in_force)

    def _as_agreed(self, change: OptionsChange, hosting: Hosting) -> Options:
        """Options that are in force where they come from, as they count here."""
        plan = hosting.plan
        if plan is None:
            return change.options
        if plan.newest == change.shared:
            hosting.take_early()  # where they come from, that epoch has begun
            return change.options
        try:
            return self._with_present(change.options)
        except OptionsError:  # where they come from, they are all in force
            return change.options

    def _check_host(self, labels: Sequence[str]) -> None:
        reason = self.not_host_reason
        if reason is not None:
            raise OptionsError(
                f"{', '.join(labels)} cannot be changed at this peer: {reason}. Change it there, or give this run a "
                "name of its own (run_id=...). Codecs, delays and timeouts are each peer's own"
            )

    # -- the outcome ----------------------------------------------------------------------------------------------

    def _settle(self, change: OptionsChange, error: Exception | None = None) -> None:
        with self._stage.changed:
            self._changes = tuple(one for one in self._changes if one is not change)
            if change.outcome.done():  # the monitor and the training thread may find the end of it at once
                return
            if error is None:
                change.outcome.set_result(None)
                return
            self.error = error
            self._history.mark("option", f"options not changed: {type(error).__name__}")
            change.outcome.set_exception(error)

    def _put_in_force(self, options: Options) -> None:
        """Go on with other options, if they are others; while nothing trains, the next start begins with them.

        :raises Exception: whatever goes wrong with them; the old ones stay
        """
        changes = self._in_force.difference(options)
        if not changes:
            return
        if self._strategy is not None:
            self._followers.check(options)
            self._strategy.change_options(options)
            if self._stage.state in (RunState.TRAINING, RunState.PAUSED):
                self._followers.tell(options)
        with self._stage.changed:
            for name, values in changes.items():
                before, after = map(FIELDS[name].words, values)
                # one that is on as needed may be called off, or left to itself, without anything to see
                if before != after and self._stage.state is not RunState.READY:
                    change = OptionChange(name, *values)
                    self._history.mark("option", f"{FIELDS[name].label}: {after}", change=change)
            self._in_force, self._shared = options, shared_part(options)
