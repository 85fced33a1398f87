"""Pseudo-gradients in real rounds and downloads: what an outer optimizer makes of them, and who is brought together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from averager_of_two import averager_of_two
from hivemind.optim import state_averager as upstream
from torch import nn

from hivenb import compression as codecs
from hivenb.engine.averaging.state_averager import TrainingStateAverager

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class Peer:
    """A model of one tensor, and an averager of its state with an outer optimizer.

    :param number: of the peer; at first, one is as the other
    :param value: of all its parameters
    :param tensors: of the model
    """

    def __init__(
        self,
        number: int,
        dht: Any,
        run_id: str,
        value: float = 1.0,
        kind: type = TrainingStateAverager,
        tensors: int = 1,
        **more: Any,
    ):
        self.model = nn.ParameterList(torch.zeros(2, 300) for _ in range(tensors))
        self.fill(value)
        self.optimizer: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        if more.get("offload_optimizer"):
            more["params"] = list(self.model.parameters())
        else:
            self.optimizer = self.optimizer(self.model.parameters())
        if kind is TrainingStateAverager:
            more.setdefault("outer_optimizer", NESTEROV)
        self.averager: Any = averager_of_two(
            kind,
            optimizer=self.optimizer,
            dht=dht,
            prefix=run_id,
            **more,
        )

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.fill_(value)

    def learn(self, difference: float, samples: int = 1) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter += difference
        if isinstance(self.averager, TrainingStateAverager):
            self.averager.outer_rounds.fragments.count(samples)

    def begin(self, **kwargs: Any) -> None:
        self.averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 60.0}, **kwargs)

    def finish(self) -> None:
        self.averager.step(wait_for_delayed_updates=True)

    @property
    def weights(self) -> list[float]:
        assert all(parameter.std() < 1e-4 for parameter in self.model)
        return [parameter.mean().item() for parameter in self.model]

    @property
    def weight(self) -> float:
        (weight,) = self.weights
        return weight

    @property
    def samples(self) -> float:
        (samples,) = self.averager.outer_rounds.fragments.samples
        return samples

    @property
    def anchor(self) -> float:
        return self.averager.outer.anchors[0].mean().item()

    @property
    def momentum(self) -> float:
        return self.averager.outer.moments[0].mean().item()


def average(*peers: Peer) -> None:
    for peer in peers:
        peer.begin()
    for peer in peers:
        peer.finish()


def stepped(anchor: float, pseudo_gradients: list[float]) -> list[float]:
    """The anchors that come of such steps, as torch's own optimizer makes them."""
    parameter = torch.full((1,), anchor, requires_grad=True)
    optimizer, anchors = NESTEROV([parameter]), []
    for gradient in pseudo_gradients:
        parameter.grad = torch.full((1,), gradient)
        optimizer.step()
        anchors.append(parameter.item())
    return anchors


@pytest.mark.parametrize("delta_rule", [False, True], ids=["synchronous", "delayed"])
@pytest.mark.parametrize("codec", ["none", "float16", "uniform8bit"])
def test_rounds_step_the_anchors_with_the_mean_over_the_samples(
    make_peer: Callable[..., Peer], codec: str, delta_rule: bool
) -> None:
    step_anchors(make_peer, codec, delta_rule)


def test_so_they_do_by_processes(start_peer: Callable[..., Peer]) -> None:
    step_anchors(start_peer, "uniform8bit", delta_rule=True)


def step_anchors(make_peer: Callable[..., Peer], codec: str, delta_rule: bool) -> None:
    settings = {"pseudo_gradient_compression": codecs.codec(codec), "delta_rule_averaging": delta_rule}
    first, second = make_peer(**settings), make_peer(**settings)
    expected = stepped(1.0, [0.25, 0.25])
    for number in range(2):
        first.learn(-0.1, samples=30)
        second.learn(-0.3, samples=90)
        average(first, second)
        assert first.weight == pytest.approx(expected[number], abs=2e-3)
        assert second.weight == pytest.approx(expected[number], abs=2e-3)
        assert first.samples == second.samples == 0


