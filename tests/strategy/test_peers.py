"""Real peers, each a process with a plain Trainer: they agree, and compute what one process would compute."""

from __future__ import annotations

import logging
import multiprocessing as mp
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import LOOPBACK, TinyModel, loader, samples, trainer

from hivenb.engine.processes import wait_for_exit
from hivenb.strategy import HivemindStrategy
from strategy import peer

DELAYS = {
    "offload_optimizer": True,
    "delay_state_averaging": True,
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
}


class Peer:
    """A peer in a process of its own, and what it has sent."""

    def __init__(self, number: int, count: int, initial_peers: list[str], settings: dict[str, Any]):
        self._connection, theirs = mp.Pipe()
        # spawn: as a peer that is started by hand on another machine, nothing is shared
        self.process = mp.get_context("spawn").Process(
            target=peer.train, args=(theirs, number, count, initial_peers, settings)
        )
        self.process.start()
        theirs.close()

    def receive(self, kind: str) -> Any:
        assert self._connection.poll(150), f"no {kind} came in time"
        try:
            got, value = self._connection.recv()
        except EOFError:
            self.process.join(10)
            raise AssertionError(f"a peer failed before it sent its {kind}: {self.process.exitcode}") from None
        assert got == kind
        return value

    def results(self) -> None:
        self.reports = self.receive("reports")
        history, last = self.receive("parameters")
        self.history = [[torch.from_numpy(array) for array in one] for one in history]
        self.parameters = [torch.from_numpy(array) for array in last]
        self.epoch = self.receive("epoch")
        self.process.join(30)
        assert self.process.exitcode == 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


Swarm = Callable[..., list[Peer]]


@pytest.fixture
def train_together() -> Iterator[Swarm]:
    """Trains with peers whose settings are given, and returns them when all have finished."""
    started: list[Peer] = []

    def train(*settings: dict[str, Any]) -> list[Peer]:
        addresses: list[str] = []
        for number, own in enumerate(settings):
            defaults = {"epochs": 4, "target": 64, "share": None, "model": {}, "strategy": {}}
            started.append(Peer(number, len(settings), addresses, {**defaults, **own}))
            if not addresses:
                addresses = started[0].receive("addresses")
        for one in started[1:]:
            one.receive("addresses")
        for one in started:
            one.results()
        return started

    yield train
    for one in started:
        one.end()


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def assert_they_met(peers: list[Peer]) -> None:
    for one in peers:
        sizes = [report.group_size for report in one.reports]
        assert [report.failed for report in one.reports] == [None] * len(sizes)
        assert sizes == [len(peers)] * len(sizes)


@pytest.mark.slow
def test_two_compute_what_one_computes_on_their_batches_together(train_together: Swarm) -> None:
    """Each goes over its own share of a fixed batch, as often as it gets to; samples count alike, wherever they are."""
    shares = ((0, 5), (5, 16))
    settings = {"target": 48, "epochs": 5, "model": {"lr": 0.1}}
    peers = train_together(*({**settings, "share": share} for share in shares))
    assert_they_met(peers)
    reference = TinyModel(lr=0.1)
    optimizer = reference.configure_optimizers()
    x, y = samples(16)
    for epoch in range(5):
        optimizer.zero_grad()
        counts = [one.reports[epoch].samples for one in peers]
        for (start, end), count in zip(shares, counts, strict=True):
            assert count % (end - start) == 0
            loss = torch.nn.functional.mse_loss(reference.layer(x[start:end]), y[start:end])
            (loss * count / sum(counts)).backward()
        optimizer.step()
        expected = [parameter.detach() for parameter in reference.parameters()]
        for one in peers:
            assert difference(one.history[epoch], expected) < 1e-5


@pytest.mark.slow
def test_two_agree_after_each_epoch(train_together: Swarm) -> None:
    """On different data, with an optimizer that has a state, and nothing compressed."""
    first, second = train_together(*({"model": {"optimizer": torch.optim.Adam, "lr": 0.05}},) * 2)
    assert_they_met([first, second])
    assert len(first.history) == len(second.history) == 4
    assert difference(first.history[0], [p.detach() for p in TinyModel().parameters()]) > 0.01
    for mine, theirs in zip(first.history, second.history, strict=True):
        assert difference(mine, theirs) < 1e-6


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
                joiner.dht.store("greeting", "hello", expiration_time=2e9 * 2)
                assert dht.get("greeting", latest=True).value == "hello"
            finally:
                joiner.dht.shutdown()
        finally:
            pid = strategy.dht.pid
            trainer(strategy, max_epochs=1).fit(TinyModel(), loader(64, 16))
    assert strategy.hivemind_epoch == 1
    assert wait_for_exit(pid, 10), "teardown ends it"
