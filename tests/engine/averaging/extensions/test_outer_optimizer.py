"""The outer optimizer by itself: its steps, what it tells of its anchors, and what others make of that."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from hivenb.engine.averaging.extensions.outer_optimizer import OuterOptimizer, are_alike, parse_word

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def make(seed: int = 0, make_optimizer=NESTEROV, **more) -> OuterOptimizer:
    generator = torch.Generator().manual_seed(seed)
    copies = [torch.randn(shape, generator=generator).share_memory_() for shape in ((40, 30), (30,))]
    return OuterOptimizer(make_optimizer, [one.requires_grad_(more.get("trained", True)) for one in copies])


def random_steps(count: int, size: float = 0.01) -> list[dict[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {number: size * torch.randn(shape, generator=generator) for number, shape in enumerate(((40, 30), (30,)))}
        for _ in range(count)
    ]


def word(outer: OuterOptimizer) -> list[float]:
    return outer.word.tolist()


def test_its_steps_are_those_of_the_torch_optimizer():
    outer = make()
    plain = [anchor.detach().clone().requires_grad_() for anchor in outer.anchors]
    optimizer = NESTEROV(plain)
    for gradients in random_steps(5):
        outer.step(gradients)
        for number, parameter in enumerate(plain):
            parameter.grad = gradients[number].clone()
        optimizer.step()
    for anchor, parameter in zip(outer.anchors, plain, strict=True):
        torch.testing.assert_close(anchor, parameter)
    assert all(anchor.grad is None for anchor in outer.anchors)


def test_what_is_not_trained_is_not_stepped():
    outer = make(make_optimizer=lambda parameters: NESTEROV(parameters or [torch.zeros(1)]), trained=False)
    before = [anchor.clone() for anchor in outer.anchors]
    outer.step(random_steps(1)[0])
    assert all(torch.equal(one, other) for one, other in zip(before, outer.anchors, strict=True))


def test_what_it_knows_is_in_shared_memory_and_stays_there():
    outer = make(make_optimizer=partial(torch.optim.Adam, lr=0.1))
    places = [one.data_ptr() for one in (*outer.anchors, *outer.moments)]
    assert all(one.is_shared() for one in (*outer.anchors, *outer.moments, outer.word))
    other = make(seed=3, make_optimizer=partial(torch.optim.Adam, lr=0.1))
    other.step(random_steps(1)[0])
    outer.take_over(other.state())
    outer.step(random_steps(1)[0])
    other.step(random_steps(1)[0])
    assert [one.data_ptr() for one in (*outer.anchors, *outer.moments)] == places
    assert all(torch.equal(one, theirs) for one, theirs in zip(outer.anchors, other.anchors, strict=True))
    assert word(outer)[1:] == word(other)[1:]


def test_a_state_is_a_copy():
    outer = make()
    state = outer.state()
    outer.step(random_steps(1)[0])
    assert not torch.equal(state["anchors"][0], outer.anchors[0])


def test_moments_that_do_not_fit_are_forgotten():
    outer = make()
    outer.step(random_steps(1)[0])
    assert not outer.take_moments([torch.ones(3)])
    assert all(not moment.any() for moment in outer.moments)


def test_peers_that_make_the_same_steps_are_alike():
    first, second = make(), make()
    assert are_alike([word(first), word(second)])
    for gradients in random_steps(3):
        first.step(gradients)
        second.step({number: one + 1e-3 * one.abs().max() for number, one in gradients.items()})  # as codecs leave them
        assert are_alike([word(first), word(second)])


def test_one_that_has_missed_a_step_or_comes_from_elsewhere_is_not_alike():
    first, second = make(), make()
    for gradients in random_steps(2):
        first.step(gradients)
        second.step(gradients)
    first.step(random_steps(3)[2])
    assert not are_alike([word(first), word(second)])
    assert not are_alike([word(make()), word(make(seed=1))])
    assert not are_alike([word(first), word(first), word(make(seed=1))])


def test_one_that_has_missed_the_step_of_a_piece_is_not_alike():
    first, second = make(), make()
    large, small = random_steps(1, size=0.1)[0], random_steps(1, size=0.01)[0]
    for outer in (first, second):
        outer.step({0: large[0]})
        outer.step({1: small[1]})
    assert are_alike([word(first), word(second)])
    before = [anchor.clone() for anchor in first.anchors]
    first.step({0: large[0]})
    assert torch.equal(first.anchors[1], before[1])
    assert not torch.equal(first.anchors[0], before[0])
    first.step({1: small[1]})
    second.step({0: large[0]})
    assert not are_alike([word(first), word(second)]), "however much larger the last step of the other piece was"


def test_one_that_has_come_to_the_same_by_a_download_is_alike():
    first, newcomer = make(), make(seed=1)
    for gradients in random_steps(3):
        first.step(gradients)
    newcomer.begin_at([anchor.half().float() for anchor in first.anchors])
    assert are_alike([word(first), word(newcomer)])


@pytest.mark.parametrize(
    "said",
    [None, "x", [], [0.0] * 3, [math.nan] * 17, [math.inf] * 17, ["0"] * 17, [True] * 17, {"a": 1}],
    ids=repr,
)
def test_what_is_no_word_is_none(said):
    assert parse_word(said) is None


def test_a_word_is_read_as_it_was_said():
    assert parse_word(tuple(word(make()))) == word(make())
