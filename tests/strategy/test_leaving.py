"""A peer that dies costs the others neither a deadline nor their agreement."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest
import torch

from strategy.peers import Peer, Start, difference, stop

#: Nobody can wait out such a deadline within a test.
SETTINGS: dict[str, Any] = {
    "epochs": None,
    "target": 96,
    "model": {"optimizer": torch.optim.AdamW, "lr": 0.05},
    "strategy": {"matchmaking_time": 150.0, "averaging_timeout": 300.0},
}


def kill(peer: Peer, whole_tree: bool) -> None:
    process = psutil.Process(peer.process.pid)
    children = process.children(recursive=True) if whole_tree else []
    for one in (process, *children):
        os.kill(one.pid, signal.SIGKILL)
    peer.process.join(20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whole_tree", [True, False], ids=["all its processes", "its main process"])
def test_the_others_go_on_when_a_peer_is_killed(start_peer: Start, whole_tree: bool) -> None:
    settings = {**SETTINGS, "peers": 3}
    first = start_peer(0, settings)
    addresses = first.wait_until(lambda: first.addresses, "its addresses")
    peers = [first, *(start_peer(number, settings, addresses=addresses) for number in (1, 2))]
    for one in peers:
        one.wait_for_epoch(2, group_size=3)
    *living, victim = peers
    kill(victim, whole_tree)
    since = max(one.moments[-1].epoch for one in living) + 1
    for one in living:
        one.wait_for_epoch(since + 2, group_size=2)
    stop(living)
    common = sorted(set.intersection(*(set(one.history()) for one in living)))
    assert difference(*(one.history()[common[-1]] for one in living)) < 1e-5
