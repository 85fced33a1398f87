"""Measures step time and peak memory of a GPU: Lightning alone, and the strategy synchronous, offloaded, overlapped.

A transformer of about 100 million parameters in bf16-mixed. Each way trains in a fresh process, with the same data and
optimizer. So that rounds are real, a helper on the CPU of the same machine averages with it; it holds the same model
and puts no gradients in. The first epoch is its start and does not count; then whole epochs do, rounds included. For
rounds to be hidden, an epoch has to be longer than they are.

    python tests/benchmarks/gpu.py --json gpu.json

Without a GPU it says so, and measures nothing; ``--device cpu --quick`` only tries whether the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from bench_peer import PATIENCE, QUIET, Work, begin
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from swarm_bench import Peer, Target, machine, parser, say, starting, table, write_json
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from hivenb.strategy import HivemindStrategy

OFFLOAD: dict[str, Any] = {"offload_optimizer": True}
OVERLAP: dict[str, Any] = {
    **OFFLOAD,
    "delay_state_averaging": True,
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
}
#: The ways to train; None is Lightning alone.
WAYS: dict[str, dict[str, Any] | None] = {
    "Lightning alone": None,
    "hivenb, synchronous": {},
    "hivenb, offload": OFFLOAD,
    "hivenb, offload and overlap": OVERLAP,
    "hivenb, reused buffers": {"reuse_grad_buffers": True},
}
#: Bytes of the device for each parameter, beyond those of Lightning alone, that each way should take: a sum of
#: gradients where that has a buffer of its own, and no two moments of the optimizer where that is in main memory.
EXPECTED_BYTES = {
    "hivenb, synchronous": 4,
    "hivenb, offload": -4,
    "hivenb, offload and overlap": -4,
    "hivenb, reused buffers": 0,
}
#: Epochs of the swarm, or as many batches as are in them, that do not count.
START = 1


@dataclass(frozen=True)
class Size:
    """Of the model and its batches; tokens are numbers below ``vocabulary``."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    vocabulary: int = 16_384
    context: int = 512
    batch: int = 32


FULL, TINY = Size(), Size(width=32, heads=2, layers=2, vocabulary=64, context=16, batch=4)


@dataclass(frozen=True)
class Task(Work):
    """What the processes of one measurement do.

    :param device: that computes: ``"cuda"`` or ``"cpu"``
    :param epoch: batches of the measured peer in a swarm epoch
    :param epochs: that count
    :param trace: a file for the trace of a profile
    """

    size: Size = FULL
    device: str = "cuda"
    epoch: int = 150
    epochs: int = 2
    trace: str | None = None


