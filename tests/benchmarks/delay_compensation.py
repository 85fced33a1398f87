"""What gradients that are one epoch late cost, and what makes up for it; and what a speculative step takes.

One process plays all peers, in plain torch, on the digits task: a round takes a whole epoch, so that each average comes
when the next gradients have been computed. They are computed at the parameters from before (late), at a step with the
peer's own gradients from the same parameters and moments (own gradients), or at a step with the own gradients times
what the last true step has made of each number of its gradient (last step sizes).

The second table has four ways to make such a step with AdamW: on a deep copy of the optimizer; by its own code on
copies of some parameters at a time, as hivenb does it with optimizers that it does not know; by formulas that read the
moments and write temporary tensors, as it does it with AdamW; and by the sizes of the last step. What they hold at
most, beside the optimizer and the own gradients, is read off the kernel.

The third has SGD where many peers share an epoch: a linear regression, with own gradients as long as they are, and with
those that hivenb shortens to a multiple of the last average.

    python tests/benchmarks/delay_compensation.py --json delay_compensation.json
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from swarm_bench import machine, parser, say, table, write_json

from hivenb import tasks
from hivenb.engine.optimizer.delay_compensation import LONGEST, step_beside

Tensors = list[torch.Tensor]

# -- what is learned --------------------------------------------------------------------------------------------------

MODES = ("synchronous", "late", "own gradients", "last step sizes")


@dataclass(frozen=True)
class Learned:
    """What a training has come to.

    :param loss: of the validation images
    :param accuracy: the share of them that is recognized
    """

    mode: str
    peers: int
    rate: float
    seed: int
    loss: float
    accuracy: float


class Digits:
    """The digits task: gradients of any parameters, and how good they are."""

    def __init__(self, seed: int, rate: float, samples: int):
        task = tasks.digits(seed=seed, learning_rate=rate)
        self.model: Any = task.model
        self._parameters = list(self.model.parameters())
        images, labels = task.train.dataset.tensors
        self._images, self._labels, self._samples = images, labels, samples
        self._validation = list(task.validation or ())
        self._generator = torch.Generator().manual_seed(seed)

    def batches(self, peers: int) -> Iterator[torch.Tensor]:
        """For each peer, which samples of the next epoch are its own."""
        chosen = torch.randint(len(self._images), (self._samples,), generator=self._generator)
        return iter(chosen.chunk(peers))

    def gradient(self, at: Tensors, batch: torch.Tensor) -> Tensors:
        self._be_at(at)
        loss = torch.nn.functional.cross_entropy(self.model(self._images[batch]), self._labels[batch])
        return list(torch.autograd.grad(loss, self._parameters))

    @torch.no_grad()
    def validate(self, at: Tensors) -> tuple[float, float]:
        self._be_at(at)
        scores = torch.cat([self.model(images) for images, _ in self._validation])
        labels = torch.cat([labels for _, labels in self._validation])
        loss = torch.nn.functional.cross_entropy(scores, labels)
        return float(loss), float((scores.argmax(1) == labels).float().mean())

    @torch.no_grad()
    def _be_at(self, at: Tensors) -> None:
        for parameter, value in zip(self._parameters, at, strict=True):
            parameter.copy_(value)


def learn(mode: str, peers: int, rate: float, seed: int, epochs: int, samples: int) -> Learned:
    digits = Digits(seed, rate, samples)
    truth = [torch.nn.Parameter(one.detach().clone()) for one in digits.model.parameters()]
    optimizer = torch.optim.AdamW(truth, rate)
    places: list[Tensors] = [[one.detach().clone() for one in truth]] * peers
    average: Tensors | None = None
    sizes = [torch.zeros_like(one) for one in truth]

    def step(gradients: Tensors) -> None:
        before = [one.detach().clone() for one in truth]
        for parameter, gradient in zip(truth, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        for size, now, old, gradient in zip(sizes, truth, before, gradients, strict=True):
            size.copy_((now.detach() - old).abs() / (gradient.abs() + 1e-12)).clamp_(max=1.0)

    for _ in range(epochs):
        own = [digits.gradient(at, batch) for at, batch in zip(places, digits.batches(peers), strict=True)]
        if average is not None:
            step(average)  # it has arrived when the next gradients are there
        average = [torch.stack(ones).mean(0) for ones in zip(*own, strict=True)]
        if mode == "synchronous":
            step(average)
            average = None
        places = [_place(mode, truth, optimizer, gradients, sizes) for gradients in own]
    if average is not None:
        step(average)
    return Learned(mode, peers, rate, seed, *digits.validate([one.detach() for one in truth]))


def _place(
    mode: str, truth: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, own: Tensors, sizes: Tensors
) -> Tensors:
    """Where a peer computes its next gradients."""
    if mode == "own gradients":
        return [value for _, value in step_beside(optimizer, own)]
    if mode == "last step sizes":
        return [at.detach() - size * gradient for at, size, gradient in zip(truth, sizes, own, strict=True)]
    return [at.detach().clone() for at in truth]


# -- many peers -------------------------------------------------------------------------------------------------------

REGRESSIONS = ("synchronous", "late", "own gradients", "own gradients, shortened")


def regress(mode: str, peers: int, seed: int, epochs: int = 60, rate: float = 0.3) -> float:
    """The squared error to which SGD comes in 64 dimensions, with 128 samples in an epoch."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1024, 64, generator=generator, dtype=torch.float64)
    outputs = inputs @ torch.randn(64, generator=generator, dtype=torch.float64)
    outputs += 0.1 * torch.randn(1024, generator=generator, dtype=torch.float64)
    truth, average, longest = torch.zeros(64, dtype=torch.float64), None, torch.inf
    places = [truth] * peers
    for _ in range(epochs):
        batches = torch.randint(1024, (peers, 128 // peers), generator=generator)
        own = [
            inputs[batch].T @ (inputs[batch] @ at - outputs[batch]) / len(batch)
            for at, batch in zip(places, batches, strict=True)
        ]
        if average is not None:
            truth = truth - rate * average
            longest = LONGEST * float(average.norm())
        average = torch.stack(own).mean(0)
        if mode == "synchronous":
            truth, average = truth - rate * average, None
        places = [truth] * peers
        if mode.startswith("own"):
            bound = longest if mode.endswith("shortened") else torch.inf
            places = [truth - rate * min(1.0, bound / float(one.norm())) * one for one in own]
    if average is not None:
        truth = truth - rate * average
    return float((inputs @ truth - outputs).square().mean())


# -- what a step takes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a speculative step takes.

    :param milliseconds: the median of some
    :param bytes_held: for each parameter, at most, beside what the optimizer has and the own gradients
    :param bytes_kept: for each parameter, from one step to the next
    """

    way: str
    parameters: int
    tensors: int
    milliseconds: float
    bytes_held: float
    bytes_kept: int


def on_a_deep_copy(optimizer: Any, own: Tensors, into: Tensors) -> None:
    state = optimizer.state_dict()
    copies = [one.detach().clone().requires_grad_() for one in optimizer.param_groups[0]["params"]]
    made = type(optimizer)(copies)
    made.load_state_dict(copy.deepcopy(state))
    for parameter, gradient in zip(copies, own, strict=True):
        parameter.grad = gradient
    made.step()
    torch._foreach_copy_(into, [one.detach() for one in copies])


class UnknownAdamW(torch.optim.AdamW):
    """One that is not known to be torch's, and so is stepped by its own code."""


def some_at_a_time(optimizer: Any, own: Tensors, into: Tensors) -> None:
    for number, value in step_beside(optimizer, own):
        into[number].copy_(value)


def by_formulas(optimizer: Any, own: Tensors, into: Tensors) -> None:
    for number, value in step_beside(optimizer, own):
        into[number].copy_(value)


def by_last_sizes(optimizer: Any, own: Tensors, into: Tensors) -> None:
    sizes = optimizer.state["sizes"]
    for number, (parameter, gradient) in enumerate(zip(optimizer.param_groups[0]["params"], own, strict=True)):
        torch.addcmul(parameter.detach(), sizes[number], gradient, value=-1, out=into[number])


def the_step_itself(optimizer: Any, own: Tensors, into: Tensors) -> None:
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], own, strict=True):
        parameter.grad = gradient
    optimizer.step()


