"""A loss that explodes all the same: the last good state is kept in main memory, and training returns to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.optimizer.skipped_batches import MOST_IN_A_ROW
from hivenb.errors import TrainingError, UnbelievedStateError
from hivenb.options.options import Options
from hivenb.strategy.divergence import LossWatch
from hivenb.strategy.kept_state import KeptState, roll_back, trained_names
from hivenb.strategy.trains import Trains
from hivenb.swarm.agreement.options_record import Return

#: Seconds between two looks at the losses. Reading them waits for the device, so it is not done each batch.
LOOK_EVERY = 0.1

#: How often training returns by itself to one state that was kept: what explodes once more will explode again.
MOST_RETURNS = 3

#: Seconds for which a peer whose state has diverged, or that is given nothing but diverged ones, waits for a return
#: before that is an error.
DIVERGED_FOR = 60.0

#: What to do when that was in vain.
REMEDY = "Lower the learning rate, clip gradients (Trainer(gradient_clip_val=1.0)), or look at the data"


class Rollback:
    """Keeps the last good state of a training, and returns to it. All of it is for the training thread.

    :param training: that returns
    """

    def __init__(self, training: Trains):
        self._training = training
        #: called between two batches, for as long as the loss has exploded; without it, a peer that is alone returns
        self.on_explosion: Callable[[], None] | None = None
        #: called with the epoch whose state training has returned to; with ``None`` where that has become needless
        self.on_return: Callable[[int | None], None] | None = None
        #: the last good state
        self.kept = KeptState()
        #: of the losses of this peer
        self.loss_watch = LossWatch()
        self._begin()

    def _begin(self) -> None:
        self._unread: list[torch.Tensor | float] = []
        self._read_at = 0.0
        self._to_come: Return | None = None
        self._latest_at: float | None = None
        self._is_reached = False
        self._returns, self._returned_at = 0, 0
        self._diverged_since: float | None = None
        self._was_with_others = False

    def begin_anew(self) -> None:
        """Forget what was kept and seen of a training before, with which the present one does not go on."""
        self.kept.forget()
        self.loss_watch.begin_anew()
        self._begin()

    # -- the last good state --------------------------------------------------------------------------------------

    def see_loss(self, output: Any) -> None:
        """Look at what a training step gave, before anything else changes the parameters that it is of."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        optimizer = self._training.optimizer
        if optimizer is None or not torch.is_tensor(loss):
            return
        # in main memory nothing has to be waited for
        self._unread.append(loss.item() if loss.is_cpu and loss.numel() == 1 else loss.detach().float().mean())
        is_due = self._is_due(optimizer)
        # a loss that is not finite ends training soon, be it read or not
        is_urgent = 2 * optimizer.skipped_batches.in_a_row >= MOST_IN_A_ROW
        if not (is_due or is_urgent or time.monotonic() >= self._read_at + LOOK_EVERY):
            return
        self.loss_watch.note([float(one) for one in self._unread])
        self._unread, self._read_at = [], time.monotonic()
        if is_due and self.loss_watch.is_calm and self.kept.keep(optimizer, self._buffers):
            self.kept.trained = trained_names(self._training.lightning_module)
            every, epoch = self._training.options.snapshot_every, self.kept.epoch
            if every is not None and epoch is not None and epoch >= self._returned_at + every:
                self._returns = 0  # it has gone well for that long

    def _is_due(self, optimizer: Optimizer) -> bool:
        """Whether a copy is to be taken in this epoch: in the same ones at all peers, which return together."""
        options, epoch = self._training.options, optimizer.state_averager.epoch_of_parameters
        every = options.snapshot_every
        if every is None and self.kept.epoch is not None:
            self.kept.forget()
        if every is None or options.auxiliary or self._to_come is not None:
            return False
        return epoch % every == 0 and epoch != self.kept.epoch

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._training.lightning_module.named_buffers())

    # -- returning ------------------------------------------------------------------------------------------------

    def expect_return(self, to_come: Return, within: float | None = None) -> None:
        """Return as soon as somebody has, before the next batch; a peer without that state downloads it instead.

        :param to_come: what has been agreed on
        :param within: seconds after which this peer returns in any case, as the first one
        """
        optimizer = self._training.optimizer
        if optimizer is None or optimizer.local_epoch > to_come.at:
            return
        self._to_come, self._is_reached = to_come, optimizer.local_epoch == to_come.at
        self._latest_at = None if within is None else time.monotonic() + within

    def note_epoch(self, report: EpochReport) -> None:
        """This peer has ended an epoch by a step of its own."""
        self._is_reached = self._to_come is not None and report.epoch >= self._to_come.at
        if (optimizer := self._training.optimizer) is not None:
            optimizer.share_state(not self._is_reached)  # what others download at this epoch is what all return to
        self._was_with_others = report.group_size > 1

    @property
    def is_return_due(self) -> bool:
        """Whether it is time for the return that is to come: somebody has returned already, or is to begin."""
        optimizer, to_come = self._training.optimizer, self._to_come
        if optimizer is None or to_come is None:
            return False
        is_time = self._latest_at is not None and time.monotonic() >= self._latest_at
        return is_time or bool(optimizer.tracker.global_epoch >= to_come.at)

    def return_if_due(self) -> None:
        """Return if it is time to; to be called between two batches."""
        if self._training.options.auto_roll_back and self.loss_watch.has_exploded:
            (self.on_explosion or self._return_if_alone)()
        if (to_come := self._to_come) is None or (optimizer := self._training.optimizer) is None:
            return
        if not self.is_return_due:
            return
        self._to_come = None
        # at the very epoch of the return, a state that was downloaded may be of somebody that has not returned yet
        has_gone_on = optimizer.local_epoch > to_come.at and not self._is_reached
        if self.kept.epoch == to_come.to and not has_gone_on:
            self.roll_back(max(to_come.at, optimizer.local_epoch))
            optimizer.share_state(True)
            return
        self.loss_watch.forget_explosion()
        optimizer.rounds.begin_anew()
        if self._is_reached and not self._training.options.auxiliary:
            optimizer.fall_behind()
        # else the state of those who have returned was downloaded, or is as soon as they are seen ahead
        if self.on_return is not None:
            self.on_return(None)

    def tolerating_divergence(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a step, which for a while is no error where it is of a diverged state, and no other is to be had.

        All are about to return then: the host by itself, and the others with it. What the step computes of such a state
        counts for nothing; what needs the others' state is given up.

        :param step: of the optimizer; raises :class:`hivenb.errors.UnbelievedStateError` if the others' have diverged,
          and :class:`hivenb.errors.NotFiniteError` if this peer's own is. With ``auto_roll_back``, it does so only
          after :data:`DIVERGED_FOR` seconds
        :returns: what it gives; ``None`` if it was given up
        """
        optimizer = self._training.optimizer
        if optimizer is not None:
            optimizer.skipped_batches.outlasts = self._outlasts_batches
        try:
            output = step(*args, **kwargs)
        except UnbelievedStateError:
            if not self._tolerates_divergence():
                raise
            return None
        if optimizer is None or not optimizer.skipped_batches.in_a_row:
            self._diverged_since = None
        return output

    def _outlasts_batches(self) -> bool:
        # a read of the DHT that fails finds nobody, either
        return self._tolerates_divergence() and (self._was_with_others or not self.is_alone)

    def _tolerates_divergence(self) -> bool:
        self._diverged_since = self._diverged_since or time.monotonic()
        return self._training.options.auto_roll_back and time.monotonic() - self._diverged_since <= DIVERGED_FOR

    def roll_back(self, epoch: int | None = None) -> int:
        """Return to the state that was kept last, between two batches.

        Peers that train with this one go on from there when they see it ahead of them: they download the state, unless
        they have been told to return to their own copy of it (``expect_return``).

        :param epoch: of the swarm, to go on at; by default the present one, which is for a peer that is alone
        :returns: the epoch of that state
        :raises TrainingError: if there is none
        """
        optimizer, to = self._training.optimizer, self.kept.epoch
        if optimizer is None or to is None:
            raise TrainingError(no_state(self._training.options))
        before, at = optimizer.local_epoch, optimizer.local_epoch if epoch is None else epoch
        roll_back(optimizer, self.kept, self._buffers, at)
        self._returns, self._returned_at = self._returns + 1, at
        self._unread = []
        self.loss_watch.forget_explosion()
        rank_zero_warn(
            f"Training has returned from epoch {before} to the state of epoch {to}, and goes on at epoch {at}"
        )
        if self.on_return is not None:
            self.on_return(to)
        return to

    @property
    def is_returning(self) -> bool:
        """Whether a return has been agreed on that is still to come."""
        return self._to_come is not None

    @property
    def is_about_to_fail(self) -> bool:
        """Whether batches are skipped, too many of which end training."""
        optimizer = self._training.optimizer
        return optimizer is not None and optimizer.skipped_batches.in_a_row > 0

    @property
    def is_alone(self) -> bool:
        """Whether no other peer is known to train with this one."""
        optimizer = self._training.optimizer
        return optimizer is None or bool(optimizer.tracker.global_progress.num_peers <= 1)

    @property
    def may_return(self) -> bool:
        """Whether training may return by itself once more; if not, that is said, and the loss is left alone."""
        if self.kept.epoch is not None and self._returns < MOST_RETURNS:
            return True
        reason = (
            no_state(self._training.options)
            if self.kept.epoch is None
            else f"it has returned to the state of epoch {self.kept.epoch} {self._returns} times, in vain"
        )
        self.loss_watch.forget_explosion()
        self._training.notify(
            "the loss explodes", f"the loss explodes, and training does not return by itself: {reason}. {REMEDY}"
        )
        return False

    def _return_if_alone(self) -> None:
        if not self.may_return:
            return
        if self.is_alone:
            self.roll_back()
            return
        self.loss_watch.forget_explosion()
        self._training.notify(
            "the loss explodes",
            "the loss explodes, and only a peer that is alone returns by itself to its last good state: the others "
            "would average theirs in again. With hivenb.TrainingRun instead of a script, all peers return together",
        )


def no_state(options: Options) -> str:
    """Why there is no state to return to, in words."""
    if options.snapshot_every is None:
        return "no snapshot is taken (snapshot_every=None)"
    return (
        f"there is no snapshot yet: one is taken every {options.snapshot_every} swarm epochs "
        "(snapshot_every), while the loss is as usual"
    )