class Transformer(LightningModule):
    """Predicts the next token; its input embedding is its output layer, too."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        hidden = self.layers(self.embedding(inputs) + self.position[:length], mask=mask, is_causal=True)
        scores = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tokens(IterableDataset):
    """Random tokens, the same in each process."""

    def __init__(self, size: Size):
        self._size = size

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = self._size.batch, self._size.context + 1
        fixed = [torch.randint(self._size.vocabulary, shape, generator=generator) for _ in range(8)]
        while True:
            yield from fixed


class Clock(Callback):
    """When each batch was done on the device, and the batches after which a swarm epoch had ended.

    Nothing waits for the device to know that: the device notes the time itself.
    """

    def __init__(self, task: Task, strategy: Any):
        self._task, self._strategy = task, strategy
        self._is_swarm = isinstance(strategy, HivemindStrategy)
        self._ended: list[Any] = []
        self._done: list[Any] = []
        self.boundaries: list[int] = []
        self.group_sizes: list[int] = []
        self.failed: list[str] = []
        if self._is_swarm:
            strategy.on_epoch = self._ended.append

    def on_train_batch_start(self, *args: Any) -> None:
        end = time.monotonic() + PATIENCE
        while self._is_swarm and not self._done and self._strategy.num_peers < 2:
            if time.monotonic() > end:
                raise TimeoutError(f"the helper was not seen within {PATIENCE} s")
            time.sleep(0.02)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._task.device == "cuda":
            self._done.append(torch.cuda.Event(enable_timing=True))
            self._done[-1].record()
        else:
            self._done.append(time.perf_counter())
        if self._is_swarm:
            over, reports = len(self._ended) > 0, self._ended
            self.group_sizes += [report.group_size for report in reports]
            self.failed += [report.failed for report in reports if report.failed]
            reports.clear()
        else:
            over = (batch_idx + 1) % self._task.epoch == 0
        if over:
            self.boundaries.append(batch_idx)
            if len(self.boundaries) == START:
                self.on_start_over()
            trainer.should_stop = len(self.boundaries) >= START + self._task.epochs

    @property
    def is_start_over(self) -> bool:
        """Whether batches count from now on."""
        return len(self.boundaries) >= START

    def steps(self) -> list[float]:
        """Seconds between the ends of batches, of those that count."""
        done = self._done[self.boundaries[START - 1] : self.boundaries[-1] + 1]
        if self._task.device == "cpu":
            return [later - earlier for earlier, later in pairwise(done)]
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(done)]

    def on_start_over(self) -> None:
        """Called once, then."""
        if self._task.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


AnyClock = TypeVar("AnyClock", bound=Clock)


def train(
    connection: Any, task: Task, count: int, folder: str, make_clock: Callable[[Task, Any], AnyClock]
) -> tuple[AnyClock, Transformer]:
    """Train one way, on the device, and tell the addresses of this peer.

    :param count: of peers; 1 for Lightning alone
    """
    begin(folder)
    torch.manual_seed(1)
    strategy: Any = SingleDeviceStrategy("cuda:0" if task.device == "cuda" else "cpu")
    if count > 1:
        strategy = _strategy(task, task.strategy)
        connection.send(("addresses", [str(address) for address in strategy.dht.get_visible_maddrs()]))
    clock, model = make_clock(task, strategy), Transformer(task.size)
    _trainer(task.device, strategy, clock).fit(model, DataLoader(Tokens(task.size), batch_size=None))
    return clock, model


def measured(connection: Any, initial_peers: Sequence[str], task: Task, count: int, folder: str) -> None:
    """Train, and send what came out."""
    clock, model = train(connection, task, count, folder, Clock)
    steps = clock.steps()
    came_to = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mean": statistics.mean(steps),
        "median": statistics.median(steps),
        "longest": max(steps),
        "memory": torch.cuda.max_memory_allocated() if task.device == "cuda" else 0,
        "groups": statistics.mean(clock.group_sizes[START:]) if clock.group_sizes else 1.0,
        "failed": len(clock.failed),
    }
    connection.send(("figures", came_to))


def helping(connection: Any, initial_peers: Sequence[str], task: Task, count: int, folder: str) -> None:
    """Average with the others, on the CPU, until killed."""
    begin(folder)
    strategy = _strategy(task, {"auxiliary": True}, initial_peers=list(initial_peers))
    with suppress(EOFError):
        _trainer("cpu", strategy).fit(Transformer(task.size), DataLoader(Tokens(task.size), batch_size=None))


def _strategy(task: Task, chosen: dict[str, Any], **more: Any) -> HivemindStrategy:
    return HivemindStrategy(task.epoch * task.size.batch, **task.network, **chosen, **more)


def _trainer(device: str, strategy: Any, *callbacks: Callback) -> Trainer:
    kind = {"accelerator": "gpu" if device == "cuda" else "cpu"}
    arguments = {**QUIET, **kind, "precision": "bf16-mixed", "max_epochs": -1}
    return Trainer(strategy=strategy, callbacks=list(callbacks), **arguments)


@dataclass(frozen=True)
class Row:
    """One way to train; times in seconds, of a step.

    :param mean: of whole epochs, with their rounds: what counts
    :param memory: bytes of the device at most
    :param groups: peers in a round, on average; the helper is one
    """

    way: str
    parameters: int
    mean: float
    median: float
    longest: float
    memory: int
    groups: float
    failed: int


def figures_of(way: str, task: Task, target: Target) -> dict[str, Any]:
    """What a peer that trains one way, with a helper unless that is Lightning alone, sends as its figures.

    :param target: what it runs
    """
    options = WAYS[way]
    with starting() as start:
        if options is None:
            one: Peer = start(task, target=target)
        else:
            one = start(replace(task, strategy=options), target=target, count=2)
            start(task, [one], helping)
        figures: dict[str, Any] = one.wait_until(lambda: one.said.get("figures"), "its figures", patience=1800)
        return figures


def parser_of_devices(description: str | None, epoch: int) -> argparse.ArgumentParser:
    """Options of a script that measures a GPU.

    :param epoch: batches in a swarm epoch, unless they are given
    """
    options = parser(description)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to try the script")
    options.add_argument("--epoch", type=int, default=epoch, help="batches in a swarm epoch")
    options.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS], metavar="WAY", help="these alone")
    return options


def is_there(given: argparse.Namespace) -> bool:
    """Print what is measured, and whether there is such a device; the file says so if there is none."""
    print(machine())
    if given.device == "cpu":
        return True
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        write_json(given.json, [], skipped="no GPU here")
        return False
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of_devices(__doc__, epoch=150)
    options.add_argument("--epochs", type=int, default=2, help="that count, after the start")
    given = options.parse_args(arguments)
    if not is_there(given):
        return 0
    size = TINY if given.device == "cpu" or given.quick else FULL
    epoch, epochs = (40, 2) if given.quick else (given.epoch, given.epochs)
    task = Task(target=epoch * size.batch, size=size, device=given.device, epoch=epoch, epochs=epochs)
    rows = []
    for way in given.ways:
        say(f"{way} ...")
        rows.append(Row(way, **figures_of(way, task, measured)))
    cells = [
        [
            row.way,
            f"{1000 * row.mean:.1f}",
            f"{row.mean / rows[0].mean:.3f}",
            f"{1000 * row.median:.1f}",
            f"{1000 * row.longest:.0f}",
            f"{row.memory / 2**20:,.0f}",
            f"{(row.memory - rows[0].memory) / row.parameters:+.1f}",
            f"{EXPECTED_BYTES.get(row.way, 0):+d}",
            f"{row.groups:.2f}",
            row.failed,
        ]
        for row in rows
    ]
    print(f"{rows[0].parameters:,} parameters, bf16-mixed, batches of {size.batch} x {size.context} tokens")
    heads = ["", "step, ms", "ratio", "median, ms", "longest, ms", "peak, MiB", "B/parameter", "expected"]
    print(table([*heads, "group", "failed"], cells))
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
