"""A peer whose gradients the others have averaged without it, while they wait for its state, does not look for long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.optim.progress_tracker import GlobalTrainingProgress
from hivemind.utils import get_dht_time
from in_memory.real_time import RealTimeDHT
from tiny import DELAYS, TinyModel

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.matchmaking import Attendance, ExpectedPeers
from hivenb.engine.optimizer.handover import release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import RoundOutcome, is_excluded
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING

Make = Callable[..., GradientAverager]


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Without processes."""
    return make_optimizer_in_memory


def test_only_who_follows_nobody_and_leads_nobody_is_alone(
    memory_dht: RealTimeDHT,
    joining_memory_dht: RealTimeDHT,
    make_averager: Make,
    eventually: Callable[..., None],
) -> None:
    one, other = (make_averager(own, min_matchmaking_time=30.0) for own in (memory_dht, joining_memory_dht))
    assert not one.is_alone(3), "it does not look for anybody"
    for averager in (one, other):  # so that a group of two is not complete
        averager.expect_peers(ExpectedPeers(frozenset({Attendance(b"a third one", 0, 3)})))
    searches = [one.schedule_step(gather=3, timeout=60.0)]
    eventually(lambda: one.is_alone(3))
    assert not one.is_alone(2)
    searches.append(other.schedule_step(gather=3, timeout=60.0))
    eventually(lambda: not one.is_alone(3) and not other.is_alone(3))
    for search in searches:
        search.cancel()


def test_who_has_met_nobody_gives_its_search_up(
    memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT, make_averager: Make, eventually: Callable[..., None]
) -> None:
    one, other = (make_averager(own, min_matchmaking_time=30.0) for own in (memory_dht, joining_memory_dht))
    for averager in (one, other):  # so that a group of two is not complete
        averager.expect_peers(ExpectedPeers(frozenset({Attendance(b"a third one", 0, 3)})))
    lonely = one.schedule_step(gather=3, timeout=60.0)
    eventually(lambda: one.is_alone(3))
    one.give_up_if_alone(2)
    eventually(lambda: one.is_alone(3))
    assert not lonely.done()
    # again and again, as it is asked at each look at the swarm: it may have looked last a while ago
    eventually(lambda: one.give_up_if_alone(3) or lonely.cancelled())
    searches = [averager.schedule_step(gather=3, timeout=60.0) for averager in (one, other)]
    eventually(lambda: not one.is_alone(3) and not other.is_alone(3))
    one.give_up_if_alone(3)
    assert not one.is_alone(3), "its process has taken that in"
    assert not any(search.done() for search in searches)
    for search in searches:
        search.cancel()


@pytest.fixture
def optimizer(make_optimizer: Callable[..., Optimizer]) -> Optimizer:
    made = make_optimizer(TinyModel().parameters(), averaging_timeout=60.0)
    made.tracker.on_look = None  # which would end all searches of one that is alone
    return made


def round_of(averager: Any, epoch: int) -> Round:
    """A search that will find nobody."""
    search: Round = averager.schedule_step(gather=epoch, timeout=60.0)
    return search


def test_it_gives_up_when_the_others_wait_for_its_state(optimizer: Optimizer, eventually: Callable[..., None]) -> None:
    search, state = round_of(optimizer.grad_averager, 0), round_of(optimizer.state_averager, 1)
    eventually(lambda: state.stage is AveragingStage.LOOKING_FOR_GROUP)  # or it would say so afterwards
    state.stage = AveragingStage.AWAITING_TRIGGER  # as if it had met them
    optimizer.rounds._state_to_come = state
    optimizer._average_gradients_and_load_into_optimizer(search)
    assert search.cancelled()
    assert optimizer.rounds.last == RoundOutcome(1, "given up: the others have gone on without this peer")
    assert state.weight == NEXT_TO_NOTHING
    assert optimizer._should_load_state_from_peers()
    state.cancel()


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_successor_knows_it(
    make_optimizer_in_memory: Callable[..., Optimizer], memory_dht: RealTimeDHT, run_id: str, is_behind: bool
) -> None:
    optimizer = make_optimizer_in_memory(TinyModel().parameters(), run_id=run_id)
    if is_behind:
        optimizer.fall_behind()
    handover = release(optimizer)
    successor = take_over(handover, Optimizer, offload=True, dht=memory_dht, run_id=run_id, target_batch_size=8)
    try:
        assert successor.is_to_catch_up is is_behind
        assert successor.compensation is optimizer.compensation
    finally:
        successor.shutdown()


