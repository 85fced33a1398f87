"""What goes on of an optimizer's state when somebody has changed the model, or the optimizer, between two trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from hivenb.errors import TrainingError
from hivenb.strategy import HivemindStrategy
from hivenb.strategy.reused_model import (
    LeftModel,
    changed_structure,
    edited_since,
    fitted_state,
    not_trained,
    prints_of,
    set_up_as,
    with_description,
)


class Swarms:
    """An optimizer as the strategy has it, of which only the torch optimizer matters here."""

    def __init__(self, opt: torch.optim.Optimizer):
        self.opt = opt

    @property
    def param_groups(self) -> Any:
        return self.opt.param_groups


class BodyAndHead(tiny.TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)


def stepped(opt: torch.optim.Optimizer, value: float = 1.0) -> torch.optim.Optimizer:
    for group in opt.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, value)
    opt.step()
    return opt


def handed_on(
    model: nn.Module, before: torch.optim.Optimizer, make: Callable[[], torch.optim.Optimizer], follows: bool = True
) -> tuple[Any, Any]:
    """Another optimizer with the state of one, and what became of the groups."""
    state = with_description(before.state_dict(), model, Swarms(before), set_up_as(before))
    after = make()
    given = set_up_as(after)
    fitted, groups = fitted_state(state, model, Swarms(after), given, left=LeftModel() if follows else None)
    after.load_state_dict({name: value for name, value in fitted.items() if name != "hivemind"})
    return after, groups


def test_unfrozen_layers_begin_anew_and_all_else_keeps_its_moments() -> None:
    model = BodyAndHead()
    before = stepped(torch.optim.Adam(model.layer.parameters(), 0.1))
    ordered = [*model.body.parameters(), *model.layer.parameters()]
    after, groups = handed_on(model, before, lambda: stepped(torch.optim.Adam(ordered, 0.1), 9.0))
    for one in model.layer.parameters():
        assert torch.equal(after.state[one]["exp_avg"], before.state[one]["exp_avg"])
    assert groups.begun == ("body.weight", "body.bias")
    stepped(after)


def test_a_new_head_of_another_shape_begins_anew() -> None:
    model = BodyAndHead()
    before = stepped(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    moments = {name: before.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    model.layer = nn.Linear(4, 7)
    after, groups = handed_on(
        model, before, lambda: stepped(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 9.0)
    )
    assert groups.begun == ("layer.weight", "layer.bias")
    assert torch.equal(after.state[model.body.weight]["momentum_buffer"], moments["body.weight"])
    assert after.state[model.layer.weight]["momentum_buffer"].shape == (7, 4)


def test_a_new_head_of_the_same_shape_begins_anew_too() -> None:
    model = BodyAndHead()
    before = stepped(torch.optim.Adam(model.parameters(), 0.1))
    state = with_description(before.state_dict(), model, Swarms(before), set_up_as(before))
    after = stepped(torch.optim.Adam(model.parameters(), 0.1), 9.0)
    left = LeftModel(replaced=frozenset({"layer.weight"}))
    fitted, groups = fitted_state(state, model, Swarms(after), set_up_as(after), left=left)
    assert groups.begun == ("layer.weight",)
    assert torch.equal(fitted["state"][0]["exp_avg"], after.state[model.layer.weight]["exp_avg"])
    assert torch.equal(fitted["state"][1]["exp_avg"], before.state[model.layer.bias]["exp_avg"])


def test_settings_that_somebody_has_changed_count_and_the_rest_is_the_states() -> None:
    model = BodyAndHead()
    before = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.01)
    state = with_description(before.state_dict(), model, Swarms(before), set_up_as(before))
    state["param_groups"][0] |= {"lr": 0.05, "eps": 1e-4}  # a schedule has moved it, and a callback
    for follows, rate, decay in ((True, 0.01, 0.5), (False, 0.05, 0.01)):
        after = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.5)
        fitted, groups = fitted_state(
            state, model, Swarms(after), set_up_as(after), left=LeftModel() if follows else None
        )
        group = fitted["param_groups"][0]
        assert (group["lr"], group["weight_decay"], group["eps"]) == pytest.approx((rate, decay, 1e-4))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(before, 0.9)
    assert groups.of_scheduler(scheduler.state_dict(), scheduler.state_dict(), 1) == scheduler.state_dict()


def test_groups_go_on_from_those_that_their_parameters_were_in_and_so_do_their_schedules() -> None:
    model = BodyAndHead()
    before = stepped(torch.optim.Adam(model.layer.parameters(), 0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(before, lambda epoch: 0.5**epoch)
    scheduler.step()

    def make() -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": list(model.body.parameters()), "lr": 0.03}, {"params": list(model.layer.parameters())}], 0.1
        )

    after, groups = handed_on(model, before, make)
    assert groups.sources == (None, 0)
    assert [group["lr"] for group in after.param_groups] == pytest.approx([0.03, 0.05])
    present = torch.optim.lr_scheduler.LambdaLR(make(), lambda epoch: 0.5**epoch)
    state = groups.of_scheduler(scheduler.state_dict(), present.state_dict(), 1)
    assert state["base_lrs"] == pytest.approx([0.03, 0.1])
    assert state["last_epoch"] == 1
    present.load_state_dict(state)
    present.step()
    assert present.get_last_lr() == pytest.approx([0.03 * 0.25, 0.1 * 0.25])


def test_another_kind_of_optimizer_begins_anew() -> None:
    model = BodyAndHead()
    before = stepped(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    after, groups = handed_on(model, before, lambda: stepped(torch.optim.AdamW(model.parameters(), 0.003)))
    assert after.param_groups[0]["lr"] == 0.003
    assert len(groups.begun) == 4
    stepped(after)


def test_a_state_that_does_not_say_what_it_is_of_fits_or_is_an_error_that_says_what_to_do() -> None:
    model = BodyAndHead()
    plain = stepped(torch.optim.Adam(model.parameters(), 0.1)).state_dict()
    alike, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.layer.parameters())
    fitted, _ = fitted_state(plain, model, Swarms(alike), set_up_as(alike), left=None)
    assert fitted == plain
    with pytest.raises(TrainingError, match=r"\[4\] parameters in its groups, and this one \[2\].*requires_grad"):
        fitted_state(plain, model, Swarms(other), set_up_as(other), left=None)


def test_what_somebody_changes_in_a_model_is_seen_and_what_nobody_changes_is_not() -> None:
    model = BodyAndHead().to(torch.bfloat16)
    before = prints_of(model)
    assert edited_since(before, model) == ()
    model.body.weight.data[0, 0] += 1
    model.layer = nn.Linear(4, 2)
    model.lazy = nn.LazyLinear(3)
    assert edited_since(before, model) == (
        "layer.weight",
        "layer.bias",
        "body.weight",
        "lazy.weight",
        "lazy.bias",
    )


def test_parameters_that_an_optimizer_does_not_have_are_named() -> None:
    model = BodyAndHead()
    model.body.requires_grad_(False)
    trained = list(model.layer.parameters())
    before = not_trained(model, trained)
    assert changed_structure(model, trained, before) is None
    model.body.requires_grad_(True)
    assert "body.bias, body.weight" in str(changed_structure(model, trained, before))
    model.body.requires_grad_(False)
    del model.layer
    assert "2 parameters that it trains are no longer" in str(changed_structure(model, trained, before))


def test_after_training_weights_of_a_checkpoint_are_loaded() -> None:
    """As by ``trainer.test(ckpt_path="best")`` after another start of a run."""
    strategy, model, best = HivemindStrategy(16), tiny.TinyModel(), tiny.TinyModel().state_dict()
    tiny.trainer(strategy)
    strategy.connect(model)
    strategy.left = LeftModel()
    with torch.no_grad():
        model.layer.weight.zero_()
    strategy.load_model_state_dict({"state_dict": best})
    assert not model.layer.weight.any()
    strategy.teardown()
    strategy.connect(model)
    strategy.load_model_state_dict({"state_dict": best})
    assert torch.equal(model.layer.weight, best["layer.weight"])
    strategy.teardown()
