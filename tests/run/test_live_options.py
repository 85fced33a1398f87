"""Options change while three real peers train: each is seen to have its effect, and nothing is lost."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from tiny import TinyModel, loader, parameters, samples

import hivenb
from hivenb.compression import Float16Compression, Uniform8BitQuantization
from hivenb.errors import OptionsError
from hivenb.options import FIELD_NAMES, FIELDS
from hivenb.options.declarations import TakesEffect
from hivenb.run.status import RunState

pytestmark = pytest.mark.process

PATIENCE = 90.0

#: Samples in a batch and seconds that it takes, so that an epoch takes a good part of one. In few batches: each of them
#: costs CPU at three peers.
BATCH, BATCH_SECONDS = 32, 0.08

OPTIONS = hivenb.Options(target_batch_size=512, matchmaking_time=3.0, averaging_timeout=20.0, run_id="live")


class SlowModel(TinyModel):
    """With a matrix that PowerSGD finds worth its while; in each process it writes down what it becomes.

    :param folder: where to; a file for each swarm epoch
    """

    def __init__(self, folder: Path, **kwargs: Any):
        super().__init__(**kwargs)
        self.wide = torch.nn.Linear(4, 64)
        self.register_buffer("statistic", torch.zeros(1))
        self.folder, self.epoch = folder, 0

    def on_train_batch_end(self, *args: Any) -> None:
        epoch = self.trainer.strategy.hivemind_epoch
        if epoch != self.epoch:
            self.epoch = epoch
            torch.save(parameters(self), self.folder / f"{epoch}-{os.getpid()}.pt")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(BATCH_SECONDS)
        return super().training_step(batch, batch_idx) + 1e-3 * self.wide(batch[0]).square().mean()


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hivenb.TrainingRun]:
    """Trains with two more peers as long as the tests of this module last."""
    with hivenb.Swarm("live") as swarm:
        model = SlowModel(tmp_path_factory.mktemp("parameters"), optimizer=torch.optim.AdamW, lr=0.01)
        training = hivenb.TrainingRun(model, loader(4096, BATCH), swarm=swarm, options=OPTIONS, accelerator="cpu")
        swarm.add_local_peers(2, training)
        training.start()
        wait_for_three(training)
        yield training


@pytest.fixture(autouse=True)
def no_children_left() -> None:
    """Those of this module's run stay until its end."""


def group_sizes(run: hivenb.TrainingRun) -> list[float]:
    return [int(size) for size in run.history.snapshot().series["group_size"].values]


def wait_for_three(run: hivenb.TrainingRun) -> None:
    """Until a round of all three has come about from now on."""
    epochs = 0
    before = run.status.epoch
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert run.wait(epochs=1, timeout=PATIENCE)
        epochs += 1
        report = run.strategy.last_epoch_report
        if report.epoch > before and report.group_size == 3:
            return
    raise AssertionError(f"no round of three in {epochs} epochs: {group_sizes(run)[-epochs:]}")


@torch.no_grad()
def error_of(run: hivenb.TrainingRun) -> float:
    """Of the model as it is now, on all samples: the loss of single batches says little."""
    x, y = samples(4096)
    return float(torch.nn.functional.mse_loss(run.model.layer(x), y))


def codec_of(averager: Any) -> type:
    return type(averager.allreduce_kwargs["compression"])