@pytest.mark.parametrize("delta_rule", [False, True], ids=["synchronous", "delayed"])
def test_pieces_are_stepped_in_turn_and_the_others_go_on_by_themselves(
    make_peer: Callable[..., Peer], delta_rule: bool
) -> None:
    settings = {"tensors": 3, "outer_fragments": 2, "delta_rule_averaging": delta_rule}
    peers = first, second = make_peer(**settings), make_peer(**settings)
    piece, other = [list(members) for members in first.averager.outer_rounds.fragments.members]
    assert sorted([*piece, *other]) == [0, 1, 2]
    stepped_once, stepped_late = stepped(1.0, [0.25])[0], stepped(1.0, [0.5])[0]
    for epoch, (synchronized, expected) in enumerate([(other, stepped_once), (piece, stepped_late)], 1):
        first.learn(-0.1, samples=30)
        second.learn(-0.3, samples=90)
        for peer in peers:
            peer.averager.local_epoch = epoch
        average(*peers)
        for peer in peers:
            assert [peer.weights[one] for one in synchronized] == pytest.approx(
                [expected] * len(synchronized), abs=1e-5
            )
            assert [anchor.mean().item() for anchor in peer.averager.outer.anchors] != peer.weights
        if epoch == 1:
            assert [one.weights[piece[0]] for one in peers] == pytest.approx([0.9, 0.7]), "its turn is to come"
            assert [one.averager.outer_rounds.fragments.samples for one in peers] == [[30, 0], [90, 0]]
    assert [one.averager.outer_rounds.fragments.samples for one in peers] == [[0, 30], [0, 90]]
    assert [one.weights[other[0]] for one in peers] == pytest.approx([stepped_once - 0.1, stepped_once - 0.3], abs=1e-5)


def test_peers_with_other_pieces_are_brought_together_all_the_same(make_peer: Callable[..., Peer]) -> None:
    first, second = make_peer(tensors=3, outer_fragments=2), make_peer(tensors=3, outer_fragments=3)
    for peer, difference in ((first, -0.1), (second, -0.3)):
        peer.learn(difference)
        peer.averager.local_epoch = 1
    average(first, second)
    # one sample of each: in pieces of two epochs and of three
    together = 1.0 - (0.1 / 2 + 0.3 / 3) / (1 / 2 + 1 / 3)
    assert first.weights == second.weights == pytest.approx([together] * 3, abs=1e-5)


def test_what_is_learned_while_a_round_is_under_way_is_kept_and_is_a_part_of_the_next(
    make_peer: Callable[..., Peer], eventually: Callable[..., None]
) -> None:
    first, second = make_peer(delta_rule_averaging=True), make_peer(delta_rule_averaging=True)
    expected = stepped(1.0, [0.2, 0.25])
    for peer in (first, second):
        peer.learn(-0.2)
        peer.begin()
    eventually(lambda: first.averager._old_tensors is not None)  # what is sent is read in the background
    first.learn(-0.5)
    for peer in (first, second):
        peer.finish()
    assert first.weight == pytest.approx(expected[0] - 0.5, abs=1e-5)
    assert second.weight == first.anchor == second.anchor == pytest.approx(expected[0], abs=1e-5)
    assert (first.samples, second.samples) == (1, 0)
    second.learn(0.0)
    average(first, second)
    assert first.weight == second.weight == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("offloaded", [False, True])
def test_local_steps_do_not_wait_for_a_round_that_is_under_way(make_peer: Callable[..., Peer], offloaded: bool) -> None:
    first, second = (make_peer(delta_rule_averaging=True, offload_optimizer=offloaded) for _ in range(2))
    expected = stepped(1.0, [0.2, 0.15])
    for peer in (first, second):
        peer.learn(-0.2)
    first.begin()  # and the other one is not there yet
    for velocity in (1.0, 1.9):
        before = first.weight
        for parameter in first.model:
            parameter.grad = torch.ones_like(parameter)
        began = time.monotonic()
        first.averager.step(optimizer_step=True)
        assert time.monotonic() - began < 5.0
        assert first.weight == pytest.approx(before - 0.1 * velocity, abs=1e-5)
    assert [one.done() for one in first.averager.pending_updates] == [False], "the round is still to come"
    second.begin()
    for peer in (first, second):
        peer.finish()
    assert first.weight == pytest.approx(expected[0] - 0.29, abs=1e-5)
    assert second.weight == first.anchor == second.anchor == pytest.approx(expected[0], abs=1e-5)


