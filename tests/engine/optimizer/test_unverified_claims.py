"""Whoever claims an epoch of which nobody has a state is followed for some seconds, and then for a while not at all."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hivemind.p2p import PeerID
from in_memory.real_time import RealTimeDHT
from set_clock import Clock
from tiny import TinyModel

from hivenb.engine.optimizer import catch_up
from hivenb.engine.optimizer.catch_up import BEHIND, PAUSE_FOR_SEARCH, VERIFIED_WITHIN, UnverifiedClaims
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.engine.progress.tracker import ProgressTracker

LIAR, HONEST = (PeerID(os.urandom(32)) for _ in range(2))


@pytest.fixture
def make_optimizer(make_optimizer_in_memory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Without processes."""
    return make_optimizer_in_memory


def info(peer: PeerID, epoch: int) -> PeerInfo:
    return PeerInfo(peer.to_base58(), epoch, 0, 1.0, False, 0.0, False)


REPORTS = [info(LIAR, 10**9), info(HONEST, 12)]


def search(claims: UnverifiedClaims, clock: Clock, seconds: float, reached: int = 12) -> bool:
    """Download again and again for so long; whether somebody is doubted in the end."""
    is_doubted, end = False, clock.now + seconds
    while clock.now < end and not is_doubted:
        began = clock.now
        clock.now += 1.0
        is_doubted = claims.note_download(began, 10**9, reached, REPORTS)
    return is_doubted


def test_it_is_doubted_alone_and_it_is_said_why() -> None:
    clock = Clock()
    claims = UnverifiedClaims(clock)
    assert not search(claims, clock, VERIFIED_WITHIN - 1.0)
    assert claims.excluded_peers() == ()
    assert search(claims, clock, 2.0)
    (one,) = claims.excluded_peers()
    assert (one.peer, one.is_avoided) == (LIAR.to_bytes(), False)
    assert str(one) == "reports epoch 1000000000, of which no peer sends a state; asked again in 80 s"


def test_the_pause_grows_until_a_state_is_found() -> None:
    clock = Clock()
    claims = UnverifiedClaims(clock)
    for times in (1, 2, 4):
        assert search(claims, clock, VERIFIED_WITHIN)
        (one,) = claims.excluded_peers()
        assert one.seconds == times * PAUSE_FOR_SEARCH * VERIFIED_WITHIN
        clock.now += one.seconds
        assert claims.excluded_peers() == ()
    assert not claims.note_download(clock.now, 12, 12, REPORTS)
    assert search(claims, clock, VERIFIED_WITHIN)
    assert claims.excluded_peers()[0].seconds == PAUSE_FOR_SEARCH * VERIFIED_WITHIN


def test_a_state_that_is_a_little_behind_backs_it() -> None:
    clock = Clock()
    claims = UnverifiedClaims(clock)
    for _ in range(100):
        clock.now += 1.0
        assert not claims.note_download(clock.now - 1.0, 12 + BEHIND, 12, REPORTS)


def test_where_all_have_gone_meanwhile_nobody_is_doubted() -> None:
    claims = UnverifiedClaims(clock := Clock())
    assert claims.note_download(clock.now - VERIFIED_WITHIN, 20, 12, [])
    assert claims.excluded_peers() == ()


def test_a_peer_trains_on_beside_one_that_claims_what_nobody_has(
    make_optimizer: Callable[..., Optimizer],
    joining_memory_dht: RealTimeDHT,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
) -> None:
    """It asked for the state of that epoch for ever, and made no step."""
    monkeypatch.setattr(catch_up, "VERIFIED_WITHIN", 1.0)
    model = TinyModel()
    optimizer = make_optimizer(model.parameters())
    optimizer.begin()
    liar = ProgressTracker(joining_memory_dht, run_id, 8, private_key=joining_memory_dht.private_key, start=True)
    try:
        liar.report_local_progress(10**9, 1)
        eventually(lambda: optimizer.tracker.global_epoch == 10**9)

        def step() -> bool:
            model.training_step((torch.ones(8, 4), torch.zeros(8, 2)), 0).backward()
            optimizer.step(batch_size=8)
            optimizer.zero_grad()
            return optimizer.local_epoch >= 3

        eventually(step)
        assert optimizer.rounds.reasons[str(joining_memory_dht.peer_id)].startswith(
            "reports epoch 1000000000, of which no"
        )
    finally:
        liar.shutdown()