#: what to change, and how the optimizer shows that it did; in an order in which each one goes with what was before
CHANGES: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = [
    ({"target_batch_size": 384}, lambda o: (o.target_batch_size, o.tracker.target_batch_size), (384, 384)),
    (
        {
            "grad_compression": "float16",
            "state_averaging_compression": "uniform8bit",
            "load_state_compression": "float16",
        },
        lambda o: (
            codec_of(o.grad_averager),
            codec_of(o.state_averager),
            type(o.state_averager.state_compression.codec),
        ),
        (Float16Compression, Uniform8BitQuantization, Float16Compression),
    ),
    (
        {"matchmaking_time": 2.0, "averaging_timeout": 15.0, "next_chunk_timeout": 6.0},
        lambda o: (
            o.grad_averager.matchmaking_kwargs["min_matchmaking_time"],
            (o.averaging_timeout, o.state_averager._allreduce_timeout),
            o.grad_averager.allreduce_kwargs["sender_timeout"],
        ),
        (2.0, (15.0, 15.0), 6.0),
    ),
    (
        {
            "allreduce_timeout": 14.0,
            "load_state_timeout": 60.0,
            "shutdown_timeout": 4.0,
            "performance_ema_alpha": 0.2,
            "verbose": True,
        },
        lambda o: (
            o.grad_averager._allreduce_timeout,
            o.load_state_timeout,
            o.state_averager.shutdown_timeout,
            o.tracker.performance_ema.alpha,
            o.status_loglevel,
        ),
        (14.0, 60.0, 4.0, 0.2, 20),
    ),
    ({"verbose": False, "batch_size": BATCH}, lambda o: o.status_loglevel, 10),
    ({"average_state_every": 2}, lambda o: o.average_state_every, 2),
    ({"delay_state_averaging": True}, lambda o: o.delay_state_averaging, True),
    ({"reuse_grad_buffers": True}, lambda o: o.grad_averager.reuse_grad_buffers, True),
    ({"reuse_grad_buffers": False}, lambda o: o.grad_averager.reuse_grad_buffers, False),
    ({"offload_optimizer": True}, lambda o: o.offload_optimizer, True),
    ({"delay_optimizer_step": True}, lambda o: o.delay_optimizer_step, True),
    ({"delay_grad_averaging": True}, lambda o: o.delay_grad_averaging, True),
    ({"delay_compensation": False}, lambda o: o.delay_compensation, False),
    ({"delay_compensation": True}, lambda o: o.delay_compensation, True),
    ({"delay_grad_averaging": False, "delay_optimizer_step": None}, lambda o: o.delay_optimizer_step, False),
    ({"offload_optimizer": None}, lambda o: o.offload_optimizer, False),
    ({"scheduler_fn": halving}, lambda o: type(o.state_averager.scheduler).__name__, "EpochSchedulers"),
    (
        {"average_opt_statistics": ("exp_avg",)},
        lambda o: (o.state_averager.opt_keys_for_averaging, len(o.state_averager._averaged_tensors)),
        (("exp_avg",), 8),
    ),
    (
        {"grad_averager_factory": partial(PowerSGDGradientAverager, averager_rank=1)},
        lambda o: isinstance(o.grad_averager, PowerSGDGradientAverager),
        True,
    ),
    (
        {"grad_averager_factory": None, "averager_opts": {"part_size_bytes": 2**17}},
        lambda o: (
            isinstance(o.grad_averager, PowerSGDGradientAverager),
            o.grad_averager.allreduce_kwargs["part_size_bytes"],
        ),
        (False, 2**17),
    ),
    (
        {
            "snapshot_every": 5,
            "auto_roll_back": True,
            "frozen_parameters": "download",
            "average_buffers": False,
            "robust_aggregation": "centered_clipping",
        },
        lambda o: (
            o.state_averager.module_buffers,
            o.grad_averager.robust_aggregation,
            o.state_averager.robust_aggregation,
        ),
        (None, "centered_clipping", "centered_clipping"),
    ),
    (
        {"average_buffers": True, "robust_aggregation": "norm_bound"},
        lambda o: (len(o.state_averager.module_buffers), o.grad_averager.robust_aggregation),
        (1, "norm_bound"),
    ),
    ({"tracker_opts": {"min_refresh_period": 0.25}}, lambda o: o.tracker.min_refresh_period, 0.25),
    ({"tracker_opts": None}, lambda o: o.tracker.min_refresh_period, 0.1),
    ({"client_mode": True}, lambda o: (o.client_mode, o.grad_averager.client_mode), (True, True)),
    ({"client_mode": None}, lambda o: (o.client_mode, o.grad_averager.client_mode), (False, False)),
    ({"use_local_updates": True}, lambda o: o.grad_averager, None),
    ({"outer_optimizer": "nesterov"}, lambda o: o.state_averager.outer.optimizer.param_groups[0]["nesterov"], True),
    (
        {"grad_compression": "float16"},
        lambda o: type(o.state_averager.pseudo_gradient_compression).__name__,
        "Float16Compression",
    ),
    (
        {"outer_optimizer": partial(torch.optim.SGD, lr=1.0)},
        lambda o: o.state_averager.outer.optimizer.param_groups[0]["lr"],
        1.0,
    ),
    ({"average_state_every": 1, "outer_fragments": 2}, lambda o: len(o.state_averager.outer_rounds.fragments), 2),
    ({"outer_fragments": 1, "outer_optimizer": None}, lambda o: o.state_averager.outer, None),
    ({"use_local_updates": False}, lambda o: o.grad_averager is not None, True),
]


def test_every_option_is_there() -> None:
    tested = {name for change, _, _ in CHANGES for name in change}
    assert set(FIELD_NAMES) - tested == {"run_id", "auxiliary"}


@pytest.mark.parametrize(
    ("changes", "find", "expected"), CHANGES, ids=[f"{n}-{next(iter(c[0]))}" for n, c in enumerate(CHANGES)]
)
def test_it_is_in_force_and_nothing_is_lost(
    run: hivenb.TrainingRun, changes: dict[str, Any], find: Callable[[Any], Any], expected: Any
) -> None:
    epoch, error, optimizer = run.status.epoch, error_of(run), run.strategy.optimizer
    assert run.apply(**changes) == run.options
    assert find(run.strategy.optimizer) == expected
    is_made_anew = any(FIELDS[name].takes_effect is TakesEffect.REBUILD for name in changes)
    assert (run.strategy.optimizer is not optimizer) == is_made_anew
    assert run.strategy.options == run.options
    assert run.pending_options is None
    assert run.status.epoch >= epoch
    if is_made_anew and not run.options.use_local_updates:  # no group is told of then
        wait_for_three(run)
    else:
        assert run.wait(epochs=1, timeout=PATIENCE)
    assert error_of(run) < max(1.2 * error, 0.1)
    assert run.status.state is RunState.TRAINING


