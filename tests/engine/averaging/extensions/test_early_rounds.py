"""The state in a round before the step of its epoch, where all in the group offer that, and after it where not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from averager_of_two import averager_of_two
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression
from hivemind.optim import state_averager as upstream
from torch import nn

from hivenb.engine.averaging import state_averager
from hivenb.engine.averaging.averager import ALONE_AFTER
from hivenb.engine.averaging.extensions import early_rounds
from hivenb.engine.averaging.extensions.buffers import ModuleBuffers
from hivenb.engine.averaging.extensions.early_rounds import LONG_ROUND, EarlyRounds
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.matchmaking.matchmaking import ExpectedPeers

#: The parameters of two peers before the step, and the gradients of each: averaged before it, they are 1.5 less these;
#: after it, 1.5 less the mean of these.
BEFORE, GRADIENTS = (1.0, 2.0), (0.25, 0.75)

#: Seconds that a round may take.
PATIENCE = 60.0


class Peer:
    """A parameter, and an averager of its state."""

    def __init__(
        self,
        number: int,
        dht: Any,
        run_id: str,
        kind: type = TrainingStateAverager,
        has_buffers: bool = True,
        **options: Any,
    ):
        self.model = nn.BatchNorm1d(1, affine=False)
        self.parameter = nn.Parameter(torch.full((3,), BEFORE[number]))
        self.model.running_mean.fill_(10.0 * BEFORE[number])
        self.parameter.grad = torch.full((3,), GRADIENTS[number])
        if kind is TrainingStateAverager and has_buffers:
            options["module_buffers"] = ModuleBuffers(self.model)
        self.averager = averager_of_two(
            kind,
            optimizer=partial(torch.optim.SGD, lr=1.0),
            params=[self.parameter],
            dht=dht,
            prefix=run_id,
            **options,
        )

    def look_for_others(self, **kwargs: Any) -> Any:
        if kwargs.get("offers_early"):
            self.averager.be_ready_early()
        self.round = self.averager.schedule_step(gather=1, timeout=PATIENCE, **kwargs)
        return self.round

    def exchange_early(self) -> None:
        self.averager.exchange_early(self.round, PATIENCE)

    def end_epoch(self) -> None:
        self.averager.step(
            increment_epoch=True,
            optimizer_step=True,
            averaging_round=True,
            averaging_control=None if getattr(self.averager, "has_begun_early", False) else self.round,
            averaging_opts={"timeout": PATIENCE},
        )

    @property
    def value(self) -> float:
        return float(self.parameter[0])


def at_the_same_time(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("has_met", [True, False], ids=["met before", "meets after"])
def test_what_all_offer_is_averaged_before_the_step(
    make_peer: Callable[..., Peer], eventually: Callable[..., None], offloaded: bool, has_met: bool
) -> None:
    peers = [make_peer(offload_optimizer=offloaded) for _ in BEFORE]
    for peer in peers if has_met else peers[:1]:
        peer.look_for_others(offers_early=True)
    if has_met:
        eventually(lambda: all(peer.round.stage is AveragingStage.AWAITING_TRIGGER for peer in peers))
    peers[0].exchange_early()
    if not has_met:
        peers[1].look_for_others(offers_early=True)
    peers[1].exchange_early()
    for peer in peers:
        assert len(peer.round.result(PATIENCE)) == 2
        assert peer.value == BEFORE[peers.index(peer)], "the model has nothing of it until its step"
    for peer, gradient in zip(peers, GRADIENTS, strict=True):
        peer.end_epoch()
        assert peer.value == pytest.approx(1.5 - gradient)
        assert float(peer.model.running_mean) == pytest.approx(15.0), "the statistics, too"
        assert peer.averager.local_epoch == 1


@pytest.mark.parametrize("offloaded", [False, True])
def test_without_buffers_it_is_averaged_as_soon_as_all_have_met(
    make_peer: Callable[..., Peer], offloaded: bool
) -> None:
    peers = [make_peer(has_buffers=False, offload_optimizer=offloaded) for _ in BEFORE]
    for peer in peers:
        peer.look_for_others(offers_early=True)
    for peer in peers:
        assert len(peer.round.result(PATIENCE)) == 2, "nobody has told it to begin"
        assert peer.round.let_begin_at is not None, "how long it takes is known as well"
        assert peer.round.is_to_come, "the step takes it over"
        assert peer.value == BEFORE[peers.index(peer)], "the model has nothing of it until its step"
    for peer, gradient in zip(peers, GRADIENTS, strict=True):
        peer.exchange_early()
        peer.end_epoch()
        assert peer.value == pytest.approx(1.5 - gradient)
        assert peer.averager.local_epoch == 1


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("step_alike", [True, False])
def test_peers_that_step_differently_average_after_the_step_again_where_that_is_quick(
    make_peer: Callable[..., Peer], step_alike: bool, offloaded: bool
) -> None:
    """As after local updates, which leave them with different moments: their parameters are to be the same."""
    peers = [make_peer(has_buffers=False, offload_optimizer=offloaded) for _ in BEFORE]
    cost_little = []
    for _ in range(3):  # they begin with different parameters
        for peer in peers:
            peer.look_for_others(offers_early=True)
        for peer, gradient in zip(peers, GRADIENTS, strict=True):
            peer.parameter.grad = torch.full((3,), 0.5 if step_alike else gradient)
            if offloaded:
                for own in peer.averager.optimizer.param_groups[0]["params"]:
                    own.grad = peer.parameter.grad
            peer.exchange_early()
            peer.end_epoch()
        cost_little.append([peer.averager.costs_little_early for peer in peers])
        assert [not peer.averager.peers_step_differently for peer in peers] == cost_little[-1]
    assert cost_little == [[True] * 2, [step_alike] * 2, [step_alike] * 2]


def test_what_is_small_is_known_without_a_copy_of_the_statistics(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be on a GPU, and are not averaged."""
    peer = make_peer(has_buffers=False)

    def dump(optimizer: Any) -> Any:
        raise AssertionError("a copy of all statistics")

    monkeypatch.setattr("hivenb.engine.averaging.state_averager.dump_optimizer_state", dump)
    assert peer.averager.costs_little_early
    monkeypatch.setattr(early_rounds, "MOST_BESIDE_GRADIENTS", 2)  # of three numbers
    assert not peer.averager.costs_little_early


