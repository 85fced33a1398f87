"""Runs that train in real swarms of one process, to be attacked, and the DHT of a stranger who attacks them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hivemind
import tiny
from hivemind.dht.validation import RecordValidatorBase

import hivenb

#: Seconds that something may take that does happen.
PATIENCE = 60.0

RUN_ID = "attacked"


@contextlib.contextmanager
def swarms(count: int) -> Iterator[list[hivenb.Swarm]]:
    """Open swarms of one machine that have met; each is a peer."""
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(hivenb.Swarm("victim-0", private=False))]  # so that a stranger gets in
        for number in range(1, count):
            made.append(opened.enter_context(hivenb.Swarm.join(made[0].invite, f"victim-{number}")))
        yield made


@contextlib.contextmanager
def stranger(
    swarm: hivenb.Swarm, validators: Sequence[RecordValidatorBase] = (), **kwargs: Any
) -> Iterator[hivemind.DHT]:
    """A DHT of plain hivemind.

    :param swarm: that it joins
    :param validators: that check, and sign, what it stores
    :param kwargs: of the DHT
    """
    addresses = [str(address) for address in swarm.dht.get_visible_maddrs()]
    network = kwargs if kwargs.get("client_mode") else {**tiny.LOOPBACK, **kwargs}
    dht = hivemind.DHT(initial_peers=addresses, record_validators=validators, start=True, **network)
    try:
        yield dht
    finally:
        dht.shutdown()


def make_run(swarm: hivenb.Swarm, model: Any = None, **options: Any) -> hivenb.TrainingRun:
    """A run of a tiny model whose epochs take about half a second."""
    defaults = {"target_batch_size": 256, "run_id": RUN_ID, "matchmaking_time": 2.0, "averaging_timeout": 10.0}
    return hivenb.TrainingRun(
        model or tiny.PacedModel(),
        tiny.loader(4096),
        swarm=swarm,
        options=hivenb.Options(**{**defaults, **options}),
        accelerator="cpu",
    )


@contextlib.contextmanager
def training(*runs: hivenb.TrainingRun) -> Iterator[None]:
    """Runs that have met each other, and average."""
    try:
        for run in runs:
            run.start()
        require(lambda: all(len(run.peers()) == len(runs) for run in runs))
        for run in runs:
            run.wait(epochs=2, timeout=PATIENCE)
        yield
    finally:
        for run in runs:
            run.stop()


def happens(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether something comes to be within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def require(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what has to be before an attack can begin."""
    if not happens(condition, seconds):
        raise TimeoutError(f"the victims were not ready within {seconds:.0f} s")


def rounds_in(run: hivenb.TrainingRun, seconds: float) -> int:
    """How many rounds a run averages with others in so many seconds."""

    def rounds() -> int:
        sizes = run.history.snapshot().series.get("group_size")
        return 0 if sizes is None else int((sizes.values > 1).sum())

    before = rounds()
    time.sleep(seconds)
    return rounds() - before
