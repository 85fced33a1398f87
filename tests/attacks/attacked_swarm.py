"""A small swarm that trains as fast as it can, and how fast that is while somebody attacks it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import tiny
import torch

import hivenb

#: Seconds for which the pace is measured before an attack.
UNDISTURBED = 6.0

RUN_ID = "wasted"

#: Of all peers, so that an epoch of two takes about a second.
OPTIONS: dict[str, Any] = {
    "run_id": RUN_ID,
    "target_batch_size": 640,
    "matchmaking_time": 2.0,
    "averaging_timeout": 15.0,
}


@dataclass(frozen=True)
class Victims:
    """Peers that train together."""

    runs: tuple[hivenb.TrainingRun, ...]

    @property
    def invite(self) -> str:
        return self.runs[0].swarm.invite

    def pace(self, seconds: float) -> float:
        """Epochs that end in a second, of the first of them."""
        began, before = time.monotonic(), self.runs[0].status.epoch
        time.sleep(seconds)
        return (self.runs[0].status.epoch - before) / (time.monotonic() - began)


@contextlib.contextmanager
def victims(count: int, **options: Any) -> Iterator[Victims]:
    """So many, in one process, each in a swarm of its own that it has joined."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        swarms = [stack.enter_context(hivenb.Swarm("wasted-0"))]
        for number in range(1, count):
            swarms.append(stack.enter_context(hivenb.Swarm.join(swarms[0].invite, f"wasted-{number}")))
        runs = []
        for swarm in swarms:
            given = {**OPTIONS, **options}
            run = hivenb.TrainingRun(
                tiny.PacedModel(), tiny.loader(4096), swarm=swarm, options=hivenb.Options(**given), accelerator="cpu"
            )
            runs.append(run)
            stack.callback(run.stop)
            run.start()
        for run in runs:
            run.wait(epochs=3, timeout=60)
        yield Victims(tuple(runs))


@dataclass(frozen=True)
class Pace:
    """Epochs in a second before an attack, and during it."""

    before: float
    during: float

    @property
    def share(self) -> float:
        return self.during / self.before if self.before else 0.0

    def __str__(self) -> str:
        return f"pace {self.share:.2f} ({self.before:.1f} epochs/s before, {self.during:.1f} during)"


def pace_under(
    attack: Callable[[str], BaseProcess], seconds: float, count: int = 2, warm_up: float = 0.0, **options: Any
) -> Pace:
    """How fast victims train while they are attacked.

    :param attack: starts the attacker, given an invite
    :param seconds: for which the pace is measured
    :param count: of victims
    :param warm_up: seconds of the attack before that
    """
    with victims(count, **options) as attacked:
        before = attacked.pace(UNDISTURBED)
        attacker = attack(attacked.invite)
        try:
            time.sleep(warm_up)
            return Pace(before, attacked.pace(seconds))
        finally:
            attacker.kill()
            attacker.join()
