"""The outer optimizer of DiLoCo: what it steps, and how peers tell whether they step the same.

Each peer trains by itself for an epoch of the swarm. How far it has come since the last synchronization is its
pseudo-gradient, and the outer optimizer steps the parameters of that synchronization with the average of all of them
(Douillard et al. 2023, https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hivenb.engine.averagers.state_witness import places_in
from hivenb.engine.averagers.torch_optimizer_state import initialized_by

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
