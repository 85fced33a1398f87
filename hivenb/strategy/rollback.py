"""A loss that explodes all the same: the last good state is kept in main memory, and training returns to it."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.averaging.finite import are_finite
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.optimizer.skipped_batches import MOST_IN_A_ROW
from hivenb.errors import TrainingError, UnbelievedStateError
from hivenb.options.options import Options
from hivenb.strategy.trains import Trains
from hivenb.swarm.agreement.options_record import Return

if TYPE_CHECKING:
    from hivenb.engine.averaging.state_averager import TrainingStateAverager


# -- kept state ------------------------------------------------------------------------------------------------------
#
# The last good state of a training, kept in main memory, and how a peer returns to it.


class KeptState:
    """A copy of parameters, optimizer state and buffers in main memory; a new one is written over the one before.

    It is kept by position, not by tensor, so that an optimizer's successor can return to it, too. Learning rates and
    schedules are left as they are: they go on with the swarm epoch. For the thread that trains, but for
    :attr:`epoch`.
    """

    def __init__(self) -> None:
        #: the swarm epoch that the copy is of; ``None`` while there is none
        self.epoch: int | None = None
        self._tensors: dict[Any, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    @torch.no_grad()
    def keep(self, optimizer: Optimizer, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Take a copy of the present state, if all of it is finite and no step is under way in the background.

        :param optimizer: between two of its steps
        :param buffers: of the module, by their names
        :returns: whether it was taken; if not, the copy before is still there
        """
        averager = optimizer.state_averager
        if not averager.lock_optimizer.acquire(blocking=False):
            return False  # a step is under way in the background, and training does not wait for it
        try:
            tensors, values = _state_of(averager, buffers)
            if averager.is_in_a_step or not are_finite(_floats(tensors.values())):
                return False
            self.epoch = None  # until all is written
            self._tensors = {key: _copied(tensor, self._tensors.get(key)) for key, tensor in tensors.items()}
            self._values = copy.deepcopy(values)
            self.epoch = averager.epoch_of_parameters
        finally:
            averager.lock_optimizer.release()
        return True

    def forget(self) -> None:
        """Give the memory back."""
        self.epoch = None
        self._tensors, self._values = {}, {}

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer, buffers: Mapping[str, torch.Tensor]) -> None:
        """Give the model, its buffers and the torch optimizer what was kept of them.

        :param optimizer: of which nothing is under way in the background
        """
        averager = optimizer.state_averager
        with averager.lock_optimizer, averager.lock_averaged_tensors:
            present, _ = _state_of(averager, buffers)
            for key, kept in self._tensors.items():
                if key in present and present[key].shape == kept.shape:
                    present[key].copy_(kept)
            for (number, name), value in self._values.items():
                _state_by_number(averager)[number][name] = copy.deepcopy(value)
        averager.take_over_parameters()
        if averager.outer_rounds is not None:
            if ("anchor", 0) in self._tensors:
                averager.outer_rounds.outer.note_anchors()
            else:  # an outer optimizer is newer than what was kept
                averager.outer_rounds.begin_at_parameters()
        if optimizer.grad_averager is not None:
            _forget_left_over(optimizer.grad_averager)


def roll_back(optimizer: Optimizer, kept: KeptState, buffers: Mapping[str, torch.Tensor], epoch: int) -> None:
    """Return to a state that was kept, and go on with it at a swarm epoch.

    What is under way in the background is finished first, and the samples of the present epoch are dropped.

    :param optimizer: between two of its steps, on the training thread
    :param kept: has a state
    :param buffers: of the module, by their names
    :param epoch: not before the present one. Peers at an earlier one download this peer's state, as from any other
      that is ahead of them
    """
    optimizer.finish_delayed_updates()
    optimizer.rounds.leave()
    optimizer.rounds.begin_anew()
    optimizer.state_averager.give_up_searches()
    with optimizer.tracker.pause_updates():
        kept.put_back(optimizer, buffers)
        optimizer.begin_epoch(epoch)
    optimizer.state_averager.move_schedulers()


def _state_of(
    averager: TrainingStateAverager, buffers: Mapping[str, torch.Tensor]
) -> tuple[dict[Any, torch.Tensor], dict[Any, Any]]:
    """All tensors of a training by what and where they are, and what else the optimizer knows of its parameters."""
    parameters = [parameter for group in averager.optimizer.param_groups for parameter in group["params"]]
    tensors: dict[Any, torch.Tensor] = dict(enumerate(parameters))
    tensors |= {("extra", number): tensor for number, tensor in enumerate(averager.extra_tensors)}
    tensors |= {("buffer", name): buffer for name, buffer in buffers.items()}
    if averager.outer is not None:
        tensors |= {("anchor", number): anchor for number, anchor in enumerate(averager.outer.anchors)}
        tensors |= {("moment", number): moment for number, moment in enumerate(averager.outer.moments)}
    values: dict[Any, Any] = {}
    for number, state in enumerate(_state_by_number(averager)):
        for name, value in state.items():
            (tensors if torch.is_tensor(value) else values)[number, name] = value
    return tensors, values


