"""Whether two peers tell the same state: by numbers at random places, which whoever asks has drawn.

The states of honest peers are hardly ever equal bit by bit: an average is added to what each has as a difference,
codecs round, and with steps in the background, or local updates, peers are a step apart. Between two states of one
epoch the distance is a small part of their norm all the same; a state that is made up is far from all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hivenb.engine.dht.carried_values import BoundedSerializer
from hivenb.engine.dht.checked_values import raw, sequence, whole

#: Numbers of a state that are compared, and of each of its tensors at least and at most.
SAMPLE, LEAST_OF_TENSOR, MOST_OF_TENSOR = 2**16, 4, 256

#: Distance of two states of one epoch at most, as a part of the larger norm. With each epoch between them, what is left
#: to the whole of it becomes as much smaller: states that have nothing to do with each other are as far apart as that.
TOLERANCE = 0.5

#: Epochs by which the states that are compared may differ.
MOST_EPOCHS_APART = 2

#: Tensors of a state at most.
MAX_TENSORS = 100_000

_SEED_BYTES = 16


@dataclass(frozen=True)
class Question:
    """What a peer wants to know of another one's state.

    :param seed: of the random places
    :param count: tensors that are looked at, from the first one on: the parameters
    """

    seed: bytes
    count: int

    def pack(self) -> bytes:
        """As it travels."""
        return bytes(BoundedSerializer.dumps([self.seed, self.count]))

    @classmethod
    def parse(cls, packed: bytes) -> Question:
        """A question as it came.

        :raises ValueError: if it is none
        """
        seed, count = sequence(BoundedSerializer.loads(packed), 2, least=2)
        return cls(raw(seed, _SEED_BYTES, least=_SEED_BYTES), whole(count, 1, MAX_TENSORS))


@dataclass(frozen=True, eq=False)
class Statement:
    """What a peer tells of its state.

    :param epoch: of the state
    :param sizes: numbers in each tensor
    :param values: those at the random places, tensor by tensor, as 64-bit floats
    """

    epoch: int
    sizes: tuple[int, ...]
    values: np.ndarray

    def pack(self) -> bytes:
        """As it travels."""
        return bytes(BoundedSerializer.dumps([self.epoch, list(self.sizes), self.values.astype("<f4").tobytes()]))

    @classmethod
    def parse(cls, packed: bytes) -> Statement:
        """A statement as it came.

        :raises ValueError: if it is none
        """
        epoch, sizes, values = sequence(BoundedSerializer.loads(packed), 3, least=3)
        counted = tuple(whole(size) for size in sequence(sizes, MAX_TENSORS))
        expected = sum(places_in(size, len(counted)) for size in counted)
        numbers = np.frombuffer(raw(values, 4 * expected, least=4 * expected), "<f4").astype(np.float64)
        return cls(whole(epoch), counted, numbers)

    def contradicts(self, other: Statement) -> bool | None:
        """Whether two states cannot both be of one swarm; ``None`` if they cannot be compared.

        :param other: the answer to the same question
        """
        apart = abs(self.epoch - other.epoch)
        if self.sizes != other.sizes or apart > MOST_EPOCHS_APART:
            return None
        is_finite, is_theirs = np.isfinite(self.values), np.isfinite(other.values)
        if (is_finite & ~is_theirs).any():
            return None  # whose own state is broken is no witness
        both = is_finite & is_theirs
        if not np.array_equal(self.values[~both], other.values[~both]):
            return True  # a mask is the same at all peers
        own, theirs = self.values[both], other.values[both]
        scale = max(float(np.linalg.norm(own)), float(np.linalg.norm(theirs)))
        return float(np.linalg.norm(own - theirs)) > (1 - TOLERANCE ** (1 + apart)) * scale


def places_in(size: int, tensors: int) -> int:
    """How many numbers of a tensor are looked at.

    :param size: numbers in the tensor
    :param tensors: in the state
    """
    return min(size, MOST_OF_TENSOR, max(LEAST_OF_TENSOR, SAMPLE // tensors))


@torch.no_grad()
def make_statement(question: Question, epoch: Any, tensors: Sequence[torch.Tensor]) -> Statement:
    """Answer a question about a state.

    :param question: of another peer
    :param epoch: of the state
    :param tensors: of the state; there may be more than are asked for
    :raises ValueError: if the state is of no epoch, or there are fewer
    """
    asked = list(tensors[: question.count])
    if len(asked) < question.count:
        raise ValueError(f"there are {len(asked)} tensors, and not {question.count}")
    generator = np.random.default_rng(list(question.seed))
    found = []
    for tensor in asked:
        flat = tensor.detach().reshape(-1)
        places = generator.integers(0, max(1, flat.numel()), places_in(flat.numel(), len(asked)))
        picked = flat[torch.from_numpy(places)]
        found.append((picked.abs() if picked.is_complex() else picked).to(torch.float64).cpu().numpy())
    values = np.concatenate(found).astype(np.float32).astype(np.float64)
    return Statement(whole(epoch), tuple(tensor.numel() for tensor in asked), values)


def verdict(agreeing: int, contradicting: int) -> bool | None:
    """Whether to believe a state, by how many others tell the same and another one; ``None`` if it is a tie.

    :param agreeing: peers that tell the same, without the one that sent it
    :param contradicting: peers that tell another
    """
    if not contradicting or agreeing + 1 > contradicting:
        return True
    return None if agreeing + 1 == contradicting else False
