"""What a peer takes over from another: the state, but not twice the schedule, and nothing that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.optim.state_averager import dump_optimizer_state, load_optimizer_state
from in_memory.real_time import RealTimeDHT
from tiny import TinyModel, parameters, train
from torch.testing._internal.two_tensor import TwoTensor

from hivenb.engine.averaging.torch_optimizer_state import (
    _names_of_values,
    add_change,
    group_settings,
    initialize_optimizer_state,
    restore_switches,
    state_mismatch,
)
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.errors import SwarmError, TrainingError

Make = Callable[..., Optimizer]
EXPONENTIAL = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
FAR = 10_000
"""A target that nobody reaches while the newcomer loads."""


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Make) -> Make:
    """Without processes."""
    return make_optimizer_in_memory


def make(make_optimizer: Make, model: TinyModel, optimizer: Any = torch.optim.AdamW, **kwargs: Any) -> Optimizer:
    made = make_optimizer(
        optimizer=partial(optimizer, lr=1.0), params=list(model.parameters()), target_batch_size=FAR, **kwargs
    )
    made.take_part()
    return made


@pytest.mark.parametrize("offload", [False, True])
def test_the_learning_rate_is_that_of_the_swarm(
    make_optimizer: Make, joining_memory_dht: RealTimeDHT, eventually: Callable[..., None], offload: bool
) -> None:
    """hivemind copies the rate of the other one and steps the scheduler from there: it would be 0.5 ** 6."""
    model, joiner = TinyModel(), TinyModel()
    first = make(make_optimizer, model, scheduler=EXPONENTIAL, offload_optimizer=offload)
    train(model, first, 3, batch_size=FAR)
    second = make(make_optimizer, joiner, scheduler=EXPONENTIAL, offload_optimizer=offload, dht=joining_memory_dht)
    eventually(lambda: second.tracker.global_epoch == 3)
    second.load_state_from_peers()
    assert second.local_epoch == 3
    assert [one.opt.param_groups[0]["lr"] for one in (first, second)] == [0.5**3] * 2
    for theirs, ours in zip(parameters(model), parameters(joiner), strict=True):
        assert torch.equal(theirs, ours)
    second.shutdown()


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"scheduler": EXPONENTIAL}, "all or none of them a scheduler"),
        ({"optimizer": torch.optim.SGD}, "AdamW has"),
    ],
    ids=["a scheduler", "another optimizer"],
)
def test_a_state_that_does_not_fit_is_refused(
    make_optimizer: Make,
    joining_memory_dht: RealTimeDHT,
    eventually: Callable[..., None],
    theirs: dict[str, Any],
    message: str,
) -> None:
    """hivemind would put the numbers where they happen to fall, and go on."""
    model, joiner = TinyModel(), TinyModel()
    first = make(make_optimizer, model, offload_optimizer=False, **theirs)
    train(model, first, 1, batch_size=FAR)
    second = make(make_optimizer, joiner, offload_optimizer=False, dht=joining_memory_dht)
    eventually(lambda: second.tracker.global_epoch == 1)
    before = parameters(joiner)
    with pytest.raises(SwarmError, match=message):
        second.load_state_from_peers()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(joiner), strict=True))
    second.shutdown()


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_parameters_stay_as_they_are_and_can_be_thawed(make_optimizer: Make, offload: bool) -> None:
    """hivemind gives them a gradient of zeros, by which weight decay would change them."""
    model = TinyModel()
    before = model.layer.bias.clone()
    optimizer = make_optimizer(
        optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5),
        params=list(model.parameters()),
        offload_optimizer=offload,
    )
    model.layer.bias.requires_grad_(False)
    train(model, optimizer, 2, batch_size=8)
    assert torch.equal(model.layer.bias, before)
    model.layer.bias.requires_grad_(True)
    train(model, optimizer, 2, batch_size=8)
    assert not torch.equal(model.layer.bias, before)


def _sent(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[torch.Tensor]]:
    values, statistics = dump_optimizer_state(optimizer)
    return values, [*(p.detach() for group in optimizer.param_groups for p in group["params"]), *statistics]


def _an_optimizer() -> torch.optim.Optimizer:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 4)), torch.nn.Parameter(torch.ones(2))], lr=0.1)
    initialize_optimizer_state(made)
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "0.1"),
        ("lr", None),
        ("lr", -0.1),
        ("lr", 1e308),
        ("lr", float("nan")),
        ("lr", True),
        ("betas", 1.5),
        ("params", 1),
        ("state", 1),
        ("state", -1),
        ("state", 10**9),
    ],
)
def test_a_value_with_which_no_step_could_be_made_is_refused(name: str, value: Any) -> None:
    """Each of them ended the training of the newcomer, or put one tensor in the place of another."""
    optimizer = _an_optimizer()
    values, tensors = _sent(optimizer)
    assert state_mismatch(optimizer, (), {"optimizer_metadata": values}, tensors) is None
    place = _names_of_values(optimizer).index(name)
    values[place] = {**values[place], "index" if name == "state" else "value": value}
    assert f"for {name}" in (state_mismatch(optimizer, (), {"optimizer_metadata": values}, tensors) or "")


def test_another_rate_is_taken_over_and_another_switch_is_not() -> None:
    optimizer, other = _an_optimizer(), _an_optimizer()
    other.param_groups[0].update(lr=0.7, betas=(0.8, 0.99), capturable=True, foreach=True)
    values, tensors = _sent(other)
    assert state_mismatch(optimizer, (), {"optimizer_metadata": values}, tensors) is None
    settings = group_settings(optimizer)
    load_optimizer_state(optimizer, values, tensors[2:])
    restore_switches(optimizer, settings)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["capturable"], group["foreach"]) == (0.7, (0.8, 0.99), False, None)


class InTwoParts(torch.optim.SGD):
    """Keeps its state in tensors that are made of others, as torchao's optimizers of few bits do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"]):
            self.state[parameter]["mean"] = TwoTensor(torch.zeros_like(parameter), torch.zeros_like(parameter))