def test_peers_with_other_anchors_begin_anew_at_the_average_with_that_of_what_they_know(
    make_peer: Callable[..., Peer],
) -> None:
    first, second = make_peer(), make_peer()
    for peer in (first, second):
        peer.learn(-0.2)
    average(first, second)
    momentum = first.momentum
    assert momentum == pytest.approx(0.2, abs=1e-5)
    first.learn(-0.1)
    first.averager.step_outer_alone()
    assert first.anchor != pytest.approx(second.anchor, abs=1e-2)
    alone, left_behind = first.momentum, second.weight
    for peer in (first, second):
        peer.learn(-0.4)
    at = (first.weight + second.weight) / 2
    average(first, second)
    assert first.weight == second.weight == first.anchor == second.anchor == pytest.approx(at, abs=1e-5)
    assert first.momentum == second.momentum == pytest.approx((alone + momentum) / 2, abs=1e-5)
    assert left_behind != at
    for peer in (first, second):
        peer.learn(-0.2)
    average(first, second)
    assert first.momentum == pytest.approx(0.9 * (alone + momentum) / 2 + 0.2, abs=1e-5), "a step, as before"


def test_one_that_has_averaged_with_nobody_keeps_what_it_has_learned_for_the_next_round(
    make_peer: Callable[..., Peer],
) -> None:
    first, second = make_peer(), make_peer()
    first.learn(-0.1, samples=3)
    first.averager.step(averaging_round=True, averaging_opts={"timeout": 4.0})
    assert (first.weight, first.anchor) == (pytest.approx(0.9), 1.0)
    assert first.samples == 3
    second.learn(-0.5, samples=1)
    average(first, second)
    assert first.weight == second.weight == pytest.approx(stepped(1.0, [0.2])[0], abs=1e-5)


def test_a_newcomer_begins_at_the_anchor_with_the_momentum(make_peer: Callable[..., Peer]) -> None:
    first = make_peer()
    first.averager.local_epoch = 3
    first.learn(-0.2)
    first.averager.step_outer_alone()
    first.learn(-5.0)
    first.averager.allow_state_sharing = True
    first.averager.state_sharing_priority = 3
    second = make_peer(value=7.0)
    second.averager.load_state_from_peers(timeout=30.0)
    assert second.averager.local_epoch == 3
    assert second.weight == second.anchor == first.anchor == pytest.approx(stepped(1.0, [0.2])[0], abs=1e-5)
    assert second.momentum == first.momentum != 0


def test_with_plain_hivemind_parameters_are_averaged(start_peer: Callable[..., Peer]) -> None:
    first, plain = start_peer(), start_peer(value=3.0, kind=upstream.TrainingStateAverager)
    first.learn(-0.5, samples=1000)
    average(first, plain)
    assert first.weight == plain.weight == first.anchor == pytest.approx((0.5 + 3.0) / 2, abs=1e-5)


def test_the_lock_of_the_buffers_is_taken_only_where_a_round_has_an_outcome() -> None:
    """A round that is under way has it for as long as it takes."""
    model = nn.ParameterList([torch.ones(2, 300)])
    averager: Any = TrainingStateAverager(
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dht=SimpleNamespace(client_mode=False),
        prefix="run",
        start=False,
        outer_optimizer=NESTEROV,
    )
    averager._load_local_tensors_into_averager_()
    averager.lock_averaged_tensors = lock = MagicMock()
    averager._apply_averaging_results_()
    lock.__enter__.assert_not_called()
    averager.outer_rounds.note_alone(0)
    averager._apply_averaging_results_()
    lock.__enter__.assert_called_once_with()
