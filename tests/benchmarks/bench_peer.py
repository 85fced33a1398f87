"""A peer of a benchmark as a process of its own: with the strategy, with plain hivemind, or alone. Not a test.

Its computing is a fixed wait in each step, so that it is known, and that peers of one machine do not compete for cores.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hivemind
import hivemind.utils.asyncio
import torch
from hivemind.utils import MPFuture
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from thread_time import Spent, spent
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.process.child import settle_as_child
from hivenb.strategy import HivemindStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
#: Seconds after which a peer gives up waiting for the others.
PATIENCE = 120.0
#: Numbers in the largest tensor of a model.
LARGEST = 2**20


@dataclass(frozen=True)
class Place:
    """Where one peer lives.

    :param enter: moves the thread that calls it there, with all threads and processes that it starts from then on;
      it can be pickled
    :param address: IPv4, under which the other places reach it
    """

    enter: Callable[[], None]
    address: str


@dataclass(frozen=True)
class Work:
    """What each peer of a swarm does.

    :param target: samples of all peers in an epoch
    :param step: seconds that the computing of one batch takes
    :param batch: samples in it
    :param parameters: of the model
    :param strategy: further arguments of the strategy, or of plain ``hivemind.Optimizer``
    :param place: where it is, unless on the loopback interface
    :param transport: of libp2p, ``tcp`` or ``quic``
    """

    target: int
    step: float = 0.05
    batch: int = 32
    parameters: int = 100_000
    strategy: dict[str, Any] = field(default_factory=dict)
    place: Place | None = None
    transport: str = "tcp"

    def at(self, place: Place | None) -> Work:
        """The same elsewhere."""
        return replace(self, place=place)

    @property
    def address(self) -> str:
        """IPv4, at which it listens."""
        return self.place.address if self.place else "127.0.0.1"

    @property
    def network(self) -> dict[str, Any]:
        """Arguments of a DHT."""
        if self.strategy.get("client_mode"):
            return {}  # it listens nowhere
        port = {"tcp": "tcp/0", "quic": "udp/0/quic-v1"}[self.transport]
        return {"host_maddrs": [f"/ip4/{self.address}/{port}"], "nat_port_map": False, "auto_nat": False}


@dataclass(frozen=True)
class Epoch:
    """One epoch of a peer, as it was at the end of the step that ended it.

    :param at: seconds of the clock that all processes of the machine share
    :param samples: that this peer has put in
    :param group_size: peers that averaged gradients
    :param stalled: seconds in the transition
    :param failed: why the round failed, if it did
    :param in_step: spent in ``step`` so far, without the computing of gradients
    :param batches: so far
    """

    at: float
    epoch: int
    samples: int
    group_size: int
    stalled: float
    failed: str | None
    in_step: Spent
    batches: int


class Weights(LightningModule):
    """A model of so many parameters that computes next to nothing, and waits instead."""

    def __init__(self, parameters: int, step: float):
        super().__init__()
        sizes = [LARGEST] * (parameters // LARGEST) + [parameters % LARGEST]
        self.weights = nn.ParameterList(nn.Parameter(torch.full((size,), 0.01)) for size in sizes if size)
        self._step = step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step)
        return torch.stack([one.sum() for one in self.weights]).sum() * batch.mean() * 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd(self.parameters())


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


class Endless(IterableDataset):
    """The same batch again and again."""

    def __init__(self, batch: int):
        self._batch = torch.ones(batch, 1)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self._batch


class TimedStrategy(HivemindStrategy):
    """Adds up what its steps take besides computing."""

    in_step = Spent()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def timed() -> Any:
            began = spent()
            result = closure()
            self.in_step -= spent() - began
            return result

        began = spent()
        result = super().optimizer_step(optimizer, timed, model, **kwargs)
        self.in_step += spent() - began
        return result


class Report(Callback):
    """Waits for the others, sends each epoch as soon as its step is over, and stops when told to."""

    def __init__(self, connection: Any, strategy: TimedStrategy, count: int):
        self._connection, self._strategy, self._count = connection, strategy, count
        self._ended: list[EpochReport] = []
        strategy.on_epoch = self._ended.append

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        end = time.monotonic() + PATIENCE
        while self._count > 1 and self._strategy.num_peers < self._count:
            if time.monotonic() > end:
                raise TimeoutError(f"saw {self._strategy.num_peers} of {self._count} peers within {PATIENCE} s")
            time.sleep(0.02)
        if self._count:
            self._connection.send(("began", time.monotonic()))
        self._count = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, in_step = time.monotonic(), self._strategy.in_step
        for one in self._ended:
            epoch = Epoch(now, one.epoch, one.samples, one.group_size, one.seconds, one.failed, in_step, batch_idx + 1)
            self._connection.send(("epoch", epoch))
        self._ended.clear()
        if self._connection.poll():
            trainer.should_stop = True


def with_strategy(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Train with the strategy until told to stop.

    :param count: of peers to see before the first batch
    :param folder: for what a killed process leaves behind
    """
    begin(folder, work.place)
    strategy = TimedStrategy(work.target, initial_peers=list(initial_peers) or None, **work.network, **work.strategy)
    connection.send(("addresses", [str(address) for address in strategy.dht.get_visible_maddrs()]))
    trainer = Trainer(strategy=strategy, max_epochs=-1, callbacks=[Report(connection, strategy, count)], **QUIET)
    trainer.fit(Weights(work.parameters, work.step), _loader(work))
    connection.send(("left", None))


