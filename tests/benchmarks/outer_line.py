"""How much sooner peers on slow lines reach the same loss with an outer optimizer than synchronously.

Two peers, each on a host of its own in the simulated internet (``tests/network``) with a line of 10 Mbit/s and 100 ms
there and back, train the text task with some ten million parameters, from the same start: first synchronously, in half
precision, for so many updates; then by DiLoCo, until it has reached the loss that the former had at its best. The loss
is that of what both have just agreed on, for some batches of the validation text; looking at it counts for neither.
Nothing is averaged in the background: there would be no such moment. ``time_to_loss.py --outer`` runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_peer import PATIENCE, QUIET, Work, begin
from lightning import Callback, LightningModule, Trainer
from places import Line, places
from swarm_bench import Peer, say, starting, table, write_json

from hivenb import HivemindStrategy, compression, tasks

LINE = Line(delay=0.025, jitter=0.002, up=10e6, down=10e6)

#: Of the model: some 10 million parameters in one block, so that what is computed on a core is little beside them.
CONTEXT, WIDTH, LEARNING_RATE = 8, 896, 1e-3

#: Samples of an update of both peers; an outer optimizer makes one when each has made 64 steps of its own.
SYNCHRONOUS, OUTER = 512, 4096

#: Batches of the validation text of which the loss is the mean.
LOOKED_AT = 16

#: Seconds that DiLoCo may take to come as far.
LONGEST = 1800.0


@dataclass(frozen=True)
class Look:
    """At the loss, after an update.

    :param seconds: of training until then
    :param samples: of all peers
    :param loss: in nats per character
    """

    seconds: float
    samples: int
    loss: float


class LooksAtLoss(Callback):
    """Waits for the other peer, tells of the loss after each update of the swarm, and stops when told to."""

    def __init__(self, connection: Any, strategy: HivemindStrategy, target: int, batches: Sequence[Any]):
        self._connection, self._strategy, self._target, self._batches = connection, strategy, target, batches
        self._epoch, self._began = 0, 0.0
        self._spent_looking = 0.0

    def on_train_batch_start(self, trainer: Trainer, model: LightningModule, batch: Any, batch_idx: int) -> None:
        end = time.monotonic() + PATIENCE
        while not self._began and self._strategy.num_peers < 2:
            if time.monotonic() > end:
                raise TimeoutError(f"no other peer within {PATIENCE} s")
            time.sleep(0.02)
        self._began = self._began or time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, model: Any, *args: Any) -> None:
        if self._connection.poll() and self._connection.recv() == "stop":
            trainer.should_stop = True
        if self._strategy.hivemind_epoch == self._epoch:
            return
        self._epoch, began = self._strategy.hivemind_epoch, time.monotonic()
        loss = loss_of(model, self._batches)
        look = Look(began - self._began - self._spent_looking, self._epoch * self._target, loss)
        self._spent_looking += time.monotonic() - began
        self._connection.send((f"look {self._epoch}", look))


@torch.no_grad()
def loss_of(model: Any, batches: Sequence[Any]) -> float:
    model.eval()
    losses = [torch.nn.functional.cross_entropy(*model.predict_and_target(batch)) for batch in batches]
    model.train()
    return float(torch.stack(losses).mean())


def learning(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Train the text task until told to stop.

    :param count: the number of this peer, from which the order of its batches follows
    """
    begin(folder, work.place)
    options = dict(work.strategy)
    sizes = options.pop("sizes")
    strategy = HivemindStrategy(
        target_batch_size=work.target,
        initial_peers=list(initial_peers) or None,
        matchmaking_time=5.0,
        averaging_timeout=PATIENCE,
        **work.network,
        **options,
    )
    connection.send(("addresses", [str(address) for address in strategy.dht.get_visible_maddrs()]))
    task = tasks.text(**sizes, seed=0)
    batches = [batch for batch, _ in zip(task.validation, range(LOOKED_AT), strict=False)]
    look = LooksAtLoss(connection, strategy, work.target, batches)
    trainer = Trainer(strategy=strategy, max_epochs=-1, callbacks=[look], **QUIET)
    trainer.fit(task.model, tasks.text(**sizes, seed=count).train)
    connection.send(("left", None))


def looks(work: Work, enough: Any, patience: float) -> tuple[list[Look], int]:
    """Let two peers train.

    :param enough: told all looks of the first one so far, it says whether they are enough
    :param patience: seconds for one update
    :returns: those looks, and the bytes that both have sent
    """
    found: list[Look] = []
    with places([LINE] * 2) as (internet, hosts), starting() as start:
        peers: list[Peer] = []
        for number, place in enumerate(hosts, start=1):
            peers.append(start(work.at(place), peers, learning, number))
            peers[-1].wait_for("addresses")
        while not enough(found):
            kind = f"look {len(found) + 1}"
            peers[0].wait_until(lambda kind=kind: kind in peers[0].said, kind, patience)
            found.append(peers[0].said[kind])
            say(f"    {found[-1]}")
        sent = sum(map(internet.bytes_sent, range(2)))
        for peer in peers:
            peer.tell("stop")
    return found, sent


def main(file: Path | None, quick: bool, updates: int) -> int:
    """Measure, print and write.

    :param file: to write to
    :param updates: synchronous ones
    """
    sizes: dict[str, Any] = {"context": CONTEXT, "width": WIDTH, "layers": 1, "learning_rate": LEARNING_RATE}
    if quick:
        sizes["width"], updates = 64, 2
    parameters = sum(one.numel() for one in tasks.text(**sizes).model.parameters())
    half = compression.codec("float16")
    common = {"sizes": sizes, "grad_compression": half, "state_averaging_compression": half}
    common["delay_state_averaging"] = False
    diloco = {"use_local_updates": True, "outer_optimizer": "nesterov"}
    say(f"{parameters:,} parameters, synchronous ... (load {os.getloadavg()[0]:.1f})")
    work = Work(SYNCHRONOUS, strategy=common)
    synchronous, sent = looks(work, lambda found: len(found) >= updates, PATIENCE)
    best = min(synchronous, key=lambda look: look.loss)
    say(f"by DiLoCo until {best.loss:.3f} ... (load {os.getloadavg()[0]:.1f})")
    work = Work(SYNCHRONOUS if quick else OUTER, strategy={**common, **diloco})
    outer, outer_sent = looks(work, lambda found: found and found[-1].loss <= best.loss, LONGEST)
    cells = [
        [name, f"{one.loss:.3f}", f"{one.samples:,}", f"{one.seconds:.0f}", f"{count / 2e6:.1f}"]
        for name, one, count in (("synchronous", best, sent), ("DiLoCo", outer[-1], outer_sent))
    ]
    print(table(["", "validation loss", "samples", "seconds", "sent by each, MB"], cells))
    sooner = best.seconds / outer[-1].seconds
    print(f"the same loss {sooner:.1f} times sooner; load at the end: {os.getloadavg()[0]:.1f}")
    write_json(file, [*synchronous, *outer], parameters=parameters, sooner=sooner)
    return 0
