"""Averages that no member can move as far as it likes with numbers that are finite.

``norm_bound`` is norm thresholding (Sun et al., 2019, "Can You Really Backdoor Federated Learning?", arXiv:1911.07963)
against the running median of norms: what is many times larger than usual is refused. ``centered_clipping``
(Karimireddy, He and Jaggi, 2021, "Learning from History for Byzantine Robust Optimization", arXiv:2012.10333) is done
besides, for each part by who averages it, as Gorbunov et al. do (2021, "Secure Distributed Training at Scale",
arXiv:2106.11257): it also takes the force from contributions of the usual size that point elsewhere. Theirs begins at
the average before, and its workers send momenta; here it begins at a sender's part, and gradients are what they are,
so that little that is added in every round adds up.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from hivenb.engine.rounds.refused_parts import LARGEST_NORM, NO_WEIGHT, RefusedPart, norm_of

#: Weight of what is not to count beside the others'. Not zero, by which it would be divided if none of them counts.
NEXT_TO_NOTHING = 1e-9

#: The rules, by their names: what an average is besides finite.
NONE, NORM_BOUND, CENTERED_CLIPPING = RULES = ("none", "norm_bound", "centered_clipping")

#: Times the usual norm beyond which a contribution is refused, and an average, which may be of some below that.
FACTOR, FACTOR_OF_AVERAGES = 100.0, 400.0

#: Rounds of which norms are remembered.
REMEMBERED = 32

#: Times that centered clipping moves its center.
ITERATIONS = 3


class UsualNorms:
    """Norms of the parts of a peer's rounds, and weights, over the last of them. In the averager's process."""

    def __init__(self) -> None:
        self._norms: dict[tuple[object, ...], deque[float]] = {}

    def note(self, key: tuple[object, ...], norm: float) -> None:
        """Remember a contribution that was taken."""
        self._norms.setdefault(key, deque(maxlen=REMEMBERED)).append(norm)

    def usual(self, key: tuple[object, ...]) -> float:
        """The median; 0 where nothing is known."""
        known = self._norms.get(key)
        return median(known) if known else 0.0


class NormBound:
    """How large what one peer sends in a round may be, all parts together, beside what is usual for them.

    :param usual: the norm of all of them together; nothing is refused where that is 0, and not known
    :param factor: times as large as that, it is refused
    """

    def __init__(self, usual: float, factor: float):
        self._usual, self._factor = usual, factor
        self._squares: dict[int, float] = {}

    def check(self, peer_index: int, norm: float, noise: float = 1.0) -> None:
        """Take note of a part.

        :param noise: times as large as usual for having been made from fewer samples
        :raises RefusedPart: if it is too large, together with those before it
        """
        squares = self._squares[peer_index] = self._squares.get(peer_index, 0.0) + norm * norm
        if self._usual > 0.0 and math.sqrt(squares) > self._factor * noise * self._usual:
            raise RefusedPart(f"its norm is {math.sqrt(squares) / self._usual:.3g} times the usual one")


class NormBounds:
    """The bounds of one round: of what others send to this peer, and of the averages that it gets from them.

    What is usual for a part is what this peer contributes itself or what it was in earlier rounds, whichever is more:
    at the beginning there were none, and a gradient that has grown has grown for all.

    :param usual: of earlier rounds; this one is added
    :param phase: of the round; parts are those of the same phase in earlier ones
    :param parts: this peer's own numbers, cut as for the group, by the place in it of who averages them
    :param own_index: this peer's place
    :param own_weight: what it counts for itself; 0 where it sends nothing, and its numbers mean nothing
    """

    def __init__(
        self,
        usual: UsualNorms,
        phase: bytes,
        parts: Sequence[Sequence[torch.Tensor]],
        own_index: int,
        own_weight: float,
    ):
        self._usual, self._phase, self._parts = usual, phase, parts
        self._own_index, self._own_weight = own_index, own_weight
        self._firsts = [0, *itertools.accumulate(len(some) for some in parts)]
        if own_weight > NEXT_TO_NOTHING:
            usual.note((phase, "weight"), own_weight)
        self._sent = NormBound(self._usual_norm(own_index), FACTOR)
        self._averages: dict[int, NormBound] = {}

    def check_sent(self, sender_index: int, part_index: int, norm: float, weight: float) -> None:
        """See whether a part that a sender wants to have averaged here is of a usual size.

        :raises RefusedPart: if it is too large
        """
        usual_weight = self._usual.usual((self._phase, "weight"))
        self._sent.check(sender_index, norm, noise_of(weight, usual_weight))
        if weight > NEXT_TO_NOTHING:
            self._usual.note(self._key(self._own_index, part_index), norm)
            self._usual.note((self._phase, "weight"), weight)

    def check_average(self, peer_index: int, norm: float) -> None:
        """See whether an average can be one.

        :param norm: of its difference to this peer's own part
        :raises RefusedPart: if it is too large
        """
        if peer_index not in self._averages:
            self._averages[peer_index] = NormBound(self._usual_norm(peer_index), FACTOR_OF_AVERAGES)
        self._averages[peer_index].check(peer_index, norm)

    def _usual_norm(self, peer_index: int) -> float:
        """Of all parts that a peer averages; this peer's own become known to later rounds."""
        squares = 0.0
        for part_index, part in enumerate(self._parts[peer_index]):
            key = self._key(peer_index, part_index)
            own = norm_of(part) if self._own_weight > NEXT_TO_NOTHING else 0.0
            largest = max(own if own <= LARGEST_NORM else 0.0, self._usual.usual(key))
            if 0.0 < own <= LARGEST_NORM:
                self._usual.note(key, own)
            squares += largest * largest
        return math.sqrt(squares)

    def _key(self, peer_index: int, part_index: int) -> tuple[object, ...]:
        return self._phase, self._firsts[-1], self._firsts[peer_index] + part_index


