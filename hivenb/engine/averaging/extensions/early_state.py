"""A round of the state that is held before the step of its epoch, and not after it.

What is averaged are the parameters from before the step. All in the group then step from the same parameters, with the
same gradients; what is left of a difference, such as what a codec makes of the gradients, is averaged an epoch later.
Nothing changes them in an epoch, so that they are exchanged as soon as the group has met, while all compute. A module's
buffers change with each batch: where there are some, all is exchanged when the epoch is over, beside the gradients, or
after the step if it is large.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager
from hivemind.utils import get_logger

from hivenb.engine.averaging.extensions.buffers import AveragesBuffers
from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.group_records import AT_ONCE, EARLY, offering_early
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)

#: Seconds between two looks whether a round is over that has not said whether it began early.
_LOOK_AGAIN = 0.1

#: Numbers of a state that is exchanged beside the gradients, at most. With more of them, the bytes take longer than the
#: round trip that this saves, and on a slow line the one would keep the other waiting.
MOST_BESIDE_GRADIENTS = 250_000


class AveragesStateEarly(AveragesBuffers, _TrainingStateAverager):
    """Mixin to put *before* hivemind's averager of the state: its round may begin before the step of its epoch.

    A group does so if all in it have offered that. Otherwise, with a helper, a peer of plain hivemind or one that
    averages in the background, the round is held after the step, as hivemind does.
    """

    #: a round that may have begun early, and the seconds that it may take
    _early: tuple[Round, float] | None = None
    begin_early: Any
    numbers_in_state: Any
    take_in_changes: Any
    _goes_on_meanwhile: bool

    def __init__(self, *args: Any, **kwargs: Any):
        # for both processes
        self._offers_early = torch.zeros(1, dtype=torch.bool).share_memory_()
        super().__init__(*args, **kwargs)

    # -- in the process that trains -----------------------------------------------------------------------------

    def schedule_step(self, *args: Any, offers_early: bool = False, **kwargs: Any) -> StepControl:
        """As hivemind's.

        :param offers_early: whether this peer may hold the round before its step, if the others may. Unless there are
          buffers, it begins as soon as its group has met, for which :meth:`be_ready_early` is to be called before
        """
        self._offers_early.fill_(offers_early)
        control = super().schedule_step(*args, **kwargs)
        control.offers_early = offers_early
        if offers_early and self._may_begin_at_once:
            control.begins_early = self.begin_early(int(control.epoch))
        return control

    @property
    def _may_begin_at_once(self) -> bool:
        return self.module_buffers is None

    @property
    def may_begin_early(self) -> bool:
        """Whether its rounds may begin before the step: beside the gradients, not those of large models."""
        return self._may_begin_at_once or self.numbers_in_state() <= MOST_BESIDE_GRADIENTS

    def be_ready_early(self) -> None:
        """Know what to exchange in a round that is about to be scheduled, and may begin as soon as it has a group."""
        if self._may_begin_at_once:
            self._load_state()

    def _load_state(self) -> None:
        self.step(wait_for_delayed_updates=True)
        self.take_in_changes(remember=True)
        self._goes_on_meanwhile = True
        if self.module_buffers is not None:
            self._load_buffers(self.module_buffers)
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()

    @property
    def has_begun_early(self) -> bool:
        """Whether a round was let begin early whose outcome the next step takes over."""
        return self._early is not None

    def exchange_early(self, control: Round, timeout: float) -> None:
        """Let a round begin with the state as it is now, unless it has begun; the next :meth:`step` waits for it.

        If its group does not agree, the step itself holds it, as if this had not been called.

        :param timeout: seconds that the step waits for its averages
        """
        if control.begins_early is None:
            self._load_state()
            control.begins_early = self.begin_early(int(control.epoch))
        control.is_due = True
        self._early = control, timeout

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._early is None:
            return super().step(*args, **kwargs)
        (control, timeout), self._early = self._early, None
        if _has_begun(control, timeout):
            self._take_over(control, timeout)
        elif kwargs.get("averaging_round") and not control.done():
            return super().step(*args, **kwargs | {"averaging_control": control})
        else:
            control.cancel()
        return super().step(
            *args, **kwargs | {"averaging_round": False, "averaging_control": None, "averaging_opts": None}
        )

    def _take_over(self, control: Round, timeout: float) -> None:
        try:
            gathered = control.result(timeout)
            logger.log(self.status_loglevel, f"Averaged parameters with {len(gathered)} peers")
        except (Exception, concurrent.futures.CancelledError) as e:
            # as in a round after the step: whatever was averaged before it failed is taken over
            logger.log(self.status_loglevel, f"Averaging failed with {e!r}")
        if not self.reuse_tensors:
            self._apply_averaging_results_()
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        if bool(self._offers_early):
            word = AT_ONCE if self._may_begin_at_once else EARLY
            step._data_for_gather = offering_early(step.data_for_gather, word)
        await super()._step(step=step, future_for_init=future_for_init)


def _has_begun(control: Round, timeout: float) -> bool:
    """Whether a round has begun early, once that is known.

    :param control: its averager was asked; there is no answer if it was over, or has found no group yet
    :param timeout: seconds after which a round without a group is given up
    """
    answer, deadline = control.begins_early, time.monotonic() + timeout
    while answer is not None and (not control.done() or answer.done()):
        try:
            return bool(answer.result(_LOOK_AGAIN))
        except (TimeoutError, concurrent.futures.TimeoutError):
            if time.monotonic() > deadline:
                control.cancel()
        except ProcessEndedError:
            break
    return False
