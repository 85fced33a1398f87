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
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole

from hivenb.engine.averaging.extensions.extension import Exchange, Extension, GroupRecords, ServedState, Tail
from hivenb.engine.averaging.state_download import places_in
from hivenb.engine.averaging.torch_optimizer_state import add_change, initialized_by
from hivenb.engine.matchmaking.group_records import is_helper
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

    def take_over(self, samples: Sequence[float]) -> None:
        """Go on with the samples that a predecessor had in its pieces, if they are as many."""
        if len(samples) == len(self):
            self.samples = [float(one) for one in samples]

    def forget(self) -> None:
        """Begin with no samples in any piece."""
        self.samples = [0.0] * len(self)


# -- outer optimizer -------------------------------------------------------------------------------------------------
#
# The outer optimizer of DiLoCo: what it steps, and how peers tell whether they step the same.
#
# Each peer trains by itself for a swarm epoch. How far it has come since the last synchronization is its
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

    def take_over(self, state: Mapping[str, Sequence[torch.Tensor]]) -> bool:
        """Go on with what :meth:`state` gave; whether it is of such parameters. If not, nothing is changed."""
        fits = [one.shape for one in state["anchors"]] == [one.shape for one in self.anchors]
        if fits:
            self.begin_at(state["anchors"])
            self.take_moments(state["moments"])
        return fits

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


class _Exchanged(IntEnum):
    """What a round has put into the averaging buffers."""

    NOTHING = 0
    PSEUDO_GRADIENTS = 1
    PARAMETERS = 2
    ALL = 3


