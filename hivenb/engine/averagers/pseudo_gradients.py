"""Rounds of an averager of the state in which peers average how far they have come, and step an outer optimizer.

What is exchanged is what an averager of the state exchanges anyway, with a pseudo-gradient in the place of each
parameter. Peers say in the group with which anchors they come. Where these are not the same at all of them, since one
has missed a round or got only a part of its averages, pseudo-gradients would be about different things: such a group
averages the parameters themselves and what is known of the steps before, and all begin anew at the average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression, TensorRole
from hivemind.p2p import PeerID

from hivenb.engine.averagers.buffer_averaging import sent_buffers
from hivenb.engine.averagers.fragments import Fragments
from hivenb.engine.averagers.outer_optimizer import OuterOptimizer, are_alike, parse_word
from hivenb.engine.averagers.staging import StagesState
from hivenb.engine.rounds.averager import AveragerBase
from hivenb.engine.rounds.gathered import epoch_of
from hivenb.engine.rounds.robust_aggregation import NEXT_TO_NOTHING

#: What a peer says to its group before its word on its anchors, and in the metadata of a download.
_WORD = "outer_optimizer"


class _Exchanged(IntEnum):
    """What a round has put into the averaging buffers."""

    NOTHING = 0
    PSEUDO_GRADIENTS = 1
    PARAMETERS = 2
    ALL = 3


class AveragesPseudoGradients(StagesState):
    """Mixin to put *before* all others of an averager of the state, hivemind's among them.

    :param outer_optimizer: a factory of torch optimizers that is called with a list of parameters; ``None`` to average
      the parameters themselves
    :param pseudo_gradient_compression: the codec of what peers average then
    :param outer_fragments: pieces of the model, of which each round synchronizes one
    """

    _failure: BaseException | None
    _downloaded_moments: Sequence[torch.Tensor] | None

    #: the pieces in which the model is synchronized, with this peer's samples; only with an outer optimizer
    fragments: Fragments

    def __init__(
        self,
        *args: Any,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        pseudo_gradient_compression: CompressionBase | None = None,
        outer_fragments: int = 1,
        **kwargs: Any,
    ):
        self._make_outer = outer_optimizer
        self.outer: OuterOptimizer | None = None
        self.pseudo_gradient_compression = pseudo_gradient_compression or NoCompression()
        self._wanted_fragments = outer_fragments
        self._samples_sent: list[float] = []
        # for both processes: what was exchanged, and which piece of it
        self._exchanged = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._are_parameters = False  # in the averager's process: what is in its buffers, if not pseudo-gradients
        super().__init__(*args, **kwargs)

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        if self._make_outer is not None:  # before the process is forked, which shares its memory
            copies = [self._make_host_tensor(one, force_copy=True) for one in self.main_parameters]
            self.outer = OuterOptimizer(self._make_outer, copies)
            self.fragments = Fragments([one.numel() for one in copies], self._wanted_fragments)
        return super()._init_averaged_tensors()

    # -- in the process that trains -----------------------------------------------------------------------------

    @torch.no_grad()
    def _load_local_tensors_into_averager_(self) -> None:
        super()._load_local_tensors_into_averager_()
        if self.outer is None:
            return
        self._exchanged.zero_()
        self._samples_sent = list(self.fragments.samples)
        with self.get_tensors() as buffers:
            for buffer, anchor in zip(buffers, self.outer.anchors, strict=False):  # statistics are behind them
                torch.sub(anchor, buffer, out=buffer)

    @torch.no_grad()
    def _apply_averaging_results_(self) -> None:
        if self.outer is None:
            super()._apply_averaging_results_()
            return
        kind, piece = self._exchanged.tolist()
        exchanged, sent = _Exchanged(kind), self._old_tensors
        self._exchanged.zero_()
        self._old_tensors = None
        if self._failure is not None or exchanged is _Exchanged.NOTHING:
            return  # nothing has come of it: what was learned is a part of the next round
        pieces = [piece] if exchanged is _Exchanged.PSEUDO_GRADIENTS else range(len(self.fragments))
        with self.get_tensors() as averages:
            self._apply_averages(self.outer, exchanged, [self.fragments.members[one] for one in pieces], averages, sent)
        self.fragments.discount(self._samples_sent, pieces)

    def _apply_averages(
        self,
        outer: OuterOptimizer,
        exchanged: _Exchanged,
        pieces: Sequence[Sequence[int]],
        averages: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor] | None,
    ) -> None:
        """Step the anchors, and let the model go on from there.

        :param pieces: the numbers of those parameters of which there are averages
        :param averages: of pseudo-gradients or parameters, with the statistics behind them
        :param sent: what this peer has sent; ``None`` if it has learned nothing since
        """
        count = len(outer.anchors)
        if sent is not None:
            for anchor, one in zip(outer.anchors, sent, strict=False):
                torch.sub(anchor, one, out=one)  # from here on, the parameters that it has sent
        averaged = {number for piece in pieces for number in piece}
        if exchanged is _Exchanged.PSEUDO_GRADIENTS:
            outer.step({number: averages[number] for number in averaged})
        else:
            outer.begin_at(averages[:count])
        results, locals_ = (*outer.anchors, *averages[count:]), list(self._local_tensors())
        # of the other parameters the turn is to come
        numbers = [number for number in range(len(results)) if number >= count or number in averaged]
        if sent is None:
            self.copy_staged([results[number] for number in numbers], [locals_[number] for number in numbers])
            return
        for number in numbers:
            local = locals_[number]
            local.add_(torch.sub(results[number], sent[number]).to(device=local.device, dtype=local.dtype))

    def step_alone(self) -> None:
        """Step the outer optimizer as the only peer of the run."""
        if self.outer is not None:
            self._load_local_tensors_into_averager_()
            self._note_exchange(_Exchanged.PSEUDO_GRADIENTS, self.fragments.of_round(self.local_epoch))
            self._apply_averaging_results_()

    def _note_exchange(self, kind: _Exchanged, piece: int) -> None:
        """For both processes: what is in the averaging buffers."""
        self._exchanged.copy_(torch.tensor([kind, piece]))

    def samples_of_round(self, epoch: int) -> float:
        """Samples that this peer has put into what the round of an epoch synchronizes, since that was last averaged."""
        return self.fragments.samples[self.fragments.of_round(epoch)]

    def begin_at_parameters(self) -> None:
        """Take the present parameters for those of the last synchronization."""
        if self.outer is not None:
            self.outer.begin_at(self._own_parameters())
            self.fragments.forget()
            self._samples_sent = list(self.fragments.samples)

    def _own_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def numbers_in_state(self) -> float:
        moments = () if self.outer is None else self.outer.moments
        own: float = super().numbers_in_state()
        return own + sum(one.numel() for one in moments)

    @torch.no_grad()
    def get_current_state(self) -> tuple[Any, Any, Any]:
        metadata, tensors, infos = super().get_current_state()
        if self.outer is None:
            return metadata, tensors, infos
        count, kept = len(self.outer.anchors), len(tensors) - sent_buffers(metadata)[1]
        with self.get_tensors():  # they change between two steps of training
            anchors = [anchor.clone() for anchor in self.outer.anchors]
            moments = [moment.clone() for moment in self.outer.moments]
        metadata[_WORD] = len(moments)
        # a newcomer begins where all have begun, and not where this peer has come to by itself
        tensors = [*anchors, *tensors[count:kept], *moments, *tensors[kept:]]
        return metadata, tensors, [*infos[:kept], *map(_info_of, moments), *infos[kept:]]

    def load_state_from_peers(self, **kwargs: Any) -> Any:
        self._downloaded_moments = None
        output = super().load_state_from_peers(**kwargs)
        self._take_over_moments()
        return output

    def _take_over_moments(self) -> None:
        moments, self._downloaded_moments = self._downloaded_moments, None
        if self.outer is not None and moments is not None:
            self.begin_at_parameters()
            self.outer.take_moments(moments)

    # -- in the averager's own process --------------------------------------------------------------------------

    def _largest_weights(self, senders: Sequence[PeerID]) -> list[float]:
        if self.outer is None:
            return [1.0] * len(senders)  # each has one set of parameters, however many samples it has seen
        return list(super()._largest_weights(senders))

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        if self.outer is not None:
            word = [_WORD, self.outer.word.tolist(), len(self.fragments)]
            record = [*self.serializer.loads(step.data_for_gather), word]
            step._data_for_gather = self.serializer.dumps(record)
            self._are_parameters = False
        await super()._step(step=step, future_for_init=future_for_init)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        if self.outer is None:
            return await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        self._to_exchange = _agree([self.serializer.loads(gathered) for gathered in group_info.gathered])
        infos, piece = kwargs["tensor_infos"], 0
        if self._to_exchange is _Exchanged.PSEUDO_GRADIENTS:
            own = group_info.gathered[group_info.peer_ids.index(self.peer_id)]
            piece = self.fragments.of_round(epoch_of(own) or 0)
            self._members = self.fragments.members[piece]
            kwargs["compression"], count = self.pseudo_gradient_compression, len(self.outer.anchors)
            as_gradients = (dataclasses.replace(infos[one], role=TensorRole.GRADIENT) for one in self._members)
            kwargs["tensor_infos"] = (*as_gradients, *infos[count:])
        elif self._to_exchange is _Exchanged.PARAMETERS:
            kwargs["weight"] = min(1.0, kwargs["weight"])  # as all others have
        else:
            kwargs["tensor_infos"] = (*infos, *map(_info_of, self.outer.moments))
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        self._note_exchange(self._to_exchange, piece)
        return gathered

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: GroupInfo, *args: Any, **kwargs: Any
    ) -> None:
        if self.outer is not None:
            self._fill_buffers(self.outer, tensors)
            if self._to_exchange is _Exchanged.ALL:
                tensors = (*tensors, *self.outer.moments)
            elif self._to_exchange is _Exchanged.PSEUDO_GRADIENTS:
                tensors = (*(tensors[one] for one in self._members), *tensors[len(self.outer.anchors) :])
        await super()._run_allreduce_inplace_(tensors, group_info, *args, **kwargs)

    @torch.no_grad()
    def _fill_buffers(self, outer: OuterOptimizer, buffers: Sequence[torch.Tensor]) -> None:
        """Have in the buffers what this group exchanges; they may hold the other from an attempt that has failed."""
        wants_parameters = self._to_exchange is not _Exchanged.PSEUDO_GRADIENTS
        if wants_parameters != self._are_parameters:
            self._are_parameters = wants_parameters
            for anchor, buffer in zip(outer.anchors, buffers, strict=False):
                torch.sub(anchor, buffer, out=buffer)  # one from the other, in both directions


class OuterStateApart(AveragerBase):
    """Base to put *behind* hivemind's averager of the state, which knows nothing of weights and outer optimizers."""

    local_epoch: int
    outer: OuterOptimizer | None
    samples_of_round: Callable[[int], float]
    _downloaded_moments: Sequence[torch.Tensor] | None

    def step(self, gather: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.outer is not None and self.mode is not AveragingMode.AUX:
            kwargs["weight"] = max(NEXT_TO_NOTHING, self.samples_of_round(gather or 0))
        return super().step(gather, *args, **kwargs)

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_state_from_peers(*args, **kwargs)
        if loaded is None:
            return None
        metadata, tensors = loaded
        count = metadata.get(_WORD) if isinstance(metadata, dict) else None
        kept = len(tensors) - (count if isinstance(count, int) and 0 < count <= len(tensors) else 0)
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if isinstance(epoch, int) and epoch >= self.local_epoch:  # else hivemind refuses the state
            self._downloaded_moments = tensors[kept:]
        return metadata, tensors[:kept]


def _agree(records: Sequence[list[Any]]) -> _Exchanged:
    """What a group exchanges; all its peers have the same records, and come to the same answer."""
    training = [record for record in records if record[1] != AveragingMode.AUX.value]
    said = [next((one for one in record if _is_word(one)), None) for record in training]
    known = [word for one in said if one is not None and (word := parse_word(one[1])) is not None]
    if len(known) < len(said):
        return _Exchanged.PARAMETERS  # as peers average that have no outer optimizer
    have_the_same_pieces = len({one[2] for one in said if one is not None}) <= 1
    return _Exchanged.PSEUDO_GRADIENTS if have_the_same_pieces and are_alike(known) else _Exchanged.ALL


def _is_word(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == 3 and one[0] == _WORD and isinstance(one[2], int)


def _info_of(moment: torch.Tensor) -> CompressionInfo:
    return CompressionInfo.from_tensor(moment, role=TensorRole.OPTIMIZER)
