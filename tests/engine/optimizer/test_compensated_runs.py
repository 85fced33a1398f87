"""Two peers whose averages come an epoch late: what makes up for it, and that only the model itself is ever ahead."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.optim import state_averager
from in_memory.real_time import RealTimeDHT
from tiny import DELAYS, TinyModel, parameters, samples
from torch import Tensor, nn

from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.checkpoint import epoch_of
from hivenb.engine.optimizer.delay_compensation import LONGEST
from hivenb.engine.optimizer.handover import release, set_live, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.progress.tracker import ProgressTracker
from hivenb.run.model_copy import copy_of

EPOCHS = 12
WITHIN = 30.0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.12, momentum=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.2),
}


def loss_of(model: TinyModel, peer: int, epoch: int) -> Tensor:
    """Of a batch of a peer's own; those of two peers differ as two halves of one do."""
    x, y = samples(8, seed=2 * epoch + peer)
    return nn.functional.mse_loss(model.layer(x), y)


class Late(Optimizer):
    """An optimizer whose averages arrive when the gradients of the next epoch have been computed."""

    def __init__(self, **kwargs: Any):
        self._computing = threading.Condition()
        self._computed = -1.0
        super().__init__(**kwargs)

    def note_computed(self, epoch: float) -> None:
        with self._computing:
            self._computed = epoch
            self._computing.notify_all()

    def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
        super()._average_gradients_and_load_into_optimizer(control)
        with self._computing:
            assert self._computing.wait_for(lambda: self._computed > control.epoch, WITHIN)


class ToldTracker(ProgressTracker):
    """One that estimates nothing: an epoch is over when a test says so."""

    is_over = False

    @property
    def ready_to_update_epoch(self) -> bool:
        return self.is_over


class Peer:
    """A model and its optimizer, one batch to an epoch, which ends when all have theirs.

    :param together: where the peers meet
    """

    def __init__(self, number: int, dht: Any, run_id: str, kind: str, together: threading.Barrier, **kwargs: Any):
        self.number, self.model, self._together = number, TinyModel(), together
        #: seconds for which an average is on its way when the next gradients have been computed
        self.late_by = 0.0
        self.optimizer = Late(
            dht=dht,
            run_id=run_id,
            optimizer=OPTIMIZERS[kind],
            params=list(self.model.parameters()),
            target_batch_size=1000,
            matchmaking_time=2.0,
            averaging_timeout=WITHIN,
            tracker_opts={"min_refresh_period": 0.05, "default_refresh_period": 0.1},
            **{**DELAYS, **kwargs},
        )
        self.reports: list[Any] = []
        self.optimizer._on_epoch = self.reports.append
        self.optimizer.tracker.__class__ = ToldTracker
        self.optimizer.begin()

    @property
    def own(self) -> list[Tensor]:
        """What its optimizer has."""
        return [one.detach().clone() for one in self.optimizer.state_averager._optimizer_parameters()]

    def train(self, epochs: range) -> None:
        for epoch in epochs:
            self.optimizer.zero_grad()
            loss_of(self.model, self.number, epoch).backward()
            arrives = threading.Timer(self.late_by, self.optimizer.note_computed, (epoch,))
            arrives.start()
            if not self.late_by:
                arrives.join()
            self.optimizer.step(batch_size=8)
            self._together.wait(WITHIN)
            self.optimizer.tracker.is_over = True
            self.optimizer.step(batch_size=0)
            self.optimizer.tracker.is_over = False
            self._together.wait(WITHIN)
            assert self.optimizer.local_epoch == epoch + 1

    def compensate(self, on: bool) -> None:
        self.optimizer.note_computed(float("inf"))
        set_live(self.optimizer, {"delay_compensation": on})

    def finish(self) -> None:
        self.optimizer.note_computed(float("inf"))
        self.optimizer.finish_delayed_updates()


Peers = tuple[Peer, Peer]


@pytest.fixture
def make_peers(memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, run_id: str) -> Iterator[Callable[..., Peers]]:
    """Makes two that have met, without processes."""
    yield from _peers([memory_dht, joining_memory_dht], run_id)


