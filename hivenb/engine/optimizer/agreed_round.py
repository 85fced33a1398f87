"""A round of averaging that peers agree on before it is due: looked for in good time, taken, or left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from hivemind.averaging.control import AveragingStage

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.rounds.averager import ANSWER_TIMEOUT
from hivenb.engine.rounds.round import Round
from hivenb.errors import ProcessEndedError


class AgreedRound:
    """The next round of one averager, from when it is looked for until it begins. For the training thread.

    An averager's process takes up to 0.3 s until it has begun to look for a group, and training goes on meanwhile.
    """

    def __init__(self) -> None:
        #: the round, as far as it is known and has not begun; ``None`` if there is none
        self.control: Round | None = None
        self._scheduling: Future[Round] | None = None

    def look_for(self, schedule: Callable[[], Round]) -> None:
        """Look for a group in the background, unless that has been asked for already.

        :param schedule: lets the averager look for it, and returns the round when it does
        """
        if self._scheduling is None:
            self._scheduling = _in_thread(schedule)

    @property
    def is_looked_for(self) -> bool:
        """Whether a round is being scheduled."""
        return self._scheduling is not None

    def take(self, wait: bool = False) -> Round | None:
        """Know of the round that was scheduled meanwhile, and no longer of one that has begun or was given up.

        :param wait: for the one that is being scheduled
        :returns: the round that is to come, if there is any
        :raises TimeoutError: if the process of the averager does not answer
        """
        if self._scheduling is not None and (wait or self._scheduling.done()):
            try:
                self.control = self._scheduling.result(ANSWER_TIMEOUT)
            except ProcessEndedError:
                self.control = None  # nobody looks for it any more; before the next batch, a successor is made
            self._scheduling = None
        if self.control is not None and not self.control.is_to_come:
            self.control = None
        return self.control

    def cancel(self) -> None:
        """Give it up, whether it has a group already or not."""
        if self.control is not None:
            self.control.cancel()
            self.control = None

    def leave(self) -> Round | None:
        """Take no part in it: look no further, or count for nothing in the group that has met.

        :returns: the round, which may still be under way
        """
        left, self.control = self.control, None
        if left is None:
            return None
        if left.stage is AveragingStage.LOOKING_FOR_GROUP:
            left.cancel()
        elif not left.triggered and not left.done():
            left.weight = 0.0
            left.allow_allreduce()
        return left


def _in_thread(call: Callable[[], Round]) -> Future[Round]:
    """What a call will give; an executor would wait for its threads at the end of the process."""
    future: Future[Round] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    BackgroundThread(target=run, name="schedule-round").start()
    return future