WAYS: dict[str, tuple[Callable[[Any, Tensors, Tensors], None], int]] = {
    "the step itself": (the_step_itself, 0),
    "on a deep copy": (on_a_deep_copy, 0),
    "some at a time": (some_at_a_time, 0),
    "by formulas": (by_formulas, 0),
    "last step sizes": (by_last_sizes, 4),
}


def measure(way: str, shapes: Sequence[tuple[int, ...]], repeat: int) -> Step:
    make, kept = WAYS[way]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = (UnknownAdamW if make is some_at_a_time else torch.optim.AdamW)(parameters)
    own, into = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    the_step_itself(optimizer, own, into)
    if kept:
        optimizer.state["sizes"] = [torch.rand(shape) for shape in shapes]  # type: ignore[index]
    make(optimizer, own, into)
    gc.collect()
    before, times = _resident(), []
    Path("/proc/self/clear_refs").write_text("5")  # https://docs.kernel.org/filesystems/proc.html
    for _ in range(repeat):
        began = time.perf_counter()
        make(optimizer, own, into)
        times.append(time.perf_counter() - began)
    numbers = sum(one.numel() for one in parameters)
    held = max(0, _resident("VmHWM") - before) / numbers
    return Step(way, numbers, len(shapes), 1000 * sorted(times)[repeat // 2], held, kept)


def _resident(name: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# -- all of it --------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    options.add_argument("--epochs", type=int, default=52)
    options.add_argument("--repeat", type=int, default=7, help="steps of which the median is taken; none without any")
    given = options.parse_args(arguments)
    samples = 1024
    if given.quick:
        given.seeds, given.peers, given.epochs, samples, given.repeat = 1, [2], 2, 64, 1
    print(machine())
    learned = []
    for rate in given.rates:
        for mode in MODES:
            for peers in [1] if mode in ("synchronous", "late") else given.peers:
                for seed in range(given.seeds):
                    learned.append(learn(mode, peers, rate, seed, given.epochs, samples))
                    say(learned[-1])
    heads = ["gradients are computed at", "peers", "rate", "loss", "accuracy", "by seed"]
    print(table(heads, [_row(ones) for ones in _alike(learned)]))
    counts = [4] if given.quick else [4, 8, 16, 32]
    errors = {
        (mode, peers): sum(regress(mode, peers, seed) for seed in range(4)) / 4
        for peers in counts
        for mode in REGRESSIONS
    }
    rows = [[peers, 128 // peers, *(f"{errors[mode, peers]:.3g}" for mode in REGRESSIONS)] for peers in counts]
    print(table(["peers", "samples each", *REGRESSIONS], rows))
    steps = []
    if given.repeat:
        size = 16 if given.quick else 1024
        for shapes in ([(size, size)] * 32, [(size // 16, size // 16)] * 512):
            steps += [measure(way, shapes, given.repeat) for way in WAYS]
    heads = ["a speculative step", "numbers", "tensors", "ms", "held, bytes a number", "kept"]
    cells = [
        [one.way, one.parameters, one.tensors, f"{one.milliseconds:.1f}", f"{one.bytes_held:.1f}", one.bytes_kept]
        for one in steps
    ]
    print(table(heads, cells))
    write_json(given.json, learned, steps=[vars(one) for one in steps])
    return 0


def _alike(learned: Sequence[Learned]) -> Iterator[list[Learned]]:
    keys = dict.fromkeys((one.mode, one.peers, one.rate) for one in learned)
    for key in keys:
        yield [one for one in learned if (one.mode, one.peers, one.rate) == key]


def _row(ones: Sequence[Learned]) -> list[Any]:
    first, count = ones[0], len(ones)
    loss, accuracy = sum(one.loss for one in ones) / count, sum(one.accuracy for one in ones) / count
    each = ", ".join(f"{one.accuracy:.3f}" for one in ones)
    return [first.mode, first.peers, f"{first.rate:g}", f"{loss:.4f}", f"{accuracy:.3f}", each]


if __name__ == "__main__":
    raise SystemExit(main())
