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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from hivemind.averaging.partition import AllreduceException, TensorPartContainer
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

# -- refused parts ---------------------------------------------------------------------------------------------------
#
# What is not taken from a group: parts, averages and weights that are not finite, too large, or of another shape.


#: Of a part. Squares of larger numbers are soon infinite in single precision, and with them the second moment of Adam
#: and the deviation by which codecs of eight bits scale; no sum of parts of that size is, whoever counts how much.
LARGEST_NORM = 1e18

#: Of a sender. With more than that, sums of parts that were taken might be infinite.
LARGEST_WEIGHT = 1e12

#: In place of a weight of zero. Beside any other weight it is lost in rounding, and where nobody has one, the mean is
#: one of numbers; hivemind divides by zero.
NO_WEIGHT = 1e-18


class RefusedPart(AllreduceException):
    """What a peer has sent is not taken; the message says why, in words."""


def norm_of(part: torch.Tensor) -> float:
    """The length of a part as a vector, in single precision at least; not finite if one of its numbers is not.

    :param part: of any shape and type; integers, which are always finite, have none
    """
    if not part.is_floating_point():
        return 0.0
    wide = torch.promote_types(part.dtype, torch.float32)
    return float(torch.linalg.vector_norm(part.detach(), dtype=wide))


def checked_norm(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> float:
    """The norm of a part that a peer has sent, if it can be averaged with the others'.

    :param part: as it was decoded
    :param shape: that it has to have
    :param dtype: of what it is to be added to
    :raises RefusedPart: if it cannot
    """
    if part.shape != shape:
        # some of them could be added, a single number to all of a part
        raise RefusedPart(f"it is of shape {_in_words(part.shape)} instead of {_in_words(shape)}")
    if not torch.can_cast(part.dtype, dtype):
        raise RefusedPart(f"it is of {part.dtype}, which cannot be added to {dtype}")
    norm = norm_of(part)
    if not norm <= LARGEST_NORM:
        what = "of nan" if math.isnan(norm) else f"beyond {LARGEST_NORM:g}, or infinite"
        raise RefusedPart(f"its norm is {what}")
    return norm


def checked_weight(weight: float) -> float:
    """The weight of a sender.

    :raises RefusedPart: if it is none
    """
    if not 0.0 <= weight <= LARGEST_WEIGHT:
        raise RefusedPart(f"its weight is {weight:g}")
    return weight


class CheckedParts(TensorPartContainer):
    """``hivemind``'s ``TensorPartContainer`` that takes only averages that can be ones.

    A reducer whose average was refused counts as one that has failed: this peer's own numbers stay.
    """

    @classmethod
    def of(
        cls,
        made: Any,
        on_refused: Callable[[int, str], None],
        check: Callable[[int, float], None] | None = None,
        own_index: int | None = None,
    ) -> CheckedParts:
        """The same container, which hivemind has made already.

        :param made: to which no average was given yet
        :param on_refused: called with the place of a reducer in the group, and why
        :param check: called with that place and the norm of each part; may refuse it
        :param own_index: place of this peer, whose own averages are made of what was looked at
        """
        made.__class__ = cls
        checked: CheckedParts = made
        checked._begin(on_refused, check, own_index)
        return checked

    def _begin(
        self,
        on_refused: Callable[[int, str], None],
        check: Callable[[int, float], None] | None,
        own_index: int | None,
    ) -> None:
        self.on_refused, self._check = on_refused, check
        self._trusted = set() if own_index is None else {own_index}

    def check_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        """See whether a part can be the difference between an average and what this peer has sent.

        :raises RefusedPart: if it cannot
        """
        if part_index >= self.num_parts_by_peer[peer_index]:
            raise RefusedPart("it is one more than there are")
        sent = self._input_parts_by_peer[peer_index][part_index][0]
        norm = checked_norm(part, sent.shape, sent.dtype)
        if self._check is not None:
            self._check(peer_index, norm)

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        if peer_index not in self._trusted and not self.finished.is_set():
            try:
                self.check_part(peer_index, part_index, part)
            except RefusedPart as e:
                self.on_refused(peer_index, str(e))
                raise
        super().register_processed_part(peer_index, part_index, part.detach())

    def register_failed_reducer(self, peer_index: int) -> None:
        self._trusted.add(peer_index)  # what comes are zeros
        super().register_failed_reducer(peer_index)

    async def iterate_output_tensors(self) -> AsyncIterator[torch.Tensor]:
        """The parts of all tensors, in their order; hivemind makes a copy of each tensor of them."""
        for peer_index, count in enumerate(self.num_parts_by_peer):
            parts, are_there = self._output_parts_by_peer[peer_index], self._output_part_available[peer_index]
            for _ in range(count):
                while not parts:
                    are_there.clear()
                    await are_there.wait()
                    if self.finished.is_set():
                        raise AllreduceException("the exchange has ended before all averages were there")
                yield parts.popleft()

    def finalize(self) -> None:
        # hivemind warns of averages that have not come, in percent of all numbers; from whom, the round's outcome tells
        self.failed_size = 0
        super().finalize()


class Gathered(dict[PeerID, Any]):
    """What the peers of a group have said of themselves, as hivemind's rounds give it, and who of them was refused.

    :param refused: why, in words, by the peer's id
    """

    def __init__(self, said: dict[PeerID, Any], refused: dict[PeerID, str]):
        super().__init__(said)
        self.refused = refused

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.refused)


