"""Peers that come, die and fall silent at any moment: whatever happens, those that are there average together again."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tiny import DELAYS

from strategy.peers import Peer, Start, cut_off, kill, meet, stop

#: Nobody can wait out such deadlines within a test, nor until the last report of one that has gone expires. Only who
#: neither reports nor answers is given up sooner.
STRATEGY: dict[str, Any] = {
    "matchmaking_time": 150.0,
    "averaging_timeout": 300.0,
    "next_chunk_timeout": 5.0,
    "tracker_opts": {"metadata_expiration": 120.0},
}
EVENTS = 6


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("delays", [{}, DELAYS], ids=["synchronous", "all delays"])
def test_whoever_is_there_averages_together_again(start_peer: Start, delays: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    model = {"optimizer": torch.optim.SGD, "lr": 0.01}
    settings = {"epochs": None, "target": 256, "model": model, "strategy": {**STRATEGY, **delays}}
    in_client_mode = {**settings, "strategy": {**settings["strategy"], "client_mode": True}}
    nodes: list[Peer] = [start_peer(0, settings)]
    clients: list[Peer] = []
    addresses = nodes[0].wait_until(lambda: nodes[0].addresses, "its addresses")
    nodes += [start_peer(number, settings, addresses=addresses) for number in (1, 2)]
    meet(nodes, 0)
    with ExitStack() as silent:
        for number in range(3, 3 + EVENTS):
            doomed = chance.choice([*nodes[1:], *clients])  # the first one lives, and knows all that are told to stop
            time.sleep(chance.uniform(0.0, 2.0))
            if chance.random() < 1 / 3:
                silent.enter_context(cut_off(doomed))
            else:
                kill(doomed, whole_tree=chance.random() < 0.5)
            (nodes if doomed in nodes else clients).remove(doomed)
            if chance.random() < 1 / 3 or len(nodes) == 1:
                meet_if_not_alone([*nodes, *clients])
            kind = clients if chance.random() < 1 / 3 and len(nodes) > 1 else nodes
            kind.append(start_peer(number, in_client_mode if kind is clients else settings, addresses=addresses))
            meet_if_not_alone([*nodes, *clients])
        stop([*nodes, *clients])


def meet_if_not_alone(peers: list[Peer]) -> None:
    if len(peers) > 1:
        meet(peers, max((one.moments[-1].epoch for one in peers if one.moments), default=0))
