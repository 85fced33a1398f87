"""A round of averaging, as whoever waits for it sees it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import InvalidStateError
from typing import Any, cast

from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import MPFuture


class Round(StepControl):
    """A round of averaging that any thread may cancel, at any time and as often as it likes."""

    _lock_cancelling = threading.Lock()

    #: the epoch that it is a round of, which is what ours gather; infinite if it is of none
    epoch: float

    #: whether this peer has offered its group to begin before its trigger
    offers_early = False

    #: whether it does, once its averager, which was told to let it, knows that; ``None`` if it was not told
    begins_early: MPFuture[bool] | None = None

    #: whether training waits for it, though it has no trigger yet: it was to begin by itself, or now
    is_due = False

    #: when its group has begun, by ``time.monotonic``, as this peer let it or by itself; ``None`` if it has none
    let_begin_at: float | None = None

    #: whether it was given up since this peer has left, or all others have
    is_deserted = False

    @classmethod
    def of(cls, control: StepControl, gathered: Any) -> Round:
        """The same round, which hivemind has made already.

        :param gathered: what this peer sends to the others with it
        """
        # hivemind/averaging/averager.py:step makes it and sends it to its process at once: there is no moment in which
        # it could be handed one of another class, and a second object would share its state but not its outcome
        control.__class__ = cls
        control.epoch = gathered if isinstance(gathered, int) else math.inf
        # nobody awaits it here, and hivemind/utils/mpfuture.py would run the main thread's loop to tell whoever does:
        # an error in a thread with a loop of its own, such as the tracker's
        control._loop = control._aio_event = None
        return cast(Round, control)

    def __del__(self) -> None:
        if self.done():
            MPFuture.__del__(self)  # hivemind complains of one that was never triggered, whatever has become of it
        else:
            super().__del__()

    @property
    def is_to_come(self) -> bool:
        """Whether whoever waits for it has not had it yet: it has not begun, or did so by itself."""
        return self.begins_early is not None if self.triggered else not self.done()

    @property
    def triggered(self) -> bool:
        # hivemind/optim/grad_averager.py asserts that a round is not, and one may be deserted at any moment: begun
        # all the same, it comes to nothing, as one that others desert later does
        return not self.is_deserted and bool(super().triggered)

    def await_beginning(self, answer: MPFuture[bool]) -> None:
        """Know whether it begins without its trigger, and when.

        :param answer: of its averager, which was told to let it
        """
        self.begins_early = answer
        answer.add_done_callback(self._note_beginning)

    def _note_beginning(self, answer: MPFuture[bool]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result():
            self.let_begin_at = time.monotonic()

    def allow_allreduce(self) -> None:
        """Let it begin when it has a group; without effect where it may already, or was given up."""
        with self._lock_cancelling:
            if not self.done() and self._trigger is not None and not self._trigger.done():
                if self.stage is AveragingStage.AWAITING_TRIGGER:
                    self.let_begin_at = time.monotonic()
                super().allow_allreduce()

    def desert(self) -> None:
        """Cancel it since there is nobody to average with."""
        self.is_deserted = True
        self.cancel()

    def cancel(self) -> bool:
        # Replaces hivemind/averaging/control.py:cancel, which sets a future without a look at whether it is set, and
        # tells the averager before the round is cancelled: that one then sees none that is, searches on until the
        # timeout, and takes part, without data, in the group of whoever comes meanwhile, such as a newcomer.
        with self._lock_cancelling, contextlib.suppress(InvalidStateError):
            if self.done() or not MPFuture.cancel(self):
                return False
            if self._trigger is not None:
                self._trigger.cancel()
            if self._cancel is not None:
                self._cancel.set_result(None)
            return True
        return False