def _in_words(shape: torch.Size) -> str:
    return str(tuple(shape))


# -- robust aggregation ----------------------------------------------------------------------------------------------


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


# -- sender weights --------------------------------------------------------------------------------------------------
#
# How much a sender may count for in an average of gradients: as many samples as it has told everybody of, at most.


#: Times the samples that a peer was about to have by its last report, for one that has become quicker since, or has
#: gone on until it heard that the epoch is over.
MARGIN = 2.0

#: Times the samples of an epoch, or those that a peer has reported, which no honest peer claims. Below that it may have
#: gone on for long since its last report, as all do in their first epoch, when nobody knows of the others yet.
IMPLAUSIBLE = 10.0


@dataclass(frozen=True)
class Told:
    """What a peer has reported of itself.

    :param epoch: that it works on
    :param samples: that it has gathered for it
    :param samples_per_second: its speed
    :param time: of the report, as the DHT counts seconds
    """

    epoch: int
    samples: float
    samples_per_second: float
    time: float

    def by(self, now: float) -> float:
        """Samples that it should have by a time, infinitely many if it has reported what is no number."""
        samples = self.samples + self.samples_per_second * max(0.0, now - self.time)
        return math.inf if math.isnan(samples) else samples


@dataclass(frozen=True)
class SampleReports:
    """What the peers of a run have reported, on its way to the process that averages.

    :param target_batch_size: samples after which an epoch is over
    :param told: by the peer's id
    """

    target_batch_size: float
    told: Mapping[bytes, Told]

    @classmethod
    def of(cls, target_batch_size: float, reports: Iterable[LocalTrainingProgress]) -> SampleReports:
        """Those reports, of which the DHT has checked the types."""
        told = {
            report.peer_id: Told(report.epoch, report.samples_accumulated, report.samples_per_second, report.time)
            for report in reports
        }
        return cls(target_batch_size, told)


class SenderWeights:
    """The largest weight of each sender of gradients. In the averager's process."""

    def __init__(self) -> None:
        self._target = math.inf
        #: of each peer, its newest reports from two epochs: the last may be of the epoch that has just begun
        self._told: dict[bytes, tuple[Told, ...]] = {}

    def note(self, reports: SampleReports) -> None:
        """Know what was reported last."""
        self._target = reports.target_batch_size
        self._told = {
            peer: (new, *[old for old in self._told.get(peer, ()) if old.epoch != new.epoch][:1])
            for peer, new in reports.told.items()
        }

    def largest(self, senders: Sequence[PeerID], own_id: PeerID) -> list[float]:
        """How much each of them may count for at most.

        For what it has reported, up to twice the samples of an epoch: peers of short epochs go on until they hear that
        one is over. For twice what it should have by now, as far as all together then have the samples of an epoch:
        reports that are late are late for all. And for twice what it would have where all are alike, as a peer does of
        whom nothing was read yet.

        :param own_id: of this peer, which knows its samples
        """
        now, target = get_dht_time(), self._target
        if math.isinf(target):
            return [math.inf] * len(senders)
        alike = target / max(1, len(senders))
        told = [self._told.get(sender.to_bytes(), (Told(0, alike, 0.0, now),)) for sender in senders]
        reported = [max(one.by(one.time) for one in each) for each in told]
        expected = [min(target, max(0.0, *(one.by(now) for one in each))) for each in told]
        scale = min(1.0, target / max(sum(expected), alike))
        return [
            math.inf if sender == own_id else min(MARGIN * target, max(before, MARGIN * max(alike, scale * by_now)))
            for sender, before, by_now in zip(senders, reported, expected, strict=True)
        ]

    def implausible(self, claimed: Mapping[PeerID, float]) -> frozenset[PeerID]:
        """Those who claim more than an honest peer can have, whatever it has reported or not yet.

        :param claimed: their weights in a round
        """
        return frozenset(
            peer
            for peer, weight in claimed.items()
            if weight > IMPLAUSIBLE * max(self._target, *(one.by(one.time) for one in self._told_of(peer)), 0.0)
        )

    def _told_of(self, peer: PeerID) -> tuple[Told, ...]:
        return self._told.get(peer.to_bytes(), ())

    def overstating(self, claimed: Mapping[PeerID, float], epoch: int) -> frozenset[PeerID]:
        """Those who have reported samples of an epoch of which they do not put half into its round.

        An epoch ends when all together have reported enough: whoever reports more than it has makes it too short.

        :param claimed: their weights in that round
        :param epoch: of the round; of another one, a peer may well have had more
        """
        return frozenset(
            peer
            for peer, weight in claimed.items()
            for told in self._told_of(peer)
            if told.epoch == epoch and told.by(told.time) > MARGIN * weight + 1.0
        )
