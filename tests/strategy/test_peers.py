"""Real peers, each a process with a plain Trainer: they meet and agree."""

from __future__ import annotations

import logging

import pytest
from hivemind.utils import get_dht_time
from tiny import DELAYS, LOOPBACK, TinyModel, loader, trainer

from hivenb.engine.process.known_process import wait_for_exit
from hivenb.strategy import HivemindStrategy
from strategy.peers import Swarm, difference


@pytest.mark.slow
def test_three_agree_in_the_end_with_everything_in_background_and_float16(train_together: Swarm) -> None:
    settings = {
        "target": 96,
        "epochs": 4,
        "model": {"lr": 0.05},
        "strategy": {**DELAYS, "grad_compression": "float16", "state_averaging_compression": "float16"},
    }
    peers = train_together(*(settings,) * 3)
    untrained = [p.detach() for p in TinyModel().parameters()]
    way = difference(peers[0].parameters, untrained)
    assert way > 0.1
    for other in peers[1:]:
        # whoever ends first is missing in the last round of the others: they are one epoch apart at most
        assert difference(peers[0].parameters, other.parameters) < way / 2


@pytest.mark.process
@pytest.mark.slow
def test_another_machine_can_join_at_what_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented way: no addresses given, its own DHT at the default ones, and INITIAL_PEERS elsewhere."""
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    own = logging.getLogger("hivenb")
    monkeypatch.setattr(own, "propagate", True)
    with caplog.at_level(logging.INFO, "hivenb"):
        strategy = HivemindStrategy(64, matchmaking_time=3.0)
        try:
            dht = strategy.dht
            said = next(r.getMessage() for r in caplog.records if "INITIAL_PEERS=" in r.getMessage())
            addresses = said.split("INITIAL_PEERS=")[1]
            assert dht.peer_id.to_base58() in addresses
            assert all("/0.0.0.0/" not in address for address in addresses.split(","))
            monkeypatch.setenv("INITIAL_PEERS", addresses)
            joiner = HivemindStrategy(64, **LOOPBACK)
            try:
                joiner.dht.store("greeting", "hello", expiration_time=get_dht_time() + 60)
                assert dht.get("greeting", latest=True).value == "hello"
            finally:
                joiner.dht.shutdown()
        finally:
            pid = strategy.dht.pid
            trainer(strategy, max_epochs=1).fit(TinyModel(), loader(64, 16))
    assert strategy.hivemind_epoch == 1
    assert wait_for_exit(pid, 10), "teardown ends it"