def test_it_gives_up_when_all_others_have_ended_the_epoch(optimizer: Optimizer) -> None:
    search = round_of(optimizer.grad_averager, 0)
    assert is_excluded(search, optimizer.grad_averager, None, oldest_epoch=lambda: 1, timeout=60.0)


def test_it_looks_on_while_others_may_come(optimizer: Optimizer, eventually: Callable[..., None]) -> None:
    search = round_of(optimizer.grad_averager, 0)
    eventually(lambda: search.stage is AveragingStage.LOOKING_FOR_GROUP)
    assert not is_excluded(search, optimizer.grad_averager, None, oldest_epoch=lambda: 0, timeout=3.0)
    assert not search.done()
    search.cancel()


def test_one_that_has_not_caught_up_yet_looks_for_no_round(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """The others are in it already."""
    see_others_at(0, optimizer, monkeypatch)
    eventually(lambda: optimizer.rounds.is_due)
    see_others_at(2, optimizer, monkeypatch)
    eventually(lambda: optimizer.tracker.global_epoch == 2)
    assert not optimizer.rounds.is_due


@pytest.mark.parametrize(
    ("delays", "group_size", "needs_state"),
    [
        pytest.param(DELAYS, 2, False, id="in the background"),
        pytest.param(DELAYS, 1, True, id="met nobody before"),
        pytest.param({}, 2, True, id="synchronous"),
    ],
)
def test_one_whose_first_look_of_an_epoch_comes_when_it_is_over_gives_its_gradients_all_the_same(
    make_optimizer: Callable[..., Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    delays: dict[str, Any],
    group_size: int,
    needs_state: bool,
) -> None:
    """Gradients that are averaged in the background are waited for then; all others are averaged by then."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    optimizer = make_optimizer(params=TinyModel().parameters(), optimizer=sgd, **delays)
    optimizer.tracker.on_look = None
    optimizer.rounds.last = RoundOutcome(group_size)
    see_others_at(1, optimizer, monkeypatch)
    eventually(lambda: optimizer.tracker.global_epoch == 1)
    eventually(optimizer.tracker.fetched_global_progress_this_epoch.is_set)
    assert optimizer._should_load_state_from_peers() == needs_state


def test_a_helper_that_comes_too_late_leaves_its_rounds_and_goes_on_with_the_others(
    make_optimizer: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    helper = make_optimizer(TinyModel().parameters(), averaging_timeout=60.0, auxiliary=True)
    helper.tracker.on_look = None
    helper.scheduled_grads = search = round_of(helper.grad_averager, 0)
    see_others_at(2, helper, monkeypatch)
    eventually(lambda: helper.tracker.global_epoch == 2)
    helper.step()
    assert search.cancelled()
    assert helper.scheduled_grads is None
    assert helper.local_epoch == 2


def see_others_at(epoch: int, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an optimizer believe, from its next look on, in another peer that is about to end that epoch."""

    def parse(entries: Any) -> GlobalTrainingProgress:
        return GlobalTrainingProgress(
            epoch,
            samples_accumulated=4,
            target_batch_size=8,
            num_peers=2,
            num_clients=0,
            eta_next_epoch=get_dht_time(),
            next_fetch_time=get_dht_time() + 0.1,
        )

    monkeypatch.setattr(optimizer.tracker, "_estimate", parse)
