"""Rounds of an averager of the state in which peers average how far they have come, and step an outer optimizer.

What is exchanged is what an averager of the state exchanges anyway, with a pseudo-gradient in the place of each
parameter. Peers say in the group with which anchors they come. Where these are not the same at all of them, since one
has missed a round or got only a part of its averages, pseudo-gradients would be about different things: such a group
averages the parameters themselves and what is known of the steps before, and all begin anew at the average.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression, TensorRole
from hivemind.p2p import PeerID

from hivenb.engine.averaging.averager import AveragerBase
from hivenb.engine.averaging.extensions.buffers import sent_buffers
from hivenb.engine.averaging.staging import StagesState
from hivenb.engine.averaging.state_download import places_in
from hivenb.engine.averaging.torch_state import initialized_by
from hivenb.engine.matchmaking.group_records import epoch_of
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING

# -- fragments -------------------------------------------------------------------------------------------------------
#
# A model in pieces, of which each round synchronizes one, so that no round sends all of it at once.
#
# Streaming DiLoCo (Douillard et al. 2025, https://arxiv.org/abs/2501.18512) takes pieces of layers that are apart from
# each other. Here a piece has tensors from anywhere, so many that all pieces are about as large.


class Fragments:
    """The pieces, and the samples that a peer has put into each since that was synchronized.

    :param sizes: numbers in each tensor of the model
    :param count: of pieces; there are no more than tensors
    """

    def __init__(self, sizes: Sequence[int], count: int):
        pieces: list[list[int]] = [[] for _ in range(max(1, min(count, len(sizes))))]
        filled = [0] * len(pieces)
        for tensor in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            smallest = filled.index(min(filled))
            pieces[smallest].append(tensor)
            filled[smallest] += sizes[tensor]
        #: indices of the tensors of each piece
        self.members = tuple(tuple(sorted(piece)) for piece in pieces)
        #: of this peer, in each piece
        self.samples = [0.0] * len(pieces)

    def __len__(self) -> int:
        return len(self.members)

    def of_round(self, epoch: int) -> int:
        """The piece that the round of an epoch synchronizes: each in its turn."""
        return epoch % len(self)

    def count(self, samples: float) -> None:
        """Know of samples that were put into the model."""
        self.samples = [before + samples for before in self.samples]

    def discount(self, sent: Sequence[float], pieces: Iterable[int]) -> None:
        """Know that samples were averaged; there may be more by now.

        :param sent: of each piece, when it was sent
        :param pieces: those that were averaged
        """
        for piece in pieces:
            self.samples[piece] -= sent[piece]

    def forget(self) -> None:
        """Begin with no samples in any piece."""
        self.samples = [0.0] * len(self)


# -- outer optimizer -------------------------------------------------------------------------------------------------
#
# The outer optimizer of DiLoCo: what it steps, and how peers tell whether they step the same.
#
# Each peer trains by itself for an epoch of the swarm. How far it has come since the last synchronization is its
# pseudo-gradient, and the outer optimizer steps the parameters of that synchronization with the average of all of them
# (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).


#: Numbers in a sketch: the distance of two of them tells that of what they are of within a quarter.
_DIRECTIONS = 16

#: Distance at which the parameters of two peers count as other ones, as a part of the last outer step, the shortest one
#: if they are stepped piece by piece, and of themselves: codecs round, and so do floats.
_OF_A_STEP, _OF_ITSELF = 0.25, 1e-3

#: Of all peers, so that their sketches can be compared.
_SEED = 2311_08105


class OuterOptimizer:
    """The parameters of the last synchronization, and the optimizer that steps them. For the thread that trains.

    What peers exchange of it lies in shared memory: made before a process is forked, it is the same in both.

    :param make: a factory of torch optimizers, called with a list of parameters
    :param copies: of the model's parameters, in shared main memory; they become its own
    """

    def __init__(self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], copies: Sequence[torch.Tensor]):
        #: the parameters of the last synchronization
        self.anchors = tuple(copies)
        trained = [anchor for anchor in self.anchors if anchor.requires_grad]
        self.optimizer = initialized_by(make)(trained)
        #: what the optimizer knows of its steps, such as its momentum
        self.moments = tuple(_floats(self.optimizer))
        for moment in self.moments:
            moment.share_memory_()
        #: lengths of the last step of each set of anchors that is stepped together, in the sketch
        self._steps: dict[tuple[int, ...], float] = {}
        #: the sketch of the anchors, behind the shortest of these
        self.word = torch.zeros(1 + _DIRECTIONS, dtype=torch.float64).share_memory_()
        self.note_anchors()

    @torch.no_grad()
    def step(self, pseudo_gradients: Mapping[int, torch.Tensor]) -> None:
        """Step the anchors, or some of them.

        :param pseudo_gradients: anchors minus the average of the peers' parameters, by their numbers; only read
        """
        for number, anchor in enumerate(self.anchors):
            anchor.grad = pseudo_gradients.get(number) if anchor.requires_grad else None
        self.optimizer.step()
        for anchor in self.anchors:
            anchor.grad = None
        before = self.word[1:].clone()
        self.note_anchors()
        self._steps[tuple(sorted(pseudo_gradients))] = (self.word[1:] - before).norm().item()
        self.word[0] = min(self._steps.values())

    @torch.no_grad()
    def begin_at(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take parameters for those of the last synchronization. What is known of the steps before stays."""
        for anchor, parameter in zip(self.anchors, parameters, strict=True):
            anchor.copy_(parameter)
        self.note_anchors()

    @torch.no_grad()
    def forget_steps(self) -> None:
        """Know nothing of the steps before."""
        for moment in self.moments:
            moment.zero_()

    def state(self) -> dict[str, list[torch.Tensor]]:
        """All that a successor, or a training that is resumed, needs to go on: copies."""
        return {name: [one.detach().clone() for one in getattr(self, name)] for name in ("anchors", "moments")}

    def take_over(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Go on with what :meth:`state` gave, as far as it fits."""
        if [one.shape for one in state["anchors"]] == [one.shape for one in self.anchors]:
            self.begin_at(state["anchors"])
            self.take_moments(state["moments"])

    @torch.no_grad()
    def take_moments(self, moments: Sequence[torch.Tensor]) -> bool:
        """Know what another peer, or a predecessor, knew of its steps; whether that fits this optimizer."""
        fits = [one.shape for one in moments] == [one.shape for one in self.moments]
        if fits:
            for own, other in zip(self.moments, moments, strict=True):
                own.copy_(other)
        else:
            self.forget_steps()
        return fits

    @torch.no_grad()
    def note_anchors(self) -> None:
        """Sketch the anchors, which somebody has written to: some numbers of each, on a few random directions."""
        picked = []
        generator = np.random.default_rng(_SEED)
        for anchor in self.anchors:
            places = generator.integers(0, max(1, anchor.numel()), places_in(anchor.numel(), len(self.anchors)))
            numbers = anchor.detach().reshape(-1)[torch.from_numpy(places)]
            picked.append((numbers.abs() if numbers.is_complex() else numbers).double())
        values = torch.cat(picked)
        signs = torch.from_numpy(generator.integers(0, 2, (_DIRECTIONS, values.numel()), dtype=np.int8)) * 2.0 - 1.0
        self.word[1:] = signs.double() @ values


def are_alike(words: Sequence[Sequence[float]]) -> bool:
    """Whether all peers have the same anchors, as far as their sketches tell.

    :param words: of each peer, as :attr:`OuterOptimizer.word` has it
    """
    found = np.asarray(words, dtype=np.float64)
    if not np.isfinite(found).all():
        return False
    steps, sketches = found[:, 0], found[:, 1:]
    bound = max(_OF_A_STEP * steps.min(), _OF_ITSELF * float(np.linalg.norm(sketches, axis=1).min()))
    return all(float(np.linalg.norm(one - sketches[0])) <= bound for one in sketches)


def parse_word(value: Any) -> list[float] | None:
    """What a peer says of its anchors; ``None`` if it cannot be read: anybody may say anything."""
    if not isinstance(value, (list, tuple)) or len(value) != 1 + _DIRECTIONS:
        return None
    if not all(isinstance(one, float) and math.isfinite(one) for one in value):
        return None
    return list(value)


def _floats(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for _, value in sorted(optimizer.state.get(parameter, {}).items()):
                if torch.is_tensor(value) and value.is_floating_point():
                    yield value


# -- pseudo gradients ------------------------------------------------------------------------------------------------


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
