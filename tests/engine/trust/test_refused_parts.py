"""What cannot be averaged is refused, who sent it is named, and all else of a round is as if that peer had not come."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.compression import CompressionInfo, Float16Compression, Uniform8BitQuantization, serialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from tiny import LOOPBACK

from hivenb.compression import codec
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.network.dht import DHT
from hivenb.engine.trust.aggregation import (
    LARGEST_NORM,
    LARGEST_WEIGHT,
    CheckedParts,
    Gathered,
    RefusedPart,
    checked_norm,
    checked_weight,
    norm_of,
)

logger = get_logger(__name__)

NOT_TO_BE_ADDED = {
    "nan": torch.tensor([1.0, math.nan]),
    "infinity": torch.tensor([1.0, -math.inf]),
    "1e30": torch.tensor([1.0, 1e30]),
    "1e30 of doubles": torch.tensor([1.0, 1e30], dtype=torch.float64),
    "nan of half precision": torch.tensor([1.0, math.nan], dtype=torch.float16),
    "one number for all": torch.tensor([1.0]),
    "another shape": torch.ones(2, 1),
    "complex": torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("part", NOT_TO_BE_ADDED.values(), ids=NOT_TO_BE_ADDED)
def test_what_cannot_be_averaged_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(RefusedPart):
        checked_norm(part, torch.Size([2]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_types_of_numbers_are_taken(dtype: torch.dtype) -> None:
    part = torch.tensor([3.0, -4.0], dtype=dtype, requires_grad=True)
    assert checked_norm(part, torch.Size([2]), torch.float32) == 5.0
    assert checked_norm(torch.full((70_000,), 1.0, dtype=dtype), torch.Size([70_000]), torch.float32) == pytest.approx(
        math.sqrt(70_000)
    )


def test_integers_and_nothing_at_all_are_finite() -> None:
    assert checked_norm(torch.tensor([2**60]), torch.Size([1]), torch.int64) == 0.0
    assert norm_of(torch.zeros(0)) == 0.0
    with pytest.raises(RefusedPart):  # as the largest value it would make numbers of them
        checked_norm(torch.ones(1), torch.Size([1]), torch.int64)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1e-9, 10 * LARGEST_WEIGHT])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(RefusedPart, match="weight"):
        checked_weight(weight)


def test_sums_of_what_is_taken_are_finite_and_so_are_its_codecs() -> None:
    """However many there are, and whatever their weights."""
    largest = torch.full((4,), LARGEST_NORM / 2)
    assert checked_norm(largest, torch.Size([4]), torch.float32)
    assert bool(torch.zeros(4).add_(largest, alpha=LARGEST_WEIGHT * 1e7).isfinite().all())
    numbers = torch.linspace(-1, 1, 4096) * (LARGEST_NORM / 64)
    assert checked_norm(numbers, torch.Size([4096]), torch.float32)
    for name in ("float16", "scaled_float16", "uniform8bit", "quantile8bit"):
        chosen = codec(name)
        sent = chosen.extract(chosen.compress(2 * numbers, CompressionInfo.from_tensor(numbers)))
        assert bool(sent.isfinite().all()), name


def test_who_was_refused_travels_with_the_outcome_of_a_round() -> None:
    peer = PeerID(b"peer")
    sent = pickle.loads(pickle.dumps(Gathered({peer: 3}, {PeerID(b"bad"): "nan"})))
    assert sent == {peer: 3}
    assert sent.refused == {PeerID(b"bad"): "nan"}


class TestCheckedParts:
    def test_an_average_that_was_refused_is_replaced_by_what_this_peer_has(self) -> None:
        refused: list[tuple[int, str]] = []
        parts = CheckedParts.of(
            TensorPartContainer([torch.ones(4), torch.ones(4)], [0.5, 0.5]), lambda *told: refused.append(told)
        )
        parts.register_processed_part(0, 0, torch.ones(4))
        with pytest.raises(RefusedPart):
            parts.register_processed_part(1, 0, torch.full((4,), math.nan))
        parts.register_failed_reducer(1)
        assert [peer for peer, _ in refused] == [1]
        assert [float(found[0].sum()) for found in parts._output_parts_by_peer] == [4.0, 0.0]
        parts.finalize()

    def test_more_parts_than_there_are_are_refused(self) -> None:
        parts = CheckedParts.of(TensorPartContainer([torch.ones(4)], [1.0]), lambda *told: None)
        parts.register_processed_part(0, 0, torch.ones(4))
        with pytest.raises(RefusedPart, match="one more"):
            parts.register_processed_part(0, 1, torch.ones(4))
        parts.finalize()


class Sender(GradientAverager):
    """Sends what it is told to, with such a weight, to those who average."""

    value: ClassVar[float | None] = None
    weight: ClassVar[float | None] = None

    async def _run_allreduce_inplace_(self, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if self.value is not None:
            for tensor in tensors:
                tensor.view(-1)[-1] = self.value
        await super()._run_allreduce_inplace_(tensors, *args, **kwargs)

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        runner.weight = runner.weight if self.weight is None else self.weight
        return runner


class Garbler(FaultTolerantRunner):
    """Answers with numbers that are no average."""

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._accumulate_parts_streaming(stream, sender_index):
            size = tuple(message.tensor_part.size)
            garbage = serialize_torch_tensor(torch.full(size, math.nan))
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=garbage)


class GarblingReducer(GradientAverager):
    """Its averages are garbage."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        runner.__class__ = Garbler
        return runner