def noise_of(weight: float, usual_weight: float) -> float:
    """Times by which the norm of a mean over fewer samples may exceed the usual one; 1 for one over more.

    The deviation of a mean goes with the root of their number.
    """
    return math.sqrt(max(1.0, usual_weight / max(weight, NO_WEIGHT)))


class CenteredClipping:
    """In place of the sum in which hivemind's reducer gathers a part from all senders: their parts, and their center.

    It holds a part of each sender until all have come.
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._weights: list[float] = []

    def add_(self, part: torch.Tensor, alpha: float) -> None:
        """Take a sender's part in, with its weight."""
        self._parts.append(part)
        self._weights.append(alpha)

    def div_(self, total_weight: float) -> torch.Tensor:
        """What has come of it; the sum would be divided here."""
        return centered_clip(self._parts, self._weights)


@torch.no_grad()
def centered_clip(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The mean, in which no part counts that is further from it than they usually are, but for its direction.

    :param parts: of one shape, one of each sender
    :param weights: of the senders; what one has beyond their median does not count
    :returns: in single precision at least
    """
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    shape, count = parts[0].shape, len(parts)
    vectors = torch.stack([part.reshape(-1).to(dtype) for part in parts])
    known = sorted(weight for weight in weights if weight > NO_WEIGHT) or [1.0]
    largest = known[(len(known) - 1) // 2]
    shares = torch.tensor([min(weight, largest) for weight in weights], dtype=dtype)
    shares /= shares.sum()
    if count < 3:  # nothing tells one from the other
        return (shares @ vectors).reshape(shape)
    distances = torch.stack([torch.linalg.vector_norm(vectors - one, dim=1) for one in vectors])
    to_others = distances.sort(dim=1).values[:, 1 + (count - 2) // 2]  # the first is that to itself
    center = vectors[to_others.argmin()].clone()
    radius = to_others.min()
    for _ in range(ITERATIONS):
        apart = vectors - center
        far = torch.linalg.vector_norm(apart, dim=1)
        center += (shares * torch.where(far > radius, radius / far, 1.0)) @ apart
    return center.reshape(shape)