def test_a_state_that_cannot_be_sent_is_refused_before_training() -> None:
    optimizer = InTwoParts(TinyModel().parameters(), 0.1)
    with pytest.raises(TrainingError, match="InTwoParts keeps its state in tensors of the class TwoTensor"):
        initialize_optimizer_state(optimizer)


def test_a_second_moment_that_has_decayed_during_a_round_stays_positive() -> None:
    """As of a row of an embedding that only this peer has used: the average is half of what it has sent."""
    sent, average = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 2.0, 0.5])
    now = torch.tensor([0.36, 0.36, 1.0])
    add_change(now, average, sent, is_statistic=True)
    assert now.tolist() == pytest.approx([0.36, 1.36, 0.5])
    parameter = torch.tensor([0.36, 0.36, 1.0])
    add_change(parameter, average, sent, is_statistic=False)
    assert parameter.tolist() == pytest.approx([-0.14, 1.36, 0.5])


@pytest.mark.parametrize("has_outer", [False, True])
def test_it_does_so_where_a_round_ends_after_local_updates(make_optimizer: Make, has_outer: bool) -> None:
    model = TinyModel()
    outer = {"averager_opts": {"outer_optimizer": partial(torch.optim.SGD, lr=1.0)}} if has_outer else {}
    options = {"use_local_updates": True, "delay_state_averaging": True, "average_opt_statistics": ("exp_avg_sq",)}
    averager = make(make_optimizer, model, **options, **outer).state_averager
    moments = [averager.optimizer.state[one]["exp_avg_sq"] for one in model.parameters()]
    for one in moments:
        one.fill_(1.0)
    averager._load_local_tensors_into_averager_()
    with averager.get_tensors() as tensors:
        averager._old_tensors = tuple(one.clone() for one in tensors)
        for one in tensors[len(moments) :]:
            one.fill_(0.5)
    for one in moments:
        one.fill_(0.36)
    if averager.outer_rounds is not None:
        averager.outer_rounds.note_alone(0)
    averager._apply_averaging_results_()
    for one in moments:
        torch.testing.assert_close(one, torch.full_like(one, 0.36))
