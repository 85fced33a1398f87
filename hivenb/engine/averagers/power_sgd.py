"""PowerSGD for gradients that have fewer components than its rank, such as those of few samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.power_sgd_averager import AllReducePhases
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.utils.asyncio import enter_asynchronously

from hivenb.engine.averagers.state_download import Download

#: Shapes that are told where some do not fit.
_MOST_TOLD = 8

#: What is left of a column beside those before it counts as rounding below this, half precision's on the wire included.
_ROUNDING = 1e-3


class KeepsFewComponents(_PowerSGDGradientAverager):
    """Mixin to put *before* a PowerSGD averager.

    hivemind scales each of ``averager_rank`` columns to length 1 (``utils/math.py``, ``orthogonalize_``). Where a
    gradient has fewer components, the columns beyond are rounding errors, blown up and different on each peer: with
    rank 32 and a matrix of rank 8, the average was off by 80 percent, and the peers' averages by 20 from each other.
    """

    _has_gradient: torch.Tensor

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
        reason: str | None = super()._why_refused(loaded)
        return reason

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # hivemind/optim/power_sgd_averager.py keeps what is left over in the type of the gradients and multiplies it by
        # factors in single precision: with bfloat16 or doubles each round would fail
        self._ms = [left_over.to(torch.float32).share_memory_() for left_over in self._ms]
        super().run_in_background(await_ready, timeout)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        for rows in self._qs:  # what a gradient of zeros leaves: whatever comes next, hivemind would see zeros in it
            generator = torch.Generator().manual_seed(rows.shape[1])
            rows += torch.randn(rows.shape, generator=generator) * (rows.norm(dim=0) == 0)
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        async with enter_asynchronously(self.get_tensors()) as averages:
            self._keep_left_over_of_unused(averages)
        return gathered

    @torch.no_grad()
    def _keep_left_over_of_unused(self, averages: Sequence[torch.Tensor]) -> None:
        """Take back what was sent of parameters that nobody's batches have used: no step is made with it."""
        left_over = iter(self._ms)
        for number, (average, has_gradient) in enumerate(zip(averages, self._has_gradient.tolist(), strict=True)):
            if number in self._uncompressed_gradients_indexes:
                continue
            left = next(left_over)
            if not has_gradient:
                left.add_(average)
                average.zero_()

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: GroupInfo, group_id: bytes | None = None, **kwargs: Any
    ) -> None:
        await super()._run_allreduce_inplace_(tensors, group_info, group_id, **kwargs)
        if group_id == group_info.group_id + AllReducePhases.PHASE_P.name.encode():
            for columns in tensors:
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