def test_of_a_large_model_some_numbers_show_how_it_steps(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_averager, "MOST_BESIDE_GRADIENTS", 2)  # of three numbers
    peer = make_peer(has_buffers=False)
    shares = []
    for number in (2, 1):
        with peer.averager.get_tensors() as averaged:
            averaged[0][number] += 1.0
        shares.append(peer.averager._share_averaged())
    assert shares[0] == 0.0
    assert shares[1] > 0.1


def test_a_difference_by_a_codec_is_not_one_of_steps(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(has_buffers=False, compression=Float16Compression())
    for _ in range(2):
        peer.averager._early.note_difference(1e-3)
    assert peer.averager._early.peers_differ
    assert not peer.averager.peers_step_differently


def test_it_is_tried_again_after_a_while() -> None:
    early = EarlyRounds(at_once=True)
    for share in (1.0, 0.0, 1.0, 1.0):
        assert early.costs_little(100)
        early.note_difference(share)
    offered = []
    while not early.costs_little(100):
        early.offer(False)
        offered.append(False)
    assert 16 <= len(offered) <= 256


class TestHowLongRoundsTake:
    """After the step, by the quickest of the latest three."""

    @staticmethod
    def meet(peers: Sequence[Peer], eventually: Callable[..., None], late: float = 0.0, **kwargs: Any) -> None:
        """Hold a round after the step, in which the second peer comes so many seconds late."""
        for peer in peers:
            peer.look_for_others(**kwargs)
        eventually(lambda: all(peer.round.stage is AveragingStage.AWAITING_TRIGGER for peer in peers))

        def dawdle(peer: Peer) -> None:
            if late and peer is peers[1]:
                eventually(lambda: peers[0].round.let_begin_at is not None)
                time.sleep(late)
            peer.end_epoch()

        at_the_same_time(*(partial(dawdle, peer) for peer in peers))

    def test_three_that_took_long_make_a_long_one(
        self, make_peer: Callable[..., Peer], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peers = [make_peer(has_buffers=False) for _ in BEFORE]
        meet = partial(self.meet, peers, eventually)
        for _ in range(2):
            meet(late=2 * LONG_ROUND)
        for peer in peers:
            peer.look_for_others()
            peer.round.cancel()  # which says nothing of the line
        meet(late=2 * LONG_ROUND, is_waited_for=False)
        assert not peers[0].averager.rounds_take_long
        meet(late=2 * LONG_ROUND)
        eventually(lambda: peers[0].averager.rounds_take_long)
        monkeypatch.setattr(early_rounds, "LONG_ROUND", 60.0)
        assert not peers[0].averager.rounds_take_long

    def test_the_search_for_a_group_does_not_count(self, make_peer: Callable[..., Peer]) -> None:
        peer = make_peer(has_buffers=False)
        control = peer.look_for_others()
        control.allow_allreduce()
        assert control.let_begin_at is None
        control.cancel()

    def test_with_buffers_they_may_take_as_long_as_they_like(
        self, make_peer: Callable[..., Peer], eventually: Callable[..., None]
    ) -> None:
        """They would travel beside the gradients, and make these take longer by as much."""
        peers = [make_peer() for _ in BEFORE]
        for _ in range(3):
            self.meet(peers, eventually, late=2 * LONG_ROUND)
        assert not peers[0].averager.rounds_take_long

    def test_who_offers_in_vain_does_so_no_more(
        self, make_peer: Callable[..., Peer], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(early_rounds, "LONG_ROUND", 0.0)
        peers = [make_peer(has_buffers=False) for _ in BEFORE]
        for _ in range(3):
            self.meet(peers, eventually)
        eventually(lambda: all(peer.averager.rounds_take_long for peer in peers))
        peers[0].look_for_others(offers_early=True)
        peers[1].look_for_others()
        peers[0].exchange_early()
        at_the_same_time(*(peer.end_epoch for peer in peers))
        assert [peer.averager.rounds_take_long for peer in peers] == [False, True]


def test_so_it_is_by_processes(start_peer: Callable[..., Peer]) -> None:
    """What is agreed on in their processes is known here."""
    peers = [start_peer(offload_optimizer=True) for _ in BEFORE]
    for peer in peers:
        peer.look_for_others(offers_early=True)
    for peer in peers:
        peer.exchange_early()
    for peer, gradient in zip(peers, GRADIENTS, strict=True):
        peer.end_epoch()
        assert peer.value == pytest.approx(1.5 - gradient)
        assert float(peer.model.running_mean) == pytest.approx(15.0)


def test_a_large_state_is_not_exchanged_beside_the_gradients(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_buffers, without = make_peer(), make_peer(has_buffers=False)
    assert with_buffers.averager.may_begin_early
    monkeypatch.setattr(early_rounds, "MOST_BESIDE_GRADIENTS", 2)
    assert not with_buffers.averager.may_begin_early
    assert without.averager.may_begin_early, "it is exchanged before them"


def test_with_one_that_has_buffers_and_one_that_has_none_it_is_averaged_after_the_step(
    make_peer: Callable[..., Peer],
) -> None:
    peers = [make_peer(has_buffers=has) for has in (True, False)]
    for peer in peers:
        peer.look_for_others(offers_early=True)
    for peer in peers:
        peer.exchange_early()
    at_the_same_time(*(peer.end_epoch for peer in peers))
    assert peers[0].value == peers[1].value == pytest.approx(1.0)


def test_what_was_offered_before_counts_for_no_round_that_nobody_has_scheduled(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer()
    peer.look_for_others(offers_early=True)
    assert list(peer.averager._early.fields()) != []
    peer.round.cancel()
    peer.averager._step_or_raise = lambda **_: None  # it would look for others
    peer.averager.step(increment_epoch=True, optimizer_step=True, averaging_round=True)
    assert list(peer.averager._early.fields()) == []
    del peer.averager._step_or_raise


def test_with_one_that_does_not_offer_it_is_averaged_after_the_step(make_peer: Callable[..., Peer]) -> None:
    offering, other = make_peer(), make_peer()
    offering.look_for_others(offers_early=True)
    other.look_for_others()
    offering.exchange_early()
    at_the_same_time(offering.end_epoch, other.end_epoch)
    assert offering.value == other.value == pytest.approx(1.0)


def test_with_plain_hivemind_it_is_averaged_after_the_step(start_peer: Callable[..., Peer]) -> None:
    offering, plain = start_peer(), start_peer(kind=upstream.TrainingStateAverager)
    offering.look_for_others(offers_early=True)
    plain.look_for_others()
    offering.exchange_early()
    at_the_same_time(offering.end_epoch, plain.end_epoch)
    assert offering.value == plain.value == pytest.approx(1.0)


def test_a_round_that_is_given_up_keeps_nobody(make_peer: Callable[..., Peer], eventually: Callable[..., None]) -> None:
    alone = make_peer()
    alone.look_for_others(offers_early=True)
    eventually(lambda: alone.round.stage is AveragingStage.LOOKING_FOR_GROUP, PATIENCE)
    alone.exchange_early()
    alone.averager.give_up_searches()
    alone.averager.step(increment_epoch=True, optimizer_step=True)
    assert alone.value == pytest.approx(BEFORE[0] - GRADIENTS[0])
    assert not alone.averager.has_begun_early


def test_a_round_that_is_due_does_not_wait_for_one_that_is_excluded(
    make_peer: Callable[..., Peer], eventually: Callable[..., None]
) -> None:
    excluded = ExpectedPeers(frozenset(), excluded=frozenset({b"somebody"}))
    alone = make_peer(has_buffers=False)
    alone.look_for_others(offers_early=True)
    eventually(lambda: alone.round.stage is AveragingStage.LOOKING_FOR_GROUP, PATIENCE)
    for _ in range(ALONE_AFTER):
        alone.averager.expect_peers(excluded)
    assert not alone.round.done(), "it may come, as long as all compute"
    alone.exchange_early()
    alone.averager.expect_peers(excluded)
    assert alone.round.cancelled()


def test_nobody_waits_for_one_that_is_excluded_and_has_gone(
    make_peer: Callable[..., Peer], eventually: Callable[..., None]
) -> None:
    who = frozenset({b"somebody"})
    alone = make_peer()
    alone.look_for_others(offers_early=True)
    eventually(lambda: alone.round.stage is AveragingStage.LOOKING_FOR_GROUP, PATIENCE)
    for _ in range(ALONE_AFTER):
        alone.averager.expect_peers(ExpectedPeers(frozenset(), gone=who, excluded=who))
    assert alone.round.cancelled()
