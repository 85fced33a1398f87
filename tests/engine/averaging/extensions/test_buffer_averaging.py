"""Buffers in real rounds and downloads: with peers of ours, with one that has none, and with plain hivemind's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averager_of_two import averager_of_two
from hivemind.optim import state_averager as upstream
from torch import nn

from hivenb import compression as codecs
from hivenb.engine.averaging.extensions.buffers import ModuleBuffers
from hivenb.engine.averaging.state_averager import TrainingStateAverager


class Peer:
    """A model with a BatchNorm, and an averager of its state.

    :param number: of the peer, from which its parameters, statistics and count follow
    """

    def __init__(self, number: int, dht: Any, run_id: str, kind: type = TrainingStateAverager, **more: Any):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.norm: Any = self.model[1]
        for name, buffer in more.pop("more", {}).items():
            self.norm.register_buffer(name, buffer)
        self.fill(float(number))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if more.pop("with_buffers", True):
            more["module_buffers"] = ModuleBuffers(self.model)
        self.averager = averager_of_two(
            kind,
            optimizer=self.optimizer,
            dht=dht,
            prefix=run_id,
            **more,
        )

    def fill(self, number: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(number)
        self.norm.running_mean.fill_(70000.0 + number)  # more than half precision can hold
        self.norm.running_var.fill_(1e-9 * number)
        self.norm.num_batches_tracked.fill_(10 + 10 * int(number))

    def begin(self, **kwargs: Any) -> None:
        self.averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 60.0}, **kwargs)

    def finish(self) -> None:
        self.averager.step(wait_for_delayed_updates=True)

    @property
    def weight(self) -> float:
        return self.model[0].weight[0, 0].item()

    @property
    def statistics(self) -> tuple[float, float, int]:
        norm = self.norm
        return float(norm.running_mean[0]), float(norm.running_var[0]), int(norm.num_batches_tracked)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said of buffers."""
    return lambda: [record.getMessage() for record in caplog.records if "buffers" in record.getMessage()]


def average(*peers: Peer) -> None:
    for peer in peers:
        peer.begin()
    for peer in peers:
        peer.finish()
    assert [peer.weight for peer in peers] == [0.5] * len(peers), "they have met"


AVERAGE = (pytest.approx(70000.5), pytest.approx(5e-10), 20)


@pytest.mark.parametrize("codec", ["none", "float16", "uniform8bit"])
def test_a_round_averages_statistics_and_takes_the_largest_count(make_peer: Callable[..., Peer], codec: str) -> None:
    peers = [make_peer(compression=codecs.codec(name)) for name in (codec, "none")]
    average(*peers)
    assert peers[0].statistics == peers[1].statistics == AVERAGE


def test_so_it_does_by_processes(start_peer: Callable[..., Peer]) -> None:
    peers = [start_peer(compression=codecs.codec("uniform8bit")), start_peer()]
    average(*peers)
    assert peers[0].statistics == peers[1].statistics == AVERAGE


def test_what_batches_add_while_a_round_is_under_way_is_kept(make_peer: Callable[..., Peer]) -> None:
    peers = [make_peer(), make_peer()]
    for peer in peers:
        peer.begin()
    peers[0].norm.running_mean += 100
    peers[0].norm.num_batches_tracked += 15
    for peer in peers:
        peer.finish()
    assert peers[0].statistics == (pytest.approx(70100.0), *AVERAGE[1:2], 25)
    assert peers[1].statistics == AVERAGE


def test_with_tensors_that_are_reused_as_with_an_offloaded_optimizer(make_peer: Callable[..., Peer]) -> None:
    peers = [make_peer(reuse_tensors=True), make_peer()]
    average(*peers)
    assert peers[0].statistics == peers[1].statistics == AVERAGE


def test_one_that_only_helps_changes_nothing(make_peer: Callable[..., Peer]) -> None:
    """Its own count is the larger one, and counts for nothing."""
    training, helper = make_peer(), make_peer(auxiliary=True)
    before = training.statistics
    for peer in (training, helper):
        peer.begin()
    for peer in (training, helper):
        peer.finish()
    assert training.statistics == before
    assert [peer.averager.why_buffers_skipped for peer in (training, helper)] == [None, None]


def test_buffers_of_other_shapes_are_left_alone(make_peer: Callable[..., Peer], said: Callable[[], list[str]]) -> None:
    peers = [make_peer(), make_peer(more={"statistic": torch.zeros(2)})]
    average(*peers)
    assert [peer.norm.running_mean[0].item() for peer in peers] == [70000, 70001]
    assert len(said()) == 2
    assert all("not averaged: a peer takes part whose model has buffers of other shapes" in one for one in said())