class Transitions(logging.Handler):
    """Learns what became of a round from hivemind's log, the only place that tells."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.group_size, self.failed = 1, None

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Averaged gradients with"):
            self.group_size = int(message.split()[3])
        elif message.startswith("Averaging gradients failed"):
            self.failed = message


def with_plain_hivemind(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """The same with hivemind's own classes only, in a loop as in its quick start, and the strategy's arguments."""
    begin(folder, work.place)
    transitions = Transitions()
    logger = logging.getLogger("hivemind.optim.optimizer")
    logger.addHandler(transitions)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    model = Weights(work.parameters, work.step)
    dht = hivemind.DHT(initial_peers=list(initial_peers) or None, start=True, startup_timeout=60.0, **work.network)
    connection.send(("addresses", [str(address) for address in dht.get_visible_maddrs()]))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="lightning_run",
        batch_size_per_step=work.batch,
        target_batch_size=work.target,
        params=list(model.parameters()),
        optimizer=_sgd,
        use_local_updates=False,
        client_mode=False,  # left to itself, hivemind 1.1.12 takes the opposite of what the DHT does
        **{"matchmaking_time": 5.0, "averaging_timeout": 30.0, "delay_state_averaging": False, **work.strategy},
    )
    connection.send(("began", time.monotonic()))
    in_step, batches = Spent(), 0
    for batch in _loader(work):
        if connection.poll():
            break
        loss = model.training_step(batch, batches)
        optimizer.zero_grad()
        loss.backward()
        before, put_in = optimizer.local_epoch, optimizer.local_progress.samples_accumulated + work.batch
        began = spent()
        optimizer.step()
        took = spent() - began
        in_step, batches = in_step + took, batches + 1
        if optimizer.local_epoch != before:
            outcome = optimizer.local_epoch, put_in, transitions.group_size, took.wall, transitions.failed
            connection.send(("epoch", Epoch(time.monotonic(), *outcome, in_step, batches)))
            transitions.group_size, transitions.failed = 1, None  # a delayed round tells before its epoch's end
    optimizer.shutdown()
    dht.shutdown()
    connection.send(("left", None))


class Clock(Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.monotonic())


def alone(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Train with Lightning alone, and send the samples per second.

    :param count: of steps
    """
    begin(folder, work.place)
    clock, warm_up = Clock(), 3
    trainer = Trainer(strategy=SingleDeviceStrategy("cpu"), max_steps=count + warm_up, callbacks=[clock], **QUIET)
    trainer.fit(Weights(work.parameters, work.step), _loader(work))
    connection.send(("rate", work.batch * count / (clock.times[-1] - clock.times[warm_up - 1])))
    connection.send(("left", None))


def begin(folder: str, place: Place | None = None) -> None:
    """Make a process forked from a server one of its own, quiet, and gone with its parent.

    :param folder: for temporary files
    :param place: to go to
    """
    if place is not None:
        place.enter()
    settle_as_child()
    # forked from a server of several: what they would share is made anew, as in processes started by hand
    mp.set_start_method("fork", force=True)
    MPFuture.reset_backend()
    hivemind.utils.asyncio._AsyncContextWrapper.EXECUTOR_LOCK = mp.Lock()
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _loader(work: Work) -> DataLoader[Any]:
    return DataLoader(Endless(work.batch), batch_size=None)
