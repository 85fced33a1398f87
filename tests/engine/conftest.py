"""A DHT for the tests of a module, and trackers, averagers and optimizers on it that cannot be left behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_memory import real_time
from in_memory.real_time import RealTimeDHT, RealTimeSwarm
from tiny import LOOPBACK

from hivenb.engine.averaging.averager import Averager
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange import all_reduce
from hivenb.engine.matchmaking.matchmaking import Attendance, ExpectedPeers
from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.progress.tracker import ProgressTracker

_runs = itertools.count(1)


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    opened = DHT(start=True, **LOOPBACK)
    yield opened
    opened.shutdown()


@pytest.fixture(scope="module")
def joining_dht(dht: DHT) -> Iterator[DHT]:
    """Another one, of another peer."""
    yield from _joining(dht)


@pytest.fixture
def third_dht(dht: DHT) -> Iterator[DHT]:
    """One for a single test, which may end it."""
    yield from _joining(dht)


def _joining(dht: DHT) -> Iterator[DHT]:
    opened = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
    yield opened
    opened.shutdown()  # also one that was killed, and is just being started anew


@pytest.fixture
def run_id() -> str:
    """The name of a run that no other test has."""
    return f"run-{next(_runs)}"


@pytest.fixture
def make_tracker(dht: DHT, run_id: str) -> Iterator[Callable[..., ProgressTracker]]:
    """Starts trackers of runs with 100 samples in an epoch, and ends them."""
    made: list[ProgressTracker] = []

    def make(own: DHT = dht, **kwargs: Any) -> ProgressTracker:
        made.append(ProgressTracker(own, run_id, 100, private_key=own.private_key, **{"start": True, **kwargs}))
        return made[-1]

    yield make
    for tracker in made:
        if tracker.is_alive():
            tracker.shutdown(10)
            tracker.join(10)
        assert not tracker.is_alive()


@pytest.fixture
def make_averager(run_id: str) -> Iterator[Callable[..., GradientAverager]]:
    """Starts averagers of the gradients of one parameter, of such a shape, and shuts them down."""
    made: list[GradientAverager] = []

    def make(
        dht: DHT,
        shape: int | tuple[int, ...] = 3,
        kind: Callable[..., GradientAverager] = GradientAverager,
        **options: Any,
    ) -> GradientAverager:
        parameters = [torch.nn.Parameter(torch.zeros(shape))]
        made.append(kind(parameters, dht=dht, prefix=run_id, start=True, **options))
        return made[-1]

    yield make
    for averager in made:
        if averager.is_alive():
            averager.shutdown()


@pytest.fixture
def expect_each_other() -> Callable[..., None]:
    """Lets averagers know that all of them are at an epoch, as their trackers would."""

    def expect(*averagers: Averager, epoch: int = 0) -> None:
        attendances = {averager: Attendance(averager.peer_id.to_bytes(), 0, epoch) for averager in averagers}
        for averager in averagers:
            averager.expect_peers(
                ExpectedPeers(frozenset(attendances[one] for one in averagers if one is not averager))
            )

    return expect


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers whose averagers are made afterwards share tensors out among them, as they do with large ones."""
    monkeypatch.setattr(all_reduce, "suits_all_gather", lambda *args: False)


@pytest.fixture
def make_optimizer(dht: DHT, run_id: str) -> Iterator[Callable[..., Optimizer]]:
    """Makes optimizers that train alone unless told otherwise, and shuts them down."""
    yield from _optimizers(dht, run_id)


def _optimizers(dht: Any, run_id: str) -> Iterator[Callable[..., Optimizer]]:
    made: list[Optimizer] = []

    def make(parameters: Any = None, **kwargs: Any) -> Optimizer:
        if "optimizer" not in kwargs:
            kwargs["optimizer"] = torch.optim.SGD(parameters, lr=0.1)
        defaults = {"dht": dht, "run_id": run_id, "target_batch_size": 8, "matchmaking_time": 0.5}
        made.append(Optimizer(**{**defaults, "averaging_timeout": 20.0, "delay_state_averaging": False, **kwargs}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.shutdown()


# -- without processes -----------------------------------------------------------------------------------------------
#
# For what an optimizer or its averagers make of numbers. What a process, a fork or a real line has to do with a
# behaviour is tested with the fixtures above.


@pytest.fixture
def swarm_in_memory() -> Iterator[RealTimeSwarm]:
    """One whose averagers have no processes, to be used from threads."""
    with real_time.opened() as swarm:
        yield swarm


@pytest.fixture
def memory_dht(swarm_in_memory: RealTimeSwarm) -> RealTimeDHT:
    """Of its first peer."""
    return swarm_in_memory.join()


@pytest.fixture
def joining_memory_dht(swarm_in_memory: RealTimeSwarm, memory_dht: RealTimeDHT) -> RealTimeDHT:
    """Of the second one."""
    return swarm_in_memory.join()


@pytest.fixture
def make_optimizer_in_memory(memory_dht: RealTimeDHT, run_id: str) -> Iterator[Callable[..., Optimizer]]:
    """As ``make_optimizer``, without processes."""
    yield from _optimizers(memory_dht, run_id)