def test_a_peer_that_only_helps_trains_again_when_told_to(run: hivenb.TrainingRun) -> None:
    run.apply(auxiliary=True, batch_size=None)
    assert run.strategy.optimizer.auxiliary
    assert run.wait(epochs=3, timeout=PATIENCE), "the local peers train on"
    assert run.strategy.last_epoch_report.samples == 0
    run.apply(auxiliary=False)
    wait_for_three(run)


def test_what_cannot_be_changed_says_so_and_the_training_goes_on(run: hivenb.TrainingRun) -> None:
    before = run.options
    with pytest.raises(OptionsError, match="would be another run"):
        run.apply(run_id="another")
    assert run.options is before
    assert run.wait(epochs=1, timeout=PATIENCE)


def failing_factory(**kwargs: Any) -> Any:
    raise MemoryError("no room for another averager")


def failing_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    optimizer.param_groups[0]["lr"] = 1e9
    raise ValueError("no such schedule")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"scheduler_fn": failing_scheduler}, ValueError),
        ({"grad_averager_factory": failing_factory}, TypeError),
        ({"scheduler_fn": halving, "average_opt_statistics": ("no_such_statistic",)}, KeyError),
    ],
    ids=["scheduler", "averager", "a scheduler, but not what comes with it"],
)
def test_what_fails_leaves_the_old_options_in_force_and_says_why(
    run: hivenb.TrainingRun, changes: dict[str, Any], error: type[Exception]
) -> None:
    before, rate = run.options, run.strategy.optimizer.opt.param_groups[0]["lr"]
    scheduler = run.strategy.optimizer.state_averager.scheduler
    with pytest.raises(error) as raised:
        run.apply(**changes)
    assert run.options_error is raised.value
    assert run.options is before
    assert run.strategy.options == before
    assert run.strategy.optimizer.state_averager.scheduler is scheduler
    assert run.strategy.optimizer.opt.param_groups[0]["lr"] == pytest.approx(rate, rel=0.1)
    assert run.wait(epochs=1, timeout=PATIENCE)


def test_it_works_paused(run: hivenb.TrainingRun) -> None:
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    codec = "float16" if run.options.grad_compression == "none" else "none"
    assert run.apply(grad_compression=codec, delay_state_averaging=False) == run.options
    assert run.status.state is RunState.PAUSED
    run.resume()
    wait_for_three(run)


#: What a restless hand may try, in any order; prerequisites come along.
POOL: dict[str, list[Any]] = {
    "target_batch_size": [256, 384, 512],
    "grad_compression": ["none", "float16", "uniform8bit", "size_adaptive"],
    "state_averaging_compression": ["none", "float16"],
    "load_state_compression": ["none", "float16"],
    "matchmaking_time": [2.0, 3.0],
    "averaging_timeout": [15.0, 20.0],
    "average_state_every": [1, 2],
    "delay_state_averaging": [False, True],
    "delay_optimizer_step": [False, True],
    "delay_grad_averaging": [False, True],
    "delay_compensation": [False, True],
    "offload_optimizer": [False, True],
    "reuse_grad_buffers": [False, True],
    "verbose": [False, True],
}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_fifty_changes_of_a_restless_hand(run: hivenb.TrainingRun) -> None:
    hand, before = random.Random(1), error_of(run)
    for _ in range(50):
        name = hand.choice(sorted(POOL))
        wanted = run.options.with_prerequisites(**{name: hand.choice(POOL[name])})
        assert run.apply(wanted) == run.options
        assert run.wait(steps=hand.randrange(1, 8), timeout=PATIENCE)
    run.apply(OPTIONS)
    for _ in range(2):
        wait_for_three(run)
    assert run.status.state is RunState.TRAINING
    assert error_of(run) < max(before, 0.1)
    assert run.history.snapshot().series["stalled_seconds"].highs.max() < 10, "all that an epoch stood still for"
    assert_agree(run)


def assert_agree(run: hivenb.TrainingRun) -> None:
    """All three peers have the same parameters at the end of some epoch from now on."""
    since, end = run.status.epoch, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert run.wait(epochs=1, timeout=PATIENCE)
        for epoch in range(since, run.status.epoch):
            files = list(run.model.folder.glob(f"{epoch}-*.pt"))
            if len(files) == 3:
                first, *others = [torch.load(file) for file in files]
                far = max(float((a - b).abs().max()) for one in others for a, b in zip(first, one, strict=True))
                if far < 1e-5:
                    return
    raise AssertionError("they never agreed")
