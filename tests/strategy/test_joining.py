"""Peers that come late, fall behind, leave, and go on from a file: each ends with the swarm's state, all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import DELAYS, TinyModel, loader, trainer
from torch.optim.lr_scheduler import ExponentialLR

from strategy.peer import Moment
from strategy.peers import Peer, Start, meet, met, stop, train_all

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

RATE, GAMMA = 0.05, 0.9

#: Train until told to stop, each on data of its own, with an optimizer and a scheduler that have a state.
SETTINGS: dict[str, Any] = {
    "epochs": None,
    "model": {"optimizer": torch.optim.AdamW, "lr": RATE, "weight_decay": 0.1},
    "strategy": {"scheduler_fn": partial(ExponentialLR, gamma=GAMMA), "averaging_timeout": 8.0},
}


def assert_agree(peers: list[Peer], epoch: int) -> None:
    """All that a peer has is the same in all of them after that epoch."""
    first, *others = [met(one, epoch, len(peers))[epoch] for one in peers]
    assert first.rate == pytest.approx(RATE * GAMMA**epoch)
    for other in others:
        for mine, theirs in zip(first.parameters, other.parameters, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert other.rate == pytest.approx(first.rate)
        assert_same_statistics(first, other)


def come_to_agree(peers: list[Peer], since: int) -> None:
    """Waits until they agree, and do so in the next epoch, too."""

    def agree(epoch: int) -> bool:
        try:
            assert_agree(peers, epoch)
        except AssertionError:
            return False
        return True

    meet(peers, since, agree)


def assert_same_statistics(first: Moment, second: Moment) -> None:
    for mine, theirs in zip(first.statistics, second.statistics, strict=True):
        assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], atol=1e-5)


def assert_begins_as(peer: Peer, saved: Moment) -> None:
    begun = peer.begun()
    assert begun.epoch == saved.epoch
    assert begun.rate == saved.rate == pytest.approx(RATE * GAMMA**saved.epoch)
    for mine, theirs in zip(begun.parameters, saved.parameters, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert_same_statistics(begun, saved)


def test_a_late_peer_gets_the_state_and_gets_it_again_when_it_has_fallen_behind(start_peer: Start) -> None:
    first = start_peer(0, SETTINGS)
    ahead = first.wait_for_epoch(3).epoch
    late = start_peer(1, SETTINGS, addresses=first.addresses)
    come_to_agree([first, late], ahead)
    assert late.since(0)[0].epoch > ahead, "it makes no epoch of its own before it has the state"

    late.tell("pause")
    first.wait_for_epoch(late.moments[-1].epoch + 4)
    late.tell("go")
    come_to_agree([first, late], first.moments[-1].epoch)
    stop([first, late])


def test_a_run_goes_on_from_the_file_of_its_last_peer(start_peer: Start, tmp_path: Path) -> None:
    """It resumes alone; then come one that knows nothing, and one with the file, which is outdated by now."""
    (last,) = train_all(start_peer, {**SETTINGS, "epochs": 2, "save": tmp_path / "saved"})
    saved = last.moments[-1]
    assert saved.epoch == 2
    from_file = {**SETTINGS, "resume": tmp_path / "saved.ckpt"}
    resumed = start_peer(1, from_file)
    assert_begins_as(resumed, saved)
    ahead = resumed.wait_for_epoch(5).epoch
    outdated = start_peer(2, from_file, addresses=resumed.addresses)
    newcomer = start_peer(3, SETTINGS, addresses=resumed.addresses)
    peers = [resumed, outdated, newcomer]
    come_to_agree(peers, ahead)
    stop(peers)
    assert_begins_as(outdated, saved)
    assert newcomer.begun().epoch == 0
    for one in (outdated, newcomer):
        assert one.since(0)[0].epoch > ahead


def test_a_peer_that_joins_gets_the_weights_of_a_file_of_plain_lightnings(start_peer: Start, tmp_path: Path) -> None:
    """Also before the first step: it does not average its untrained ones into them."""
    model = TinyModel(lr=0.0)
    with torch.no_grad():
        model.layer.weight.fill_(5.0)
    plain = trainer("auto", max_epochs=1)
    plain.fit(model, loader(64, 16))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    settings = {"epochs": 3, "model": {"lr": 0.0}}
    peers = train_all(start_peer, {**settings, "resume": tmp_path / "plain.ckpt"}, settings)
    for one in peers:
        for mine, theirs in zip(one.parameters, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_late_peers_join_while_everything_is_averaged_in_the_background(start_peer: Start) -> None:
    settings = {**SETTINGS, "target": 256, "strategy": {**SETTINGS["strategy"], **DELAYS}}
    first = start_peer(0, settings)
    ahead = first.wait_for_epoch(2).epoch
    peers = [first, *(start_peer(number, settings, addresses=first.addresses) for number in (1, 2))]
    together = meet(peers, ahead)
    for one in peers:
        one.wait_for_epoch(together + 3, group_size=3)
    stop(peers)