@pytest.fixture
def start_peers(dht: DHT, joining_dht: DHT, run_id: str) -> Iterator[Callable[..., Peers]]:
    """Starts them with processes."""
    yield from _peers([dht, joining_dht], run_id)


def _peers(dhts: Sequence[Any], run_id: str) -> Iterator[Callable[..., Peers]]:
    made: list[Peer] = []

    def make(kind: str = "SGD", **kwargs: Any) -> Peers:
        together = threading.Barrier(2)
        made.extend(Peer(number, one, run_id, kind, together, **kwargs) for number, one in enumerate(dhts))
        deadline = time.monotonic() + WITHIN
        while any(peer.optimizer.tracker.global_progress.num_peers < 2 for peer in made):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return made[0], made[1]

    yield make
    for peer in made:
        peer.optimizer.note_computed(float("inf"))
        peer.optimizer.shutdown()


def both(peers: Peers, call: Callable[[Peer], Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(call, peer) for peer in peers]:
            future.result(4 * WITHIN)


def expected(kind: str, late: bool, compensated: bool = False, epochs: int = EPOCHS) -> TinyModel:
    """What two peers come to, in plain torch: in step, an epoch late, or with steps of their own meanwhile."""
    model = TinyModel()
    optimizer = OPTIMIZERS[kind](model.parameters())
    places, coming, longest = [model, model], None, float("inf")

    def step(gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    for epoch in range(epochs):
        own = [
            torch.autograd.grad(loss_of(place, peer, epoch), list(place.parameters()))
            for peer, place in enumerate(places)
        ]
        if coming is not None:
            step(coming)
            longest = LONGEST * length_of(coming)
        coming = [torch.stack(some).mean(0) for some in zip(*own, strict=True)]
        if not late:
            step(coming)
            coming = None
        places = [copy.deepcopy(model) for _ in own]
        if compensated:
            for place, gradients in zip(places, own, strict=True):
                ahead = OPTIMIZERS[kind](place.parameters())
                ahead.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                shortened = min(1.0, longest / length_of(gradients))
                for parameter, gradient in zip(place.parameters(), gradients, strict=True):
                    parameter.grad = gradient * shortened
                ahead.step()
    if coming is not None:
        step(coming)
    return model


def length_of(gradients: Sequence[Tensor]) -> float:
    return float(torch.cat([one.flatten() for one in gradients]).norm())


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(parameters(one), parameters(other), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def test_compensation_makes_up_for_most_of_it_in_plain_torch() -> None:
    for kind in OPTIMIZERS:
        in_step = expected(kind, late=False)
        by_compensation = apart(expected(kind, late=True, compensated=True), in_step)
        by_delay = apart(expected(kind, late=True), in_step)
        assert by_compensation < 0.5 * by_delay, kind


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_in_8_bits_are_compensated_as_well(
    make_peers: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bitsandbytes.optim import AdamW8bit

    kind = "AdamW, 8 bits"
    monkeypatch.setitem(OPTIMIZERS, kind, partial(AdamW8bit, lr=0.2, min_8bit_size=1))
    peers = make_peers(kind)
    both(peers, lambda peer: peer.train(range(EPOCHS)))
    both(peers, Peer.finish)
    for peer in peers:
        assert {one["state1"].dtype for one in peer.optimizer.opt.state.values()} == {torch.uint8}
        # what rounding leaves of an average may be another byte of a moment
        beside, late = expected(kind, late=True, compensated=True), expected(kind, late=True)
        assert apart(peer.model, beside) < 0.2 * apart(beside, late)
    assert "nothing makes up for their delay" not in caplog.text


@pytest.mark.parametrize("compensated", [True, False], ids=["compensated", "late"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_peers_come_to_what_plain_torch_comes_to(
    make_peers: Callable[..., Peers], kind: str, compensated: bool
) -> None:
    come_to_plain_torch(make_peers(kind, delay_compensation=compensated), kind, compensated)


def test_so_they_do_by_processes(start_peers: Callable[..., Peers]) -> None:
    come_to_plain_torch(start_peers("AdamW"), "AdamW", compensated=True)


def come_to_plain_torch(peers: Peers, kind: str, compensated: bool) -> None:
    both(peers, lambda peer: peer.train(range(EPOCHS)))
    both(peers, Peer.finish)
    for peer in peers:
        assert [report.group_size for report in peer.reports][1:] == [2] * (EPOCHS - 1)
        assert apart(peer.model, expected(kind, late=True, compensated=compensated)) < 1e-4


def test_what_an_epoch_sends_is_not_written_over_by_the_next_however_long_it_is_on_its_way(
    make_peers: Callable[..., Peers],
) -> None:
    peers = make_peers(allreduce_timeout=0.3)  # after which hivemind waits no longer
    for peer in peers:
        peer.late_by = 1.0
    both(peers, lambda peer: peer.train(range(4)))
    both(peers, Peer.finish)
    for peer in peers:
        assert apart(peer.model, expected("SGD", late=True, compensated=True, epochs=4)) < 1e-5


def test_only_the_model_is_ahead(make_peers: Callable[..., Peers]) -> None:
    peers = make_peers()
    both(peers, lambda peer: peer.train(range(3)))
    two_steps = expected("SGD", late=True, compensated=True, epochs=2)
    for peer in peers:
        averager = peer.optimizer.state_averager
        truth = parameters(two_steps)
        assert all(torch.allclose(mine, one, atol=1e-5) for mine, one in zip(peer.own, truth, strict=True))
        assert apart(peer.model, two_steps) > 0.01, "by its own step"
        metadata, tensors, _ = averager.get_current_state()
        assert metadata["epoch"] == 2
        assert all(torch.allclose(mine, one, atol=1e-5) for mine, one in zip(tensors, truth, strict=False))
    both(peers, Peer.finish)
    three_steps = expected("SGD", late=True, compensated=True, epochs=3)
    for peer in peers:
        assert apart(peer.model, three_steps) < 1e-5
        assert all(map(torch.equal, peer.own, parameters(peer.model)))
        assert epoch_of(peer.optimizer.state_dict()) == 3


def test_a_snapshot_has_what_the_optimizer_has(make_peers: Callable[..., Peers]) -> None:
    peers = make_peers()
    assert peers[0].optimizer.values_behind() == {}
    both(peers, lambda peer: peer.train(range(3)))
    ahead = [[one.clone() for one in parameters(peer.model)] for peer in peers]
    two_steps = expected("SGD", late=True, compensated=True, epochs=2)
    for peer, leading in zip(peers, ahead, strict=True):
        made = copy_of(peer.model, torch.device("cpu"), peer.optimizer.values_behind())
        assert apart(made, two_steps) < 1e-5
        assert all(map(torch.equal, parameters(peer.model), leading)), "the model goes on where it is"
    both(peers, Peer.finish)
    for peer in peers:
        assert peer.optimizer.values_behind() == {}


def test_a_pause_begins_with_what_the_optimizer_makes_of_the_average(make_peers: Callable[..., Peers]) -> None:
    peers = make_peers()
    both(peers, lambda peer: peer.train(range(3)))

    def pause(peer: Peer) -> None:
        peer.optimizer.note_computed(float("inf"))
        peer.optimizer.step_aside()

    both(peers, pause)
    three_steps = expected("SGD", late=True, compensated=True, epochs=3)
    for peer in peers:
        assert not peer.optimizer.state_averager.pending_updates
        assert apart(peer.model, three_steps) < 1e-5
        assert all(map(torch.equal, peer.own, parameters(peer.model)))


def test_downloads_that_fail_while_the_model_is_ahead_change_nothing_of_the_optimizers(
    make_peers: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = make_peers()
    both(peers, lambda peer: peer.train(range(3)))
    before = [peer.own for peer in peers]

    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(state_averager.TrainingStateAverager, "load_state_from_peers", fail)
        for peer in peers:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    peer.optimizer.state_averager.load_state_from_peers(timeout=1.0)
    for peer, truth in zip(peers, before, strict=True):
        assert all(map(torch.equal, peer.own, truth))
    both(peers, Peer.finish)
    three_steps = expected("SGD", late=True, compensated=True, epochs=3)
    for peer in peers:
        assert apart(peer.model, three_steps) < 1e-5


def test_it_is_switched_off_and_on_while_they_train(make_peers: Callable[..., Peers]) -> None:
    peers = make_peers()
    both(peers, lambda peer: peer.train(range(2)))
    both(
        peers,
        lambda peer: (
            peer.optimizer.note_computed(float("inf")),
            set_live(peer.optimizer, {"delay_compensation": False}),
        ),
    )
    for peer in peers:
        assert all(map(torch.equal, peer.own, parameters(peer.model))), "it is behind no more, nor ahead"
    both(peers, lambda peer: peer.train(range(2, 4)))
    for peer in peers:
        assert all(map(torch.equal, peer.own, parameters(peer.model)))
    both(
        peers,
        lambda peer: (
            peer.optimizer.note_computed(float("inf")),
            set_live(peer.optimizer, {"delay_compensation": True}),
        ),
    )
    both(peers, lambda peer: peer.train(range(4, 6)))
    for peer in peers:
        assert not any(map(torch.equal, peer.own, parameters(peer.model)))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_peer_that_is_alone_trains_as_in_plain_torch(memory_dht: RealTimeDHT, run_id: str, kind: str) -> None:
    alone = Peer(0, memory_dht, run_id, kind, threading.Barrier(1))
    plain = TinyModel()
    stepping = OPTIMIZERS[kind](plain.parameters())
    try:
        for epoch in range(EPOCHS):
            stepping.zero_grad()
            loss_of(plain, 0, epoch).backward()
            stepping.step()
            alone.train(range(epoch, epoch + 1))
            assert all(map(torch.equal, parameters(alone.model), parameters(plain))), epoch
    finally:
        alone.optimizer.shutdown()


@pytest.fixture
def alone(memory_dht: RealTimeDHT, run_id: str) -> Iterator[Peer]:
    """A peer that has made two steps, and of which nothing is under way."""
    yield from _alone(memory_dht, run_id)


@pytest.fixture
def alone_with_processes(dht: DHT, run_id: str) -> Iterator[Peer]:
    yield from _alone(dht, run_id)


def _alone(dht: Any, run_id: str) -> Iterator[Peer]:
    peer = Peer(0, dht, run_id, "AdamW", threading.Barrier(1))
    peer.train(range(2))
    peer.finish()
    yield peer
    peer.optimizer.shutdown()


def lead(peer: Peer) -> None:
    """Let its model be ahead of a step that nobody makes, as after an interrupt."""
    one_further = [(0, peer.own[0] + 1.0)]
    peer.optimizer.state_averager.lead_model(lambda _: one_further, [torch.empty_like(one) for one in peer.own])
    assert not torch.equal(peer.own[0], parameters(peer.model)[0])


def test_a_lead_of_a_step_that_never_began_ends_with_what_is_finished(alone: Peer) -> None:
    lead(alone)
    with torch.no_grad():
        alone.model.layer.bias[0] = 7.0  # by the module itself
    alone.optimizer.finish_delayed_updates()
    assert not alone.optimizer.state_averager.is_ahead
    assert torch.equal(parameters(alone.model)[0], alone.own[0])
    assert float(alone.model.layer.bias[0]) == 7.0
    alone.optimizer.state_averager.take_in_changes()
    assert all(map(torch.equal, alone.own, parameters(alone.model)))


def test_an_optimizer_that_ends_leaves_no_model_that_is_ahead(alone: Peer) -> None:
    before = alone.own
    lead(alone)
    alone.optimizer.shutdown()
    assert all(map(torch.equal, parameters(alone.model), before))


@pytest.mark.parametrize("end", [Optimizer.finish_delayed_updates, Optimizer.shutdown])
def test_one_whose_averager_was_killed_leaves_none_either(
    alone_with_processes: Peer, end: Callable[[Optimizer], None]
) -> None:
    alone = alone_with_processes
    before, averager = alone.own, alone.optimizer.state_averager
    lead(alone)
    assert averager.pid is not None
    os.kill(averager.pid, signal.SIGKILL)
    deadline = time.monotonic() + WITHIN
    while averager.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert alone.optimizer.is_to_be_finished
    end(alone.optimizer)
    assert all(map(torch.equal, parameters(alone.model), before))
    assert not alone.optimizer.is_to_be_finished


def test_a_model_to_which_nothing_can_be_written_is_not_ahead(alone: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, averager = alone.own, alone.optimizer.state_averager

    def fail_half_way(sources: list[Tensor], targets: list[Tensor]) -> None:
        targets[0].copy_(sources[0])
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(averager.staging, "copy", fail_half_way)
        with pytest.raises(MemoryError):
            lead(alone)
    assert not averager.is_ahead
    assert all(map(torch.equal, parameters(alone.model), before))
    averager.take_in_changes()
    assert all(map(torch.equal, alone.own, before))


def test_a_step_beside_that_writes_to_the_optimizers_own_copies_is_undone(alone: Peer) -> None:
    before, averager = alone.own, alone.optimizer.state_averager

    def writing(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
        yield 0, before[0] + 1.0
        optimizer.param_groups[0]["params"][1].add_(1.0)
        raise RuntimeError("it has written to its own parameters")

    with pytest.raises(RuntimeError, match="its own parameters"):
        averager.lead_model(writing, [torch.empty_like(one) for one in before])
    assert not averager.is_ahead
    assert all(map(torch.equal, alone.own, before))
    assert all(map(torch.equal, parameters(alone.model), before))


def test_what_a_step_was_made_from_is_known_until_the_model_has_its_result(
    alone: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    averager = alone.optimizer.state_averager
    known: list[bool] = []
    hand_out = averager._changes.hand_out

    def note(*args: Any) -> None:
        known.append(averager.is_ahead)
        hand_out(*args)

    lead(alone)
    monkeypatch.setattr(averager._changes, "hand_out", note)
    averager._apply_optimizer_parameters_()
    assert known == [True]
    assert not averager.is_ahead


def test_a_step_that_takes_longer_than_the_end_waits_for_leaves_what_it_was_made_from(
    make_peers: Callable[..., Peers],
) -> None:
    peers = make_peers()
    both(peers, lambda peer: peer.train(range(3)))
    two_steps = expected("SGD", late=True, compensated=True, epochs=2)

    def end(peer: Peer) -> None:
        peer.optimizer.state_averager._allreduce_timeout = 0.1
        peer.optimizer.shutdown()

    both(peers, end)
    for peer in peers:
        assert apart(peer.model, two_steps) < 1e-5


class Failing(torch.optim.SGD):
    """Fails in the middle of a step, once it is told to."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not type(self).fails:
            super().step(closure)
            return
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise ArithmeticError("half a step")


def test_a_step_that_fails_half_way_is_undone(
    make_peers: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "failing", partial(Failing, lr=0.12, momentum=0.5))
    monkeypatch.setattr(Failing, "fails", False)
    peers = make_peers("failing")
    both(peers, lambda peer: peer.train(range(3)))
    before = [peer.own for peer in peers]
    Failing.fails = True

    def fail(peer: Peer) -> None:
        with pytest.raises(ArithmeticError, match="half a step"):
            peer.finish()

    both(peers, fail)
    for peer, truth in zip(peers, before, strict=True):
        assert all(map(torch.equal, parameters(peer.model), truth))
        assert peer.optimizer.local_epoch == 2


def test_a_successor_compensates_and_clips_as_before(
    make_peers: Callable[..., Peers], memory_dht: RealTimeDHT, run_id: str
) -> None:
    peers = make_peers()
    seen: list[torch.optim.Optimizer] = []
    for peer in peers:
        peer.optimizer.compensation.clip = seen.append
    both(peers, lambda peer: peer.train(range(2)))
    assert [type(one) for one in seen] == [torch.optim.SGD] * 4
    assert all(one is not peer.optimizer.opt for one in seen for peer in peers)
    both(peers, Peer.finish)
    before = parameters(peers[0].model)
    settings = {"dht": memory_dht, "run_id": run_id, "target_batch_size": 16, **DELAYS}
    offload = settings.pop("offload_optimizer")
    successor = take_over(release(peers[0].optimizer), Optimizer, offload=offload, **settings)
    try:
        assert successor.delay_compensation
        assert successor.compensation.clip == seen.append
        assert all(map(torch.equal, parameters(peers[0].model), before))
    finally:
        successor.shutdown()
