"""Measures how long training stands still when an option is changed while it trains, beside the end of an epoch.

This process trains with peers on this machine, and changes one option after the other, there and back, right after the
end of an epoch. What counts is the longest time between two batches from the change until it is in force, without
the computing of a batch. What all peers have to agree on changes at the end of an epoch, and its rounds count, too.

    python tests/benchmarks/live_change.py --json live_change.json
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from bench_peer import QUIET, Clock, Endless, Weights
from swarm_bench import machine, parser, say, table, write_json
from torch.utils.data import DataLoader

import hivenb
from hivenb.options import FIELDS
from hivenb.options.choices import PowerSGD
from hivenb.options.declarations import TakesEffect

#: What is changed, all of it at once, and then taken back.
CHANGES: tuple[dict[str, Any], ...] = (
    {"grad_compression": "float16"},
    {"matchmaking_time": 4.0},
    {"delay_state_averaging": True},
    {"reuse_grad_buffers": True},
    {"offload_optimizer": True},
    {"delay_optimizer_step": True, "delay_state_averaging": True, "offload_optimizer": True},
    {"average_state_every": 2},
    {"grad_averager_factory": PowerSGD(4).factory()},
)
BATCH = 32
#: Seconds that an epoch may take on a busy machine.
PATIENCE = 60.0


@dataclass(frozen=True)
class Row:
    """One change, there and back.

    :param options: what was changed
    :param way: whether it could be set in the running averagers
    :param still: seconds for which training stood still, each time
    :param epoch_end: the same at the ends of epochs before it, in the mean
    """

    options: str
    way: str
    still: tuple[float, ...]
    epoch_end: float


class Training:
    """A run with peers on this machine, as one sees it from outside."""

    def __init__(self, peers: int, parameters: int, step: float, epoch: float):
        self._step, self._clock = step, Clock()
        self.swarm = hivenb.Swarm()
        options = hivenb.Options(target_batch_size=round(BATCH * peers * epoch / step), batch_size=BATCH)
        model, data = Weights(parameters, step), DataLoader(Endless(BATCH), batch_size=None)
        quiet = {name: value for name, value in QUIET.items() if name != "devices"}
        self.run = hivenb.TrainingRun(model, data, swarm=self.swarm, options=options, callbacks=[self._clock], **quiet)
        self.swarm.add_local_peers(peers - 1, self.run)
        self.run.start()
        self._wait_for_round_of(peers)

    def longest_pause(self, since: float) -> float:
        """The longest time between two batches, from this moment on, without computing."""
        times = [at for at in self._clock.times if at >= since - 1.5 * self._step]
        return max(after - before for before, after in pairwise(times)) - self._step

    def change(self, changes: dict[str, Any]) -> tuple[float, float]:
        """Change options right after the end of an epoch: how long that one's end took, and this change."""
        self._next_epoch()
        began = time.monotonic()
        self._next_epoch()
        usual = self.longest_pause(began)
        began = time.monotonic()
        self.run.apply(**changes)
        self._finish_batch()
        return usual, self.longest_pause(began)

    def _next_epoch(self) -> None:
        if not self.run.wait(epochs=1, timeout=PATIENCE):
            raise TimeoutError(f"no epoch within {PATIENCE} s")
        self._finish_batch()

    def _finish_batch(self) -> None:
        time.sleep(3 * self._step)

    def _wait_for_round_of(self, peers: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.run.history.snapshot().last("group_size") != peers:
            if time.monotonic() > end:
                raise TimeoutError(f"no round of {peers} peers within {PATIENCE} s")
            time.sleep(0.05)


def measure(training: Training, changes: dict[str, Any]) -> Row:
    before = {name: getattr(training.run.options, name) for name in changes}
    found = [training.change(one) for one in (changes, before)]
    in_place = all(FIELDS[name].takes_effect is TakesEffect.IN_PLACE for name in changes)
    way = "in place" if in_place else "made anew"
    if any(FIELDS[name].swarm_wide for name in changes):
        way += ", at the end of an epoch"
    usual, still = zip(*found, strict=True)
    return Row(", ".join(changes), way, still, statistics.mean(usual))


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["changed and taken back", "how", "stood still, s", "end of an epoch, s", "ratio"]
    cells = [
        [
            row.options,
            row.way,
            " and ".join(f"{seconds:.2f}" for seconds in row.still),
            f"{row.epoch_end:.2f}",
            f"{statistics.mean(row.still) / row.epoch_end:.1f}",
        ]
        for row in rows
    ]
    print(table(heads, cells))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, default=3)
    options.add_argument("--parameters", type=int, default=1_000_000)
    options.add_argument("--step", type=float, default=0.05, help="seconds that the computing of a batch takes")
    options.add_argument("--epoch", type=float, default=2.5, help="seconds of computing in an epoch")
    given = options.parse_args(arguments)
    chosen = CHANGES
    if given.quick:
        given.peers, given.parameters, given.epoch, chosen = 2, 1000, 1.0, (CHANGES[0], CHANGES[3])
    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "hivemind"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(machine())
    training = Training(given.peers, given.parameters, given.step, given.epoch)
    rows = []
    try:
        for changes in chosen:
            say(f"{', '.join(changes)} ...")
            rows.append(measure(training, changes))
    finally:
        training.swarm.close()
    print_rows(rows)
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
