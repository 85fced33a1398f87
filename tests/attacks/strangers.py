"""Strangers who hold the addresses of a private swarm, the name of its run and its model, and not its secret."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from attacks.case import Attack, Outcome
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from lightning import Callback
from tiny import LOOPBACK, PacedModel, loader, trainer

import hivenb
from hivenb.engine.network.daemon import TiedP2P
from hivenb.engine.network.dht import DHT
from hivenb.strategy import HivemindStrategy

RUN_ID, TARGET = "attacked", 64

#: Who answers in a run, by the ends of their names.
AVERAGERS = {"state_averager": TrainingStateAverager, "grad_averager": GradientAverager}

#: Seconds for which a stranger keeps trying.
TRIES = 8.0

_ENDS = (P2PHandlerError, P2PDaemonError, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError)


def without_guard() -> None:
    """Swarms are private by name alone."""
    admit_only = TiedP2P.admit_only
    TiedP2P.admit_only = lambda self, *_: admit_only(self, None)  # type: ignore[method-assign]


@contextmanager
def victim() -> Iterator[hivenb.TrainingRun]:
    """A run that trains in a private swarm."""
    with hivenb.Swarm("victim") as swarm:
        options = hivenb.Options(target_batch_size=TARGET, run_id=RUN_ID, matchmaking_time=2.0, averaging_timeout=10.0)
        run = hivenb.TrainingRun(PacedModel(), loader(), swarm=swarm, options=options, accelerator="cpu")
        run.start()
        if not run.wait(epochs=2, timeout=60):
            raise RuntimeError("the victim does not train")
        yield run


def download_state() -> Outcome:
    """Ask each averager of the victim for its state."""

    async def ask(swarm: hivenb.Swarm) -> int:
        p2p = await P2P.create(initial_peers=swarm.addresses, host_maddrs=LOOPBACK["host_maddrs"])
        victim_id, received, end = PeerID.from_base58(swarm.peer_id), 0, time.monotonic() + TRIES
        try:
            while not received and time.monotonic() < end:
                for name, kind in AVERAGERS.items():
                    stub = kind.get_stub(p2p, victim_id, namespace=f"{RUN_ID}_{name}")
                    with suppress(*_ENDS):
                        async for part in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
                            received += part.ByteSize()
                await asyncio.sleep(0.2)
        finally:
            await p2p.shutdown()
        return received

    with victim() as run:
        received = asyncio.run(ask(run.swarm))
    return Outcome(received == 0, f"{received} bytes of the state")


def _stranger(swarm: hivenb.Swarm) -> DHT:
    return DHT(initial_peers=list(swarm.addresses), ensure_bootstrap_success=False, start=True, **LOOPBACK)


def use_dht() -> Outcome:
    """Read who trains, and write a record that the victim finds."""
    with victim() as run:
        stranger = _stranger(run.swarm)
        try:
            read, written, end = 0, 0, time.monotonic() + TRIES
            while not (read and written) and time.monotonic() < end:
                found = stranger.get(f"{RUN_ID}_progress", latest=True)
                read = 0 if found is None else len(found.value)
                stranger.store("a note", "I was here", expiration_time=get_dht_time() + 60)
                written = int(run.swarm.dht.get("a note", latest=True) is not None)
        finally:
            stranger.shutdown()
    return Outcome(not read and not written, f"{read} records read, {written} written")


class _Until(Callback):
    """Ends training after some seconds, or as soon as it has come to something."""

    def __init__(self, done: Any):
        self._done, self._end = done, time.monotonic() + 2 * TRIES

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = self._done() or time.monotonic() > self._end


def join_group() -> Outcome:
    """Train along, with the victim's run, model and settings."""

    def largest(run: hivenb.TrainingRun) -> int:
        groups = run.history.snapshot().series.get("group_size")
        return 1 if groups is None else int(groups.highs.max())

    with victim() as run:
        stranger = _stranger(run.swarm)
        try:
            strategy = HivemindStrategy(TARGET, RUN_ID, matchmaking_time=2.0, averaging_timeout=10.0, dht=stranger)
            until = _Until(lambda: largest(run) > 1)
            trainer(strategy, max_epochs=-1, callbacks=[until]).fit(PacedModel(), loader())
        finally:
            stranger.shutdown()
        size, epochs = largest(run), run.status.epoch
    return Outcome(size == 1, f"{size - 1} strangers in the groups of {epochs} epochs")


ATTACKS = [
    Attack(
        "stranger-downloads-the-state",
        "somebody without the secret asks the averagers of a peer for its parameters",
        without_guard,
        download_state,
    ),
    Attack(
        "stranger-uses-the-dht",
        "somebody without the secret reads the records of a run, and writes one",
        without_guard,
        use_dht,
    ),
    Attack(
        "stranger-joins-a-group",
        "somebody without the secret trains along in a run whose name and model he knows",
        without_guard,
        join_group,
    ),
]