def _state_by_number(averager: TrainingStateAverager) -> list[dict[str, Any]]:
    optimizer = averager.optimizer
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


def _floats(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel())


def _copied(tensor: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    """A copy in main memory, in the place of an older one if that fits."""
    if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
        place = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return place.copy_(tensor)


def _forget_left_over(averager: Any) -> None:
    """Drop what PowerSGD has left over of gradients that have led astray, and what it has learned of them in vain."""
    left_over, learned = getattr(averager, "_ms", ()), getattr(averager, "_qs", ())
    for tensor in chain(left_over, (one for one in learned if not are_finite([one]))):
        tensor.zero_()


# -- loss watch ------------------------------------------------------------------------------------------------------
#
# Whether a loss explodes: not finite, or far above what it was, for several batches in a row.


#: Batches in a row whose losses have to be strange: one or two are what noise, or a bad batch, looks like.
IN_A_ROW = 8

#: Latest losses that were not strange, by which the next one is judged.
RECENT = 128

#: First losses, which tell how large the loss of a model is that knows nothing.
FIRST = 16

#: How often the width of the recent losses a strange one is above their median.
WIDTHS = 10.0

#: How often as large as the first ones a strange one is at least, where it is that far above the recent ones as well:
#: a schedule that starts anew costs all that was learned at worst.
ABOVE_FIRST = 2.0

#: How often as large as the first ones a loss is strange, however slowly it came there.
FAR_ABOVE_FIRST = 10.0

#: Strange losses that are finite, in a row, after which they are taken for what is usual by now.
USUAL_AFTER = 1024


class LossWatch:
    """Judges the losses of one peer, batch by batch.

    The numbers above are such that nothing that was measured gave a false alarm: small tasks with batches of 2 to 64,
    several optimizers and rates, and schedules that start anew (``tests/strategy/test_loss_watch.py``).
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: list[float] = []
        #: losses up to which nothing is strange, and beyond which everything is; as soon as the first ones are known
        self._bounds: tuple[float, float] | None = None
        self._strange = 0

    @property
    def is_calm(self) -> bool:
        """Whether the latest loss is as usual."""
        return self._strange == 0

    @property
    def has_exploded(self) -> bool:
        """Whether the latest losses are all strange."""
        return self._strange >= IN_A_ROW

    def note(self, losses: Iterable[float]) -> None:
        """Go on with the losses of further batches.

        :param losses: oldest first
        """
        for loss in losses:
            if self._is_strange(loss):
                self._strange += 1
                if math.isfinite(loss) and self._strange >= USUAL_AFTER:
                    self._begin_anew()
                continue
            self._strange = 0
            self._recent.append(loss)
            if len(self._first) < FIRST:
                self._first.append(loss)
                self._bounds = _bounds(self._first) if len(self._first) == FIRST else None

    def forget_explosion(self) -> None:
        """Judge what comes next as if nothing had happened: training has returned to where it was."""
        self._strange = 0

    def _begin_anew(self) -> None:
        self._recent.clear()
        self._first.clear()
        self._bounds, self._strange = None, 0

    def _is_strange(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if self._bounds is None or loss <= self._bounds[0]:
            return False
        return loss > self._bounds[1] or loss > median(self._recent) + WIDTHS * _width(self._recent)


def _bounds(first: list[float]) -> tuple[float, float]:
    usual = median(first)
    size = max(abs(usual), _width(first))
    return usual + (ABOVE_FIRST - 1) * size, usual + (FAR_ABOVE_FIRST - 1) * size


def _width(losses: Iterable[float]) -> float:
    """Between the lowest and the highest tenth."""
    ordered = sorted(losses)
    tenth = len(ordered) // 10
    inner = list(islice(ordered, tenth, len(ordered) - tenth))
    return inner[-1] - inner[0]


# -- rolling back ----------------------------------------------------------------------------------------------------


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
        self._unread: list[torch.Tensor | float] = []
        self._read_at = 0.0
        self._to_come: Return | None = None
        self._latest_at: float | None = None
        self._is_reached = False
        self._returns, self._returned_at = 0, 0
        self._diverged_since: float | None = None
        self._was_with_others = False

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