Averagers = Callable[..., list[GradientAverager]]


@pytest.fixture
def average(
    dht: DHT,
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    request: pytest.FixtureRequest,
) -> Callable[..., tuple[list[Any], list[GradientAverager]]]:
    """What two honest peers, and one of such a kind, have of a round in which they put in 1, 2 and 6."""

    def run(
        kind: type[GradientAverager], rule: str = "norm_bound", **of_third: Any
    ) -> tuple[list[Any], list[GradientAverager]]:
        averagers = []
        for number, one in enumerate((GradientAverager, GradientAverager, kind)):
            own = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
            request.addfinalizer(own.shutdown)
            options = {"robust_aggregation": rule, **(of_third if number == 2 else {"bandwidth": 1.0})}
            averagers.append(make_averager(own, 300_000, one, min_matchmaking_time=5.0, **options))
        expect_each_other(*averagers)
        for value, averager in zip((1.0, 2.0, 6.0), averagers, strict=True):
            averager.parameters[0].grad = torch.full((300_000,), value)
            averager.accumulate_grads_(1)
        controls = [averager.step(gather=0, timeout=60.0, wait=False) for averager in averagers]
        return [control.result(60) for control in controls[:2]], averagers

    return run


ATTACKS: dict[str, dict[str, Any]] = {
    "nan": {"value": math.nan},
    "infinity": {"value": math.inf},
    "1e30": {"value": 1e30},
    "much larger than usual": {"value": 1e6},
    "a weight of nan": {"weight": math.nan},
    "a negative weight": {"weight": -1.0},
    "an infinite weight": {"weight": math.inf},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_others_average_without_a_sender_of_such(average: Callable[..., Any], attack: str) -> None:
    kind = type("OneOfThose", (Sender,), ATTACKS[attack])
    outcomes, (*honest, attacker) = average(kind, client_mode=True)
    # the one of the two that averages the last part sees the number in it
    named = [outcome for outcome in outcomes if outcome.refused]
    assert named
    for outcome in named:
        assert outcome.refused.keys() == {attacker.peer_id}
        assert attacker.peer_id not in outcome
    for averager in honest:
        with averager.get_tensors() as (gradient,):
            # parts of those that average before the last number, which is the bad one, may hold all three
            assert bool(gradient.isfinite().all())
            assert gradient[-1].item() == 1.5


@pytest.mark.parametrize("chosen", [Float16Compression(), Uniform8BitQuantization()], ids=["float16", "8 bits"])
def test_codecs_hide_nothing(average: Callable[..., Any], chosen: Any) -> None:
    kind = type("SendsNan", (Sender,), {"value": math.nan})
    outcomes, (*_, attacker) = average(kind, client_mode=True, compression=chosen)
    assert any(set(outcome.refused) == {attacker.peer_id} for outcome in outcomes)


def test_without_a_rule_all_that_is_finite_counts(average: Callable[..., Any]) -> None:
    outcomes, (*honest, attacker) = average(type("Large", (Sender,), {"value": 3e6}), rule="none", client_mode=True)
    assert all(attacker.peer_id in outcome and not outcome.refused for outcome in outcomes)
    for averager in honest:
        with averager.get_tensors() as (gradient,):
            assert gradient[-1].item() == 1_000_001.0


def test_with_centered_clipping_one_of_three_has_no_more_force_than_the_others(average: Callable[..., Any]) -> None:
    outcomes, (*honest, attacker) = average(GradientAverager, rule="centered_clipping", client_mode=True)
    assert all(attacker.peer_id in outcome for outcome in outcomes)
    for averager in honest:
        with averager.get_tensors() as (gradient,):
            assert 1.5 <= gradient.min().item() <= gradient.max().item() <= 2.5  # the mean is 3


def test_an_average_that_is_none_leaves_this_peers_own(average: Callable[..., Any]) -> None:
    outcomes, (*honest, attacker) = average(GarblingReducer, bandwidth=1.0)
    for outcome, averager, own in zip(outcomes, honest, (1.0, 2.0), strict=True):
        assert outcome.refused.keys() == {attacker.peer_id}
        assert "as an average" in outcome.refused[attacker.peer_id]
        with averager.get_tensors() as (gradient,):
            assert set(gradient.tolist()) == {own, 3.0}
