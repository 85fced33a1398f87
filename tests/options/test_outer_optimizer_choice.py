"""Outer optimizers by name and by factory: what travels to other peers, and what they make of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hivenb.errors import OptionsError
from hivenb.options.choices import describe_outer_optimizer, outer_optimizer, outer_optimizer_factory
from hivenb.options.options import Options
from hivenb.options.swarm_wide import shared_part, with_shared_part

ADAM = partial(torch.optim.Adam, lr=0.01, betas=None)
SGD = partial(torch.optim.SGD, lr=0.5)


class Own(torch.optim.SGD):
    pass


def options(chosen: Any = None) -> Options:
    return Options(target_batch_size=64, use_local_updates=True, outer_optimizer=chosen)


@pytest.mark.parametrize("chosen", [None, "nesterov", SGD, torch.optim.SGD], ids=["none", "name", "partial", "class"])
def test_what_travels_is_what_arrives(chosen: Any) -> None:
    shared = shared_part(options(chosen))
    arrived = with_shared_part(options(), shared)
    assert shared_part(arrived) == shared
    assert describe_outer_optimizer(arrived.outer_optimizer) == describe_outer_optimizer(chosen)


def test_nesterov_is_that_of_the_paper() -> None:
    make = outer_optimizer_factory("nesterov")
    assert make is not None
    (group,) = make([torch.zeros(2, requires_grad=True)]).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.7, 0.9, True)
    assert outer_optimizer_factory(SGD) is SGD
    assert outer_optimizer_factory(None) is None


@pytest.mark.parametrize(
    "chosen",
    [Own, partial(Own, lr=0.1), ADAM, lambda parameters: Own(parameters)],
    ids=["class", "partial", "setting", "function"],
)
def test_one_that_others_cannot_make_by_name_is_told_by_where_it_is(chosen: Any) -> None:
    with pytest.raises(OptionsError, match="give this peer the same"):
        outer_optimizer(describe_outer_optimizer(chosen))


@pytest.mark.parametrize(
    "described",
    [3, "sgd", {}, {"name": "lr_scheduler"}, {"name": 1}, {"name": "Optimizer.step"}, ["nesterov"]],
    ids=repr,
)
def test_what_others_may_write_is_no_optimizer(described: Any) -> None:
    with pytest.raises(OptionsError, match="which is not torch's own"):
        outer_optimizer(described)


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"lr": 1e9}, {"lr": float("nan")}, {"lr": "much"}, {"speed": 1}, "lr", [0.1]], ids=repr
)
def test_settings_that_do_not_fit_are_refused(settings: Any) -> None:
    with pytest.raises(OptionsError, match="cannot be made"):
        outer_optimizer({"name": "SGD", "settings": settings})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"outer_optimizer": "nesterov"}, ("needs use_local_updates=True", "with_prerequisites")),
        ({"outer_optimizer": "sgd", "use_local_updates": True}, ("give 'nesterov'",)),
        ({"outer_optimizer": 0.7, "use_local_updates": True}, ("outer_optimizer=0.7", "functools.partial")),
        (
            {"outer_optimizer": SGD, "use_local_updates": True, "averager_opts": {"reuse_tensors": True}},
            ("reuse_tensors", "the same memory"),
        ),
        ({"outer_fragments": 0}, ("outer_fragments=0", "whole number of pieces")),
        ({"outer_fragments": 4}, ("outer_fragments=4 without an outer_optimizer", "leave it at 1")),
        (
            {
                "outer_fragments": 4,
                "average_state_every": 2,
                "outer_optimizer": "nesterov",
                "use_local_updates": True,
            },
            ("average_state_every=2", "never have their turn"),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(values: Any, words: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        Options(target_batch_size=64, **values)
    assert all(word in str(caught.value) for word in words)


def test_it_comes_and_goes_with_local_updates() -> None:
    plain = Options(target_batch_size=64)
    chosen = plain.with_prerequisites(outer_optimizer="nesterov")
    assert chosen == options("nesterov")
    assert chosen.with_prerequisites(use_local_updates=False) == plain
    assert 'outer_optimizer="nesterov"' in chosen.to_code()


def test_pieces_go_with_the_outer_optimizer():
    plain = Options(target_batch_size=64)
    in_pieces = plain.with_prerequisites(outer_optimizer="nesterov", outer_fragments=4)
    assert in_pieces.outer_fragments == 4
    assert in_pieces.with_prerequisites(outer_optimizer=None).outer_fragments == 1
    assert in_pieces.with_prerequisites(use_local_updates=False) == plain
    assert "outer_fragments=4" in in_pieces.to_code()
    assert with_shared_part(plain, shared_part(in_pieces)) == in_pieces
