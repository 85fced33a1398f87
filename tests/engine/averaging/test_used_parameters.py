"""Which parameters have a gradient in a step: those that a batch of one of the peers has used, at all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from averager_of_two import averager_of_two
from hivemind.optim.grad_averager import GradientAverager as PlainGradientAverager
from in_memory.real_time import RealTimeDHT, RealTimeSwarm
from torch import Tensor

from hivenb.compression import codec
from hivenb.engine.averaging.gradient_averager import GradientAverager, PowerSGDGradientAverager
from hivenb.engine.network.dht import DHT

Make = Callable[..., Any]
KINDS: dict[str, Callable[..., Any]] = {
    "all to all": GradientAverager,
    "float16": partial(GradientAverager, compression=codec("float16")),
    "power sgd": partial(PowerSGDGradientAverager, averager_rank=2),
}
SHAPE = (40, 30)


def use(averager: Any, gradients: Sequence[float | None], samples: int = 4) -> None:
    """A batch that gives some parameters a gradient; a sum of them where they are summed in the model."""
    averager.keep_gradients() if averager.reuse_grad_buffers else None
    for parameter, value in zip(averager.parameters, gradients, strict=True):
        if averager.reuse_grad_buffers:
            if value is not None:
                (parameter * value * samples).sum().backward()  # as the strategy weighs a batch
        else:
            parameter.grad = None if value is None else torch.full_like(parameter, value)
    averager.accumulate_grads_(samples)


def means(averager: Any) -> list[float | None]:
    """What the step gets."""
    with averager.get_tensors() as averages:
        firsts = [average.flatten()[0].item() for average in averages]
        assert all(torch.allclose(average, average.flatten()[0], atol=1e-3) for average in averages)
    pairs = zip(firsts, averager.have_gradients(), strict=True)
    return [pytest.approx(first, abs=1e-3) if has_one else None for first, has_one in pairs]


@pytest.fixture
def make(swarm_in_memory: RealTimeSwarm, run_id: str) -> Iterator[Make]:
    """Starts averagers of the gradients of four matrices, without processes."""
    yield from _averagers(run_id)


@pytest.fixture
def start(run_id: str) -> Iterator[Make]:
    """Starts such with processes."""
    yield from _averagers(run_id)


def _averagers(run_id: str) -> Iterator[Make]:
    made: list[Any] = []

    def make(dht: Any, kind: Callable[..., Any] = GradientAverager, **options: Any) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(4)]
        made.append(averager_of_two(kind, parameters, dht=dht, prefix=run_id, **options))
        return made[-1]

    yield make
    for averager in made:
        averager.shutdown()


def hold_round(*averagers: Any) -> None:
    controls = [averager.step(wait=False, timeout=60.0) for averager in averagers]
    assert [len(control.result(60.0)) for control in controls] == [len(averagers)] * len(averagers)


@pytest.mark.parametrize("reused", [False, True], ids=["buffers", "reused"])
def test_a_peer_alone_has_those_that_its_batches_have_used(make: Make, memory_dht: RealTimeDHT, reused: bool) -> None:
    averager = make(memory_dht, reuse_grad_buffers=reused)
    averager.samples_of_weight_one = 1
    assert averager.gradients() == [] or reused
    for _ in range(2):  # an epoch knows nothing of the one before
        use(averager, [1.0, None, 0.0, None])
        use(averager, [3.0, None, None, None], samples=12)
        averager.load_accumulators_into_averager_()
        assert means(averager) == [2.5, None, 0.0, None]
        averager.reset_accumulated_grads_()
        use(averager, [None, None, None, 5.0])
        averager.load_accumulators_into_averager_()
        assert means(averager) == [None, None, None, 5.0]
        averager.reset_accumulated_grads_()


@pytest.mark.parametrize("reused", [False, True], ids=["buffers", "reused"])
def test_a_successor_goes_on_with_what_was_used(make: Make, memory_dht: RealTimeDHT, reused: bool) -> None:
    averager = make(memory_dht, reuse_grad_buffers=reused)
    averager.samples_of_weight_one = 1
    use(averager, [1.0, None, 0.0, None])
    kept, samples = averager.mean_gradients(), averager.local_samples_accumulated
    assert [one is None for one in kept] == [False, True, False, True]
    averager.reset_accumulated_grads_()
    averager.set_mean_gradients(kept, samples)
    use(averager, [3.0, 2.0, None, None])
    averager.load_accumulators_into_averager_()
    assert means(averager) == [2.0, 1.0, 0.0, None]


def test_a_batch_that_is_taken_back_has_used_nothing(make: Make, memory_dht: RealTimeDHT) -> None:
    averager = make(memory_dht)
    use(averager, [1.0, None, None, None])
    for parameter, value in zip(averager.parameters, [1.0, torch.nan, None, None], strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    batch = averager.accumulate_if_finite_(4)
    assert not batch.verdict
    averager.take_back(batch)
    averager.load_accumulators_into_averager_()
    assert means(averager) == [1.0, None, None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_peers_agree_on_what_one_of_them_has_used(
    make: Make, memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, kind: str
) -> None:
    agree_on_used([make(own, KINDS[kind]) for own in (memory_dht, joining_memory_dht)])


def agree_on_used(peers: Sequence[Any]) -> None:
    used: list[list[list[float | None]]] = [
        [[1.0, 2.0, None, 0.0], [3.0, None, None, None]],
        [[1.0, None, None, None], [1.0, None, None, 8.0]],
    ]
    expected = [[2.0, 1.0, None, 0.0], [1.0, None, None, 4.0]]
    for of_peers, means_of_both in zip(used, expected, strict=True):
        for peer, gradients in zip(peers, of_peers, strict=True):
            use(peer, gradients)
        hold_round(*peers)
        assert [means(peer) for peer in peers] == [means_of_both, means_of_both]


def test_what_power_sgd_has_left_over_waits_until_it_is_used_again(
    make: Make, memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT
) -> None:
    peers = [make(own, partial(PowerSGDGradientAverager, averager_rank=1)) for own in (memory_dht, joining_memory_dht)]
    for peer in peers:
        for parameter in peer.parameters:
            parameter.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        peer.accumulate_grads_(4)
    hold_round(*peers)
    left_over = [[one.clone() for one in peer._ms] for peer in peers]
    assert left_over[0][1].norm() > 1.0
    for peer in peers:
        use(peer, [1.0, None, None, None])
    hold_round(*peers)
    for peer, before in zip(peers, left_over, strict=True):
        assert peer.have_gradients() == [True, False, False, False]
        for left, expected in zip(peer._ms[1:], before[1:], strict=True):
            assert torch.allclose(left, expected, atol=1e-5)
        with peer.get_tensors() as averages:
            assert torch.equal(averages[1], Tensor([0.0]).expand(SHAPE))


def power_sgd(make: Make, *dhts: RealTimeDHT) -> list[Any]:
    return [make(own, partial(PowerSGDGradientAverager, averager_rank=1)) for own in dhts]


def test_who_has_sent_nothing_takes_nothing_out_of_the_next_round_of_power_sgd(
    make: Make, memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT
) -> None:
    first, second = peers = power_sgd(make, memory_dht, joining_memory_dht)
    use(first, [1.0] * 4)
    with pytest.MonkeyPatch.context() as patch:  # as one whose batches were all skipped
        patch.setattr(second, "have_gradients", lambda: [True] * 4)
        second.local_samples_accumulated = 0
        hold_round(*peers)
    assert means(first) == [1.0] * 4
    for _ in range(2):
        for peer in peers:
            use(peer, [1.0] * 4)
        hold_round(*peers)
        assert means(first) == [1.0] * 4


def test_what_a_round_of_power_sgd_was_to_send_before_it_failed_is_sent_once(
    make: Make, memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held anew, with the same gradients."""
    peers = power_sgd(make, memory_dht, joining_memory_dht)
    after, failed = PowerSGDGradientAverager._after_phase, set()

    def fail_once(self: Any, *args: Any) -> None:
        if self not in failed:
            failed.add(self)
            raise RuntimeError("the line is down")
        after(self, *args)

    monkeypatch.setattr(PowerSGDGradientAverager, "_after_phase", fail_once)
    for _ in range(2):
        for peer in peers:
            use(peer, [1.0, 2.0, 3.0, 4.0])
        hold_round(*peers)
        assert [means(peer) for peer in peers] == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert failed == set(peers)


def test_so_they_do_by_processes(start: Make, dht: DHT, joining_dht: DHT) -> None:
    agree_on_used([start(own, KINDS["power sgd"]) for own in (dht, joining_dht)])


def test_with_a_peer_of_plain_hivemind_all_have_a_gradient(start: Make, dht: DHT, joining_dht: DHT) -> None:
    ours, plain = start(dht), start(joining_dht, PlainGradientAverager)
    use(ours, [1.0, None, None, None])
    for parameter, value in zip(plain.parameters, [3.0, 0.0, 2.0, 0.0], strict=True):
        parameter.grad = torch.full_like(parameter, value)
    plain.accumulate_grads_(4)
    hold_round(ours, plain)
    assert means(ours) == [2.0, 0.0, 1.0, 0.0]
