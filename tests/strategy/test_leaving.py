"""A peer that dies costs the others neither a deadline nor their agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strategy.peers import Peer, Start, cut_off, difference, kill, stop

#: Nobody can wait out such a deadline within a test, nor until the last report of one that has gone expires.
SETTINGS: dict[str, Any] = {
    "epochs": None,
    "target": 96,
    "model": {"optimizer": torch.optim.AdamW, "lr": 0.05},
    "strategy": {
        "matchmaking_time": 150.0,
        "averaging_timeout": 300.0,
        "tracker_opts": {"metadata_expiration": 120.0},
    },
}


def start_three(start_peer: Start, settings: dict[str, Any], last: dict[str, Any]) -> list[Peer]:
    first = start_peer(0, settings)
    addresses = first.wait_until(lambda: first.addresses, "its addresses")
    peers = [first, start_peer(1, settings, addresses=addresses), start_peer(2, last, addresses=addresses)]
    for one in peers:
        one.wait_for_epoch(2, group_size=3)
    return peers


def assert_they_go_on(living: list[Peer]) -> None:
    since = max(one.moments[-1].epoch for one in living) + 1
    for one in living:
        one.wait_for_epoch(since + 2, group_size=2)
    stop(living)
    common = sorted(set.intersection(*(set(one.history()) for one in living)))
    assert difference(*(one.history()[common[-1]] for one in living)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("client_mode", "whole_tree"), [(False, True), (True, False)], ids=["all of a node", "main process of a client"]
)
def test_the_others_go_on_when_a_peer_is_killed(start_peer: Start, client_mode: bool, whole_tree: bool) -> None:
    settings = {**SETTINGS, "peers": 3}
    strategy = {**SETTINGS["strategy"], "client_mode": client_mode}
    *living, victim = start_three(start_peer, settings, {**settings, "strategy": strategy})
    kill(victim, whole_tree)
    assert_they_go_on(living)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_others_go_on_when_a_peer_is_cut_off(start_peer: Start) -> None:
    # in a round, somebody from whom data has arrived may be silent for as long
    settings = {**SETTINGS, "peers": 3, "strategy": {**SETTINGS["strategy"], "next_chunk_timeout": 5.0}}
    *living, victim = start_three(start_peer, settings, settings)
    with cut_off(victim):
        assert_they_go_on(living)
