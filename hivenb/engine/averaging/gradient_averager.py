"""Gradient averagers that can be born on any thread, and how those of a user's own choice become such."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import NoCompression, TensorRole
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import AllReducePhases
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.utils import get_logger
from hivemind.utils.asyncio import enter_asynchronously

from hivenb.engine.averaging.averager import Averager
from hivenb.engine.averaging.extensions.extension import Exchange, Extension, GroupRecords
from hivenb.engine.averaging.finite import LateVerdict, are_finite, where_not_finite
from hivenb.engine.averaging.state_download import Download, SharesState
from hivenb.engine.exchange.exact_tensors import ExactKey
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING, NORM_BOUND, Gathered

# -- gradient buffers ------------------------------------------------------------------------------------------------
#
# Sums of the gradients of an epoch's batches: weighed by samples, and written no more often than they have to be.
#
# A parameter that no batch of an epoch has used has no gradient in its step, as with torch: no decay, and no step of
# its moments. That is known only when the epoch is over, and only by all peers together: beside the gradients, a group
# exchanges for each parameter whether one of its peers has seen one. With a peer of plain hivemind, which cannot say
# so, all parameters have a gradient, as they have for that peer.


logger = get_logger(__name__)


@dataclass(frozen=True)
class Unjudged:
    """A batch of which it is not known yet whether it counts.

    :param verdict: on whether its gradients are finite
    :param samples: in it
    :param first_for: numbers of the parameters that no batch before it in its epoch has used
    """

    verdict: LateVerdict
    samples: int
    first_for: tuple[int, ...]


class UsedParameters(Extension):
    """Which parameters have a gradient in a round: those that a batch of one of its peers has used.

    :param count: of parameters
    """

    name = "has_gradient"

    def __init__(self, count: int):
        # for both processes: 1 where a peer of the round has seen a gradient. Integers count for nothing among norms
        self.flags = torch.zeros(count, dtype=torch.int64).share_memory_()
        self._is_exchanged = False

    def fields(self) -> Sequence[Any]:
        return [self.name]

    def agree(self, group: GroupRecords) -> None:
        self._is_exchanged = group.all_say(self.name)
        if not self._is_exchanged:
            self.flags.fill_(1)

    def join(self, exchange: Exchange) -> Exchange:
        is_first_of_two = exchange.phase == AllReducePhases.PHASE_P.name.encode()
        if not self._is_exchanged or is_first_of_two:
            return exchange
        return exchange.with_exact([self.flags], [ExactKey(takes_largest=True)])


class GradientAverager(_GradientAverager, SharesState):
    """``hivemind``'s ``GradientAverager`` that can be created on any thread.

    Batches count by their samples, and are summed in single precision.
    """

    role = TensorRole.GRADIENT

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *args: Any, **kwargs: Any):
        # hivemind/optim/grad_averager.py takes the gradients' own type: sums of many batches in bfloat16 stop to grow,
        # and torch does not accept them as gradients of an offloaded copy in float32
        parameters = tuple(parameters)
        types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        if not kwargs.get("averaged_grads"):
            kwargs["averaged_grads"] = tuple(
                torch.zeros(parameter.shape, dtype=dtype).share_memory_()
                for parameter, dtype in zip(parameters, types, strict=True)
            )
        # before hivemind's class, or a user's own, which may take no such argument
        self.robust_aggregation = kwargs.pop("robust_aggregation", NORM_BOUND)
        self._is_loaded = False
        self._last: Unjudged | None = None
        #: by parameter, whether a batch of this epoch has used it
        self._is_used = [False] * len(parameters)
        self._watching: dict[int, Any] = {}
        self.used = UsedParameters(len(parameters))
        self.extensions = (self.used,)
        without = [parameter for parameter in parameters if parameter.grad is None]
        super().__init__(parameters, *args, **kwargs)
        if self._local_accumulators is not None:
            self._local_accumulators = tuple(
                accumulator.to(dtype) for accumulator, dtype in zip(self._local_accumulators, types, strict=True)
            )
        for parameter in without:
            parameter.grad = None  # hivemind gives each one of zeros, by which it would look used
        if self.reuse_grad_buffers:
            for parameter in parameters:
                if parameter.grad is not None:  # of a training, or an epoch, that is over
                    parameter.grad.zero_()
        self._watch()

    #: Samples for which a gradient counts as one where they are summed in the model's own buffers, by whoever computes
    #: them: each was weighed by its samples over these. By default all batches are taken for equally large.
    samples_of_weight_one: float | None = None

    #: Called before a round with this peer's own mean gradients, which the round writes over, and by parameter whether
    #: it has one; not if they count for nothing. ``None`` where nobody needs them.
    on_own_gradients: Callable[[Sequence[torch.Tensor], Sequence[bool]], None] | None = None

    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the gradients of a batch to those of the epoch, unless they are summed in the model's own buffers.

        :param batch_size: samples in it
        """
        # Replaces the method of hivemind/optim/grad_averager.py, which sets the sums to zero first: with large models,
        # each pass through memory takes as long as the network does
        self._is_loaded = False
        self._anchor_batch_size = self._anchor_batch_size or batch_size
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        if self.reuse_grad_buffers:
            return
        weight = batch_size / self._anchor_batch_size
        first: list[int] = []
        further: list[int] = []
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                (further if self._is_used[number] else first).append(number)
        for numbers, is_first in ((first, True), (further, False)):
            if numbers:
                totals = [self._local_accumulators[number] for number in numbers]
                _add([self.parameters[number].grad for number in numbers], totals, weight, is_first)
        for number in first:
            self._is_used[number] = True

    @property
    def sends_exactly(self) -> bool:
        """Whether gradients are sent as they are, so that all peers of a round have the same average."""
        return type(self.allreduce_kwargs["compression"]) is NoCompression

    def gradients(self) -> list[torch.Tensor]:
        """Those that the parameters have at the moment; none of a parameter that the last batch has not used."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def accumulate_if_finite_(self, batch_size: int) -> Unjudged:
        """Add the gradients of a batch, or zeros if they are not finite, which only the device knows at first.

        They count as finite ones until :meth:`take_back`. Not for those that are summed in the model's own buffers.

        :param batch_size: samples in it
        """
        gradients, used = self.gradients(), list(self._is_used)
        verdict = LateVerdict(gradients)
        verdict.silence(gradients)
        self.accumulate_grads_(batch_size)
        first_for = (number for number, was_used in enumerate(used) if self._is_used[number] and not was_used)
        self._last = Unjudged(verdict, batch_size, tuple(first_for))
        return self._last

    def take_back(self, batch: Unjudged) -> None:
        """Let a batch, the last one, count no more: its gradients were not finite, and zeros were added instead."""
        if batch is not self._last:
            return  # it went with its epoch
        self.local_samples_accumulated -= batch.samples
        self.local_times_accumulated -= 1
        for number in batch.first_for:
            self._is_used[number] = False
        if not self.local_times_accumulated:
            self.reset_accumulated_grads_()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.local_samples_accumulated and not args and kwargs.get("weight") is None:
            kwargs["weight"] = NEXT_TO_NOTHING  # all of its batches were left out
        sums = [sum_ for sum_ in self._sums() if sum_ is not None] if self.local_samples_accumulated else []
        if not are_finite(sums):
            # sums of what was finite; the others would refuse it, and leave this peer out
            logger.warning(f"The gradients of an epoch count for nothing: {where_not_finite(sums)}, as summed")
            kwargs.pop("weight", None)
            args = (NEXT_TO_NOTHING, *args[1:])  # hivemind's first argument
            torch._foreach_zero_(sums)
            self._is_loaded = False
        elif sums and self.on_own_gradients is not None:
            self.load_accumulators_into_averager_()
            with self.get_tensors() as means:
                self.on_own_gradients(means, self.have_gradients())
            self._is_loaded = False  # a class of the user's own comes next, and may change the sums that are sent
        return super().step(*args, **kwargs)

    def reset_accumulated_grads_(self) -> None:
        """Begin anew. The next batch is written over what was summed up, unless that is in the model's own buffers."""
        self._last = None
        self._is_loaded = False
        self._is_used = [False] * len(self.parameters)
        if self.reuse_grad_buffers:
            super().reset_accumulated_grads_()
            self._watch()
            return
        self._accumulators_used_in_step = False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Give the mean gradient to the averager, of zero if there were no samples; at once if it has it already."""
        # Replaces the method of hivemind/optim/grad_averager.py, which divides a sum in units of the first batch by the
        # number of batches: with a dataset's small last batch as the first one of an epoch, gradients are too large by
        # a factor of about 30. Where a peer is alone, it is called twice.
        if self._is_loaded:
            return
        factor = 1.0 / self._weight_of_all() if self.local_times_accumulated else 0.0
        sums = self._sums() if factor else [None] * len(self.parameters)
        with self.get_tensors() as averaged:
            self.used.flags.copy_(torch.tensor([int(one is not None) for one in sums]))
            unused = [mean for mean, total in zip(averaged, sums, strict=True) if total is None]
            if unused:
                torch._foreach_zero_(unused)
            means = [mean for mean, total in zip(averaged, sums, strict=True) if total is not None]
            totals = [total for total in sums if total is not None]
            if not totals:
                pass
            elif all(total.device == mean.device for total, mean in zip(totals, means, strict=True)):
                for total, mean in zip(totals, means, strict=True):
                    torch.mul(total, factor, out=mean)
            elif self.reuse_grad_buffers:
                self.staging.copy(totals, means)
                torch._foreach_mul_(means, factor)
            else:  # a GPU is the faster one at it; what it has from now on is the sum in units of all samples
                torch._foreach_mul_(totals, factor)
                self._anchor_batch_size = self.local_samples_accumulated
                self.staging.copy(totals, means)
        self._is_loaded = True

    def have_gradients(self) -> list[bool]:
        """By parameter, whether it has a gradient in the step of the round that was last loaded or held."""
        return [bool(one) for one in self.used.flags.tolist()]

    def _sums(self) -> list[torch.Tensor | None]:
        """By parameter, the sum of this epoch's gradients; ``None`` of one that no batch has used."""
        if not self.reuse_grad_buffers:
            pairs = zip(self._local_accumulators, self._is_used, strict=True)
            return [total if is_used else None for total, is_used in pairs]
        # what somebody else has written there is a gradient, too
        return [
            gradient if gradient is not None and (is_used or bool(gradient.any())) else None
            for gradient, is_used in zip((one.grad for one in self.parameters), self._is_used, strict=True)
        ]

    def _watch(self) -> None:
        """Learn of each parameter, once in an epoch, that autograd has added to its gradient; where sums are those."""
        if not self.reuse_grad_buffers:
            return
        for number, parameter in enumerate(self.parameters):
            if number not in self._watching and parameter.requires_grad:
                self._watching[number] = parameter.register_post_accumulate_grad_hook(self._noting(number))

    def _noting(self, number: int) -> Any:
        def note(parameter: torch.Tensor) -> None:
            self._is_used[number] = True
            if (watching := self._watching.pop(number, None)) is not None:
                watching.remove()

        return note

    def _remove_parameter_hooks(self) -> None:
        for watching in self._watching.values():
            watching.remove()
        self._watching.clear()

    def keep_gradients(self) -> None:
        """Have a gradient for each parameter before any is computed, where they are summed in the model's own buffers.

        Else autograd takes for one what is computed first; and that CUDA graphs write over with the next batch.
        """
        for _ in self._grads_from_parameters():
            pass

    @torch.no_grad()
    def sum_in_units_of(self, samples: float) -> None:
        """Let what is summed in the model's own buffers be weighed by samples over these from now on."""
        if samples == self.samples_of_weight_one:
            return
        before = self._weight_of_all() if self.local_samples_accumulated else 0.0
        self.samples_of_weight_one = samples
        if before:
            for total in self._sums():
                if total is not None:
                    total.mul_(self._weight_of_all() / before)

    def _weight_of_all(self) -> float:
        """By what the sum of the accumulated gradients is to be divided."""
        unit = self.samples_of_weight_one if self.reuse_grad_buffers else self._anchor_batch_size
        return self.local_samples_accumulated / unit if unit else self.local_times_accumulated

    @torch.no_grad()
    def mean_gradients(self) -> tuple[torch.Tensor | None, ...] | None:
        """The mean gradient over the samples of the present epoch, one for each parameter; ``None`` without samples.

        That of a parameter that no batch has used is ``None``, too.
        """
        if not self.local_samples_accumulated:
            return None
        divisor = self._weight_of_all()
        return tuple(None if total is None else total.detach().clone().div_(divisor) for total in self._sums())

    @torch.no_grad()
    def set_mean_gradients(self, gradients: Iterable[torch.Tensor | None], samples: int) -> None:
        """Begin with what was accumulated before, as if it were one batch.

        :param gradients: what :meth:`mean_gradients` gave
        :param samples: how many that were of
        """
        self._is_loaded = False
        self.local_samples_accumulated, self.local_times_accumulated = samples, 1
        self._anchor_batch_size = samples
        for number, (total, gradient) in enumerate(zip(self._grad_accumulators(), gradients, strict=True)):
            self._is_used[number] = gradient is not None
            if gradient is not None:
                total.copy_(gradient).mul_(self._weight_of_all())

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        return await self.exchange_with_group(super()._aggregate_with_group, group_info, min_vector_size, **kwargs)