def test_one_whose_module_changes_their_shapes_leaves_them_out_from_then_on(
    make_peer: Callable[..., Peer], said: Callable[[], list[str]]
) -> None:
    changed, other = make_peer(more={"queue": torch.zeros(1)}), make_peer(more={"queue": torch.zeros(1)})
    average(changed, other)
    changed.norm.queue = torch.ones(3)
    average(changed, other)  # their search has begun before that is seen
    changed.norm.running_mean += 1
    before = changed.statistics, other.statistics
    average(changed, other)
    assert (changed.statistics, other.statistics) == before
    assert any("the module has given one of them another shape" in one for one in said())
    assert changed.norm.queue.tolist() == [1, 1, 1]


@pytest.mark.parametrize("first", [True, False])
def test_one_that_leaves_its_own_alone_leaves_the_others_alone_too(
    make_peer: Callable[..., Peer], said: Callable[[], list[str]], first: bool
) -> None:
    peers = [make_peer(with_buffers=first), make_peer(with_buffers=not first)]
    before = [peer.statistics for peer in peers]
    average(*peers)
    average(*peers)
    assert [peer.statistics for peer in peers] == before
    (once,) = said()
    assert "not averaged: a peer takes part whose model has none, or that has average_buffers=False" in once


def test_with_a_peer_of_plain_hivemind_they_are_left_out_and_that_is_said_once(
    start_peer: Callable[..., Peer], said: Callable[[], list[str]]
) -> None:
    ours = start_peer()
    plain = start_peer(kind=upstream.TrainingStateAverager, with_buffers=False)
    before = ours.statistics, plain.statistics
    average(ours, plain)
    average(ours, plain)
    assert (ours.statistics, plain.statistics) == before
    (once,) = said()
    assert "not averaged: a peer of plain hivemind takes part" in once
    assert "plain hivemind" in str(ours.averager.why_buffers_skipped)


class TestDownload:
    def test_a_newcomer_begins_with_them_exactly(
        self, make_peer: Callable[..., Peer], eventually: Callable[..., None]
    ) -> None:
        giver, newcomer = make_peer(), make_peer(state_compression=codecs.Float16Compression())
        giver.averager.allow_state_sharing = True
        giver.fill(7.0)
        giver.averager.local_epoch = 3
        download(newcomer, 3, eventually)
        assert newcomer.statistics == giver.statistics
        assert newcomer.weight == 7.0

    def test_from_plain_hivemind_it_keeps_its_own_and_says_so(
        self, start_peer: Callable[..., Peer], said: Callable[[], list[str]], eventually: Callable[..., None]
    ) -> None:
        giver = start_peer(kind=upstream.TrainingStateAverager, with_buffers=False, allow_state_sharing=True)
        newcomer = start_peer()
        giver.fill(7.0)
        giver.averager.local_epoch = 3
        before = newcomer.statistics
        download(newcomer, 3, eventually)
        assert (newcomer.weight, newcomer.statistics) == (7.0, before)
        (once,) = said()
        assert "has none that fit this module, which keeps its own" in once

    def test_one_without_takes_all_else(self, make_peer: Callable[..., Peer], eventually: Callable[..., None]) -> None:
        self._take_all_else(make_peer, TrainingStateAverager, eventually)

    def test_one_of_plain_hivemind_takes_all_else(
        self, start_peer: Callable[..., Peer], eventually: Callable[..., None]
    ) -> None:
        self._take_all_else(start_peer, upstream.TrainingStateAverager, eventually)

    def _take_all_else(self, make_peer: Callable[..., Peer], kind: type, eventually: Callable[..., None]) -> None:
        giver, newcomer = make_peer(allow_state_sharing=True), make_peer(kind=kind, with_buffers=False)
        giver.fill(7.0)
        next(iter(giver.optimizer.state.values()))["momentum_buffer"].fill_(5.0)
        giver.averager.local_epoch = 3
        before = newcomer.statistics
        download(newcomer, 3, eventually)
        assert (newcomer.weight, newcomer.statistics) == (7.0, before)
        assert float(next(iter(newcomer.optimizer.state.values()))["momentum_buffer"].mean()) == 5.0


def download(peer: Peer, epoch: int, eventually: Callable[..., None]) -> None:
    def done() -> bool:
        peer.averager.load_state_from_peers(timeout=20)
        return bool(peer.averager.local_epoch == epoch)

    eventually(done)


def test_a_model_without_any_says_to_its_group_what_it_always_did(make_peer: Callable[..., Peer]) -> None:
    peers = [make_peer(with_buffers=False), make_peer(with_buffers=False)]
    average(*peers)
    assert peers[0].averager.why_buffers_skipped is None
