"""How a run returns to its last good state: with all peers of the swarm, which its host tells when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hivenb.errors import TrainingError
from hivenb.run.status import RunState
from hivenb.strategy.divergence import LossWatch
from hivenb.strategy.kept_state import KeptState
from hivenb.strategy.rollback import no_state
from hivenb.swarm.agreement.options_record import Return

if TYPE_CHECKING:
    from hivenb.figures.history import History
    from hivenb.options.options import Options
    from hivenb.run.pause_and_stop import Stage
    from hivenb.strategy.strategy import HivemindStrategy
    from hivenb.swarm.agreement.host import Hosting

#: Seconds that the others are given to learn that they return to copies of their own, and need to download nothing.
NOTICE = 2.0

#: Seconds at most for which a peer whose loss has exploded waits for the host to let all return.
LONGEST_WAIT = 15.0

#: Seconds between two looks whether it is time.
_TICK = 0.05


class RollingBack:
    """What a run keeps to return to, from one start to the next, and how it returns.

    A peer that returns goes on at an epoch that no other peer can have reached by itself meanwhile. Who learns of it in
    time returns to a copy of its own; all others find themselves behind, and download the state from those who have
    returned. So nobody averages what has exploded with what has not.

    :param stage: of the run
    :param history: where a return is marked
    """

    def __init__(self, stage: Stage, history: History):
        self.kept, self.loss_watch = KeptState(), LossWatch()
        self._stage, self._history = stage, history
        self._strategy: HivemindStrategy | None = None
        self._hosting: Hosting | None = None
        self._known: Return | None = None
        self._requests: list[_Request] = []

    def begin(self, strategy: HivemindStrategy) -> None:
        """Keep states of another start of the run.

        :param strategy: that it trains with
        """
        rollback = strategy.rollback
        rollback.kept, rollback.loss_watch = self.kept, self.loss_watch
        rollback.on_return, rollback.on_explosion = self._mark, self._on_explosion
        self.loss_watch.forget_explosion()
        self._strategy = strategy

    def join(self, hosting: Hosting) -> None:
        """Follow what the swarm decides from now on."""
        self._known, self._hosting = hosting.returned, hosting

    def leave(self) -> None:
        """Follow it no longer."""
        self._hosting = None

    def look(self) -> None:
        """See whether all are to return; to be called after the swarm's decisions were read. Does not wait."""
        hosting = self._hosting
        if hosting is None or hosting.returned in (None, self._known):
            return
        self._known = hosting.returned
        self._stage.hand_in(self._follow)

    def ask(self, options: Options, wait: bool) -> int:
        """See :meth:`hivenb.TrainingRun.roll_back`."""
        with self._stage.changed:
            to = self.kept.epoch
            if self._strategy is None or to is None:
                raise TrainingError(f"the run cannot be rolled back: {no_state(options)}")
            self._check_host()
            request = _Request()
            self._stage.hand_in(lambda: self._carry_out(request))
            if wait and self._stage.state in (RunState.STARTING, RunState.TRAINING, RunState.PAUSED):
                self._stage.wait_until(lambda: request.is_settled or not self._stage.state.is_active)
            if request.error is not None:
                raise request.error
            return to

    # -- on the training thread, between two batches --------------------------------------------------------------

    def _carry_out(self, request: _Request) -> None:
        self._requests.append(request)
        try:
            self._return()
        except Exception as e:  # surfaces in ask(), and as a mark
            self._history.mark("rollback", f"not rolled back: {type(e).__name__}")
            self._settle(e)

    def _settle(self, error: Exception | None = None) -> None:
        for request in self._requests:
            request.is_settled, request.error = True, error
        self._requests = []
        self._stage.notify()

    def _return(self) -> None:
        strategy, hosting = self._strategy, self._hosting
        optimizer = None if strategy is None else strategy.optimizer
        if strategy is None or optimizer is None or not optimizer.is_alive() or self.kept.epoch is None:
            raise TrainingError("the run cannot be rolled back: it does not train any more")
        is_paused = self._stage.state is RunState.PAUSED
        if hosting is None or (hosting.is_alone and strategy.rollback.is_alone):
            strategy.rollback.roll_back()
        else:
            self._check_host()
            epoch = max(optimizer.local_epoch, optimizer.tracker.global_epoch)
            self._known = Return(self.kept.epoch, hosting.decide_return(self.kept.epoch, epoch))
            if is_paused:
                strategy.rollback.roll_back(self._known.at)
            else:
                strategy.rollback.expect_return(self._known, within=NOTICE)
        if is_paused:
            optimizer.step_aside()  # as it had before

    def _follow(self) -> None:
        if self._strategy is not None and self._known is not None:
            self._strategy.rollback.expect_return(self._known)

    def _on_explosion(self) -> None:
        strategy, hosting = self._strategy, self._hosting
        if strategy is None:
            return
        decides = hosting is None or hosting.is_alone or hosting.not_host_reason is None
        if decides and not strategy.rollback.is_returning and strategy.rollback.may_return:
            self._return()
        if strategy.rollback.is_about_to_fail and strategy.rollback.loss_watch.has_exploded:
            self._hold(strategy)

    def _hold(self, strategy: HivemindStrategy) -> None:
        """Make no further batch, of which too many that are skipped end the run, until all return."""
        if strategy.optimizer is not None:
            strategy.optimizer.rounds.leave(
                wait=False
            )  # or the host waits in one of them for this peer, which waits for it
        end = time.monotonic() + LONGEST_WAIT
        while not strategy.rollback.is_return_due and self._stage.state is RunState.TRAINING:
            if time.monotonic() > end:
                self.loss_watch.forget_explosion()  # the others are well, or their host is gone
                return
            self._stage.wait_until(lambda: self._stage.has_tasks, _TICK)
            self._stage.do_tasks()

    def _check_host(self) -> None:
        hosting = self._hosting
        if hosting is not None and not hosting.is_alone and (reason := hosting.not_host_reason) is not None:
            raise TrainingError(
                f"this peer cannot roll the run back: {reason}. The others would average their parameters in again"
            )

    def _mark(self, to: int | None) -> None:
        if to is not None:
            self._history.mark("rollback", f"returned to the state of epoch {to}", breaks_trend=True)
        self._settle()


class _Request:
    """One wish to return, until all is done."""

    def __init__(self) -> None:
        self.is_settled = False
        self.error: Exception | None = None