#: Copies sources to targets, and returns when all is there.
Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class OuterRounds(Extension):
    """An outer optimizer in the rounds and downloads of an averager of the state.

    :param outer: the optimizer
    :param compression: the codec of what peers average then
    :param pieces: of the model, of which each round synchronizes one
    :param parameters: gives those of this peer
    """

    name = "outer_optimizer"

    def __init__(
        self,
        outer: OuterOptimizer,
        compression: CompressionBase,
        pieces: int,
        parameters: Callable[[], Sequence[torch.Tensor]],
    ):
        self.outer = outer
        self.compression = compression
        self._own_parameters = parameters
        #: the pieces in which the model is synchronized, with this peer's samples
        self.fragments = Fragments([one.numel() for one in outer.anchors], pieces)
        self._samples_sent: list[float] = []
        #: epochs between two rounds
        self.every = 1
        # for both processes: what was exchanged, and which piece of it
        self._exchanged = torch.zeros(2, dtype=torch.int64).share_memory_()
        # in the averager's process: what the group exchanges, and what is in the buffers, if not pseudo-gradients
        self._agreed, self._piece = _Exchanged.NOTHING, 0
        self._are_parameters = False

    # -- in the process that trains -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a successor, or a training that is resumed, needs to go on: copies."""
        return {**self.outer.state(), "samples": list(self.fragments.samples)}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave, as far as it fits."""
        if self.outer.take_over(state):
            self.fragments.take_over(state.get("samples", ()))  # which older checkpoints lack

    @torch.no_grad()
    def load(self, buffers: Sequence[torch.Tensor]) -> None:
        """Put pseudo-gradients in the place of parameters.

        :param buffers: that are about to be averaged, with the parameters before all else
        """
        self._exchanged.zero_()
        self._samples_sent = list(self.fragments.samples)
        for buffer, anchor in zip(buffers, self.outer.anchors, strict=False):  # statistics are behind them
            torch.sub(anchor, buffer, out=buffer)

    @torch.no_grad()
    def apply(
        self,
        averages: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor] | None,
        locals_: Sequence[torch.Tensor],
        copy: Copy,
        statistics: range,
    ) -> None:
        """Step the anchors with what a round has made of the buffers, and let the model go on from there.

        :param averages: of pseudo-gradients or parameters, with the statistics behind them
        :param sent: what this peer has sent; ``None`` if it has learned nothing since
        :param locals_: what of this peer was averaged
        :param copy: copies averages there
        :param statistics: numbers of those of the optimizer's statistics
        """
        kind, piece = self._exchanged.tolist()
        exchanged = _Exchanged(kind)
        self._exchanged.zero_()
        if exchanged is _Exchanged.NOTHING:
            return  # nothing has come of it: what was learned is a part of the next round
        pieces = [piece] if exchanged is _Exchanged.PSEUDO_GRADIENTS else range(len(self.fragments))
        averaged = {number for one in pieces for number in self.fragments.members[one]}
        count = len(self.outer.anchors)
        if sent is not None:
            for anchor, one in zip(self.outer.anchors, sent, strict=False):
                torch.sub(anchor, one, out=one)  # from here on, the parameters that it has sent
        if exchanged is _Exchanged.PSEUDO_GRADIENTS:
            self.outer.step({number: averages[number] for number in averaged})
        else:
            self.outer.begin_at(averages[:count])
        results = (*self.outer.anchors, *averages[count:])
        # of the other parameters the turn is to come
        numbers = [number for number in range(len(results)) if number >= count or number in averaged]
        if sent is None:
            copy([results[number] for number in numbers], [locals_[number] for number in numbers])
        else:
            for number in numbers:
                add_change(locals_[number], results[number], sent[number], is_statistic=number in statistics)
        self.fragments.discount(self._samples_sent, pieces)

    @property
    def has_outcome(self) -> bool:
        """Whether a round is over of which the model does not know yet."""
        return int(self._exchanged[0]) != _Exchanged.NOTHING

    def forget_round(self) -> None:
        """What a round has made of the buffers is not to be applied."""
        self._exchanged.zero_()

    def note_alone(self, epoch: int) -> None:
        """The buffers hold the pseudo-gradients of the only peer of the run."""
        self._note_exchange(_Exchanged.PSEUDO_GRADIENTS, self.fragments.of_round(epoch))

    def _note_exchange(self, kind: _Exchanged, piece: int) -> None:
        """For both processes: what is in the averaging buffers."""
        self._exchanged.copy_(torch.tensor([kind, piece]))

    def weight(self, epoch: int) -> float:
        # since that piece was last averaged; for each epoch of that time, as nobody counts for much more than it has
        # reported of one
        samples = self.fragments.samples[self.fragments.of_round(epoch)]
        return max(NEXT_TO_NOTHING, samples / (len(self.fragments) * self.every))

    def begin_at_parameters(self) -> None:
        """Take the present parameters for those of the last synchronization."""
        self.outer.begin_at(self._own_parameters())
        self.fragments.forget()
        self._samples_sent = list(self.fragments.samples)

    @property
    def numbers(self) -> int:
        return sum(one.numel() for one in self.outer.moments)

    @torch.no_grad()
    def serve(self, state: ServedState) -> ServedState:
        # a newcomer begins where all have begun, and not where this peer has come to by itself
        anchors = [anchor.clone() for anchor in self.outer.anchors]
        moments = [moment.clone() for moment in self.outer.moments]
        state = dataclasses.replace(state, tensors=(*anchors, *state.tensors[len(anchors) :]))
        return state.with_tail(self.name, None, moments, [_info_of(one) for one in moments])

    def take(self, tail: Tail) -> None:
        self.begin_at_parameters()
        self.outer.take_moments(tail.tensors)

    # -- in the averager's own process --------------------------------------------------------------------------

    def fields(self) -> Sequence[Any]:
        self._are_parameters = False  # a round begins with pseudo-gradients
        return [[self.name, self.outer.word.tolist(), len(self.fragments)]]

    def agree(self, group: GroupRecords) -> None:
        self._agreed, self._piece = _agree(group), self.fragments.of_round(group.epoch)

    def join(self, exchange: Exchange) -> Exchange:
        self._fill_buffers(exchange.tensors)
        exchange = dataclasses.replace(exchange, weights_are_samples=True)
        if self._agreed is _Exchanged.PARAMETERS:
            counts = exchange.weight > NEXT_TO_NOTHING
            return dataclasses.replace(exchange, weight=1.0 if counts else exchange.weight)  # as all others have
        tensors, infos, count = exchange.tensors, exchange.infos, len(self.outer.anchors)
        if self._agreed is _Exchanged.ALL:
            moments = self.outer.moments
            return dataclasses.replace(exchange, tensors=(*tensors, *moments), infos=(*infos, *map(_info_of, moments)))
        members = self.fragments.members[self._piece]
        as_gradients = (dataclasses.replace(infos[one], role=TensorRole.GRADIENT) for one in members)
        return dataclasses.replace(
            exchange,
            tensors=(*(tensors[one] for one in members), *tensors[count:]),
            infos=(*as_gradients, *infos[count:]),
            compression=self.compression,
        )

    def conclude(self) -> None:
        self._note_exchange(self._agreed, self._piece)

    @torch.no_grad()
    def _fill_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Have in the buffers what this group exchanges; they may hold the other from an attempt that has failed."""
        wants_parameters = self._agreed is not _Exchanged.PSEUDO_GRADIENTS
        if wants_parameters != self._are_parameters:
            self._are_parameters = wants_parameters
            for anchor, buffer in zip(self.outer.anchors, buffers, strict=False):
                torch.sub(anchor, buffer, out=buffer)  # one from the other, in both directions


def _agree(group: GroupRecords) -> _Exchanged:
    said = [
        one if one is not None and isinstance(one[2], int) else None
        for one, record in zip(group.said(OuterRounds.name, 3), group.records, strict=True)
        if not is_helper(record)
    ]
    known = [word for one in said if one is not None and (word := parse_word(one[1])) is not None]
    if len(known) < len(said):
        return _Exchanged.PARAMETERS  # as peers average that have no outer optimizer
    have_the_same_pieces = len({one[2] for one in said if one is not None}) <= 1
    return _Exchanged.PSEUDO_GRADIENTS if have_the_same_pieces and are_alike(known) else _Exchanged.ALL


def _info_of(moment: torch.Tensor) -> CompressionInfo:
    return CompressionInfo.from_tensor(moment, role=TensorRole.OPTIMIZER)