def _add(gradients: list[torch.Tensor], totals: list[torch.Tensor], weight: float, is_first: bool) -> None:
    """Add gradients to sums, or write them there if they are the first ones."""
    gradients = [one.detach() if one.requires_grad else one for one in gradients]  # with create_graph=True, they do
    if all(one.device == total.device and not one.is_sparse for one, total in zip(gradients, totals, strict=True)):
        # a GPU waits for one call instead of one for each parameter
        if not is_first:
            torch._foreach_add_(totals, gradients, alpha=weight)
            return
        torch._foreach_copy_(totals, gradients)
        if weight != 1.0:
            torch._foreach_mul_(totals, weight)
        return
    for gradient, total in zip(gradients, totals, strict=True):
        (total.zero_() if is_first else total).add_(gradient.to(total.device), alpha=weight)


# -- power sgd -------------------------------------------------------------------------------------------------------
#
# PowerSGD for gradients that have fewer components than its rank, such as those of few samples.


#: Shapes that are told where some do not fit.
_MOST_TOLD = 8

#: What is left of a column beside those before it counts as rounding below this, half precision's on the wire included.
_ROUNDING = 1e-3


class PowerSGDGradientAverager(GradientAverager, _PowerSGDGradientAverager):
    """``hivemind``'s ``PowerSGDGradientAverager`` that can be created on any thread.

    hivemind scales each of ``averager_rank`` columns to length 1 (``utils/math.py``, ``orthogonalize_``). Where a
    gradient has fewer components, the columns beyond are rounding errors, blown up and different on each peer: with
    rank 32 and a matrix of rank 8, the average was off by 80 percent, and the peers' averages by 20 from each other.
    """

    # in the averager's process: whether what is to be sent was added to what is left over, in the present round
    _is_added = False

    @property
    def sends_exactly(self) -> bool:
        return False

    def numbers_in_state(self) -> float:
        """Numbers in this peer's factors, of which another one sends as many."""
        return sum(rows.numel() for rows in self._qs)

    def _why_refused(self, loaded: Download) -> str | None:
        # hivemind copies what is there into its factors: a single number would fill one
        own, theirs = [one.shape for one in self._qs], [one.shape for one in loaded.tensors]
        if own != theirs:
            return (
                f"it holds {_in_words(theirs)} where this peer has {_in_words(own)}; do all use the same averager_rank?"
            )
        return super()._why_refused(loaded)

    @property
    def _ms(self) -> list[torch.Tensor]:
        return self._left_over

    @_ms.setter
    def _ms(self, made: Iterable[torch.Tensor]) -> None:
        # hivemind/optim/power_sgd_averager.py keeps what is left over in the type of the gradients and multiplies it by
        # factors in single precision: with bfloat16 or doubles each round would fail
        self._left_over = [one.to(torch.float32).share_memory_() for one in made]

    async def exchange_with_group(
        self, aggregate: Callable[..., Awaitable[Any]], group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> Gathered:
        for rows in self._qs:  # what a gradient of zeros leaves: whatever comes next, hivemind would see zeros in it
            generator = torch.Generator().manual_seed(rows.shape[1])
            rows += torch.randn(rows.shape, generator=generator) * (rows.norm(dim=0) == 0)
        counts = kwargs["weight"] > NEXT_TO_NOTHING
        before = None if counts else [one.clone() for one in self._ms]
        self._is_added = False
        try:
            gathered = await super().exchange_with_group(aggregate, group_info, min_vector_size, **kwargs)
        except BaseException:
            if self._is_added:  # this peer steps with its gradients as they are: nothing of them is left over
                async with enter_asynchronously(self.get_tensors()) as own:
                    for left, gradient in zip(self._ms, self._compressed(own), strict=True):
                        left.sub_(gradient)
            raise
        async with enter_asynchronously(self.get_tensors()) as averages:
            self._keep_left_over_of_unused(averages)
        for left, kept in zip(self._ms, before or (), strict=False):
            left.copy_(kept)  # others have sent the average, and this peer nothing that it could lack
        return gathered

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        self._is_added = True  # before its first phase, hivemind adds what is to be sent to what is left over
        return super()._runner_of(*args, **settings)

    def _compressed(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one for number, one in enumerate(gradients) if number not in self._uncompressed_gradients_indexes]

    @torch.no_grad()
    def _keep_left_over_of_unused(self, averages: Sequence[torch.Tensor]) -> None:
        """Take back what was sent of parameters that nobody's batches have used: no step is made with it."""
        left_over = iter(self._ms)
        for number, (average, has_gradient) in enumerate(zip(averages, self.used.flags.tolist(), strict=True)):
            if number in self._uncompressed_gradients_indexes:
                continue
            left = next(left_over)
            if not has_gradient:
                left.add_(average)
                average.zero_()

    def _after_phase(self, phase: bytes, averages: Sequence[torch.Tensor]) -> None:
        if phase == AllReducePhases.PHASE_P.name.encode():
            for columns in averages:
                orthonormalize_(columns)  # hivemind's own comes next, and finds nothing to do


def orthonormalize_(columns: torch.Tensor) -> None:
    """Make the columns of a tall matrix orthogonal to each other and of length 1, in place.

    A column that the ones before it explain is replaced by one that is the same on all peers.
    """
    for index in range(columns.shape[1]):
        before, column = columns[:, :index], columns[:, index]
        length = column.norm()
        _subtract_(column, before)
        if not column.norm() > _ROUNDING * length:  # zeros and NaN, too
            generator = torch.Generator().manual_seed(index)
            column.copy_(torch.randn(len(column), generator=generator))
            _subtract_(column, before)
        column.div_(column.norm())
        _subtract_(column, before)  # once more, for what rounding has left
        column.div_(column.norm())


def _subtract_(column: torch.Tensor, others: torch.Tensor) -> None:
    column.sub_(others @ (others.t() @ column))


def _in_words(shapes: Sequence[torch.Size]) -> str:
    """As many as fit on a line: whoever sends them may send any number."""
    told = ", ".join(str(tuple(shape)) for shape in shapes[:_MOST_TOLD])
    return f"{told or 'nothing'}{' and others' if len(shapes) > _MOST_TOLD else ''}"


# -- gradient averagers ----------------------------------------------------------------------------------------------


def own_factory(factory: Callable[..., Any] | None) -> Callable[..., Any]:
    """The same factory of a gradient averager, so that what it makes can be created on any thread.

    :param factory: a subclass of ``hivemind.optim.grad_averager.GradientAverager``, a ``functools.partial`` of one,
      or ``None`` for the default
    :raises TypeError: if it is neither; such a factory makes its averager start where we cannot reach it
    """
    if factory is None:
        return GradientAverager
    if isinstance(factory, partial):
        return partial(own_factory(factory.func), *factory.args, **factory.keywords)
    if not (isinstance(factory, type) and issubclass(factory, _GradientAverager)):
        raise TypeError(
            f"grad_averager_factory is {factory!r}; it must be a subclass of "
            "hivemind.optim.grad_averager.GradientAverager or a functools.partial of one, such as "
            "partial(PowerSGDGradientAverager, averager_rank=32)"
        )
    if issubclass(factory, Averager):
        return factory
    ours = PowerSGDGradientAverager if issubclass(factory, _PowerSGDGradientAverager) else GradientAverager
    return type(factory.__name__, (ours, factory), {})


def has_state_of_its_own(averager: Any) -> bool:
    """Whether a newcomer has to know something of an averager of gradients, as of one for PowerSGD.

    hivemind's peers download the last averages of any averager, and drop them.

    :param averager: ``None`` with local updates
    """
    load = getattr(type(averager), "load_state_from_peers", None)
    return load not in (None, SharesState.load_state_from_peers)
