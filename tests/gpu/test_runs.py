"""A run in the background whose Trainer has a GPU: options that change, memory in the charts, peers on this machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel.real_kernel import CellError, Kernel
from strategy.peer import WideModel
from tiny import loader
from training_device import DEVICE, IS_CUDA, ON_A_GPU, THERE

import hivenb
from hivenb.run.status import RunState

pytestmark = [*ON_A_GPU, pytest.mark.slow]

PATIENCE = 90.0


@pytest.fixture
def run(swarm: hivenb.Swarm) -> Iterator[hivenb.TrainingRun]:
    """With a peer as a process of its own, which is started after CUDA was used here."""
    torch.ones(1, device=DEVICE).add_(1)
    options = hivenb.Options(target_batch_size=256, matchmaking_time=2.0, averaging_timeout=20.0)
    model = WideModel(optimizer=torch.optim.AdamW, lr=0.01)
    training = hivenb.TrainingRun(model, loader(4096, 8), swarm=swarm, options=options, **THERE)
    swarm.add_local_peers(1, training)
    training.start()
    assert training.wait(epochs=2, timeout=PATIENCE)
    yield training
    training.stop()


def moments(run: hivenb.TrainingRun) -> set[str]:
    """Where the state of the optimizer is."""
    optimizer = run.strategy.optimizer.opt
    return {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}


def test_each_change_of_options_takes_effect(
    run: hivenb.TrainingRun, eventually: Callable[..., None], swarm: hivenb.Swarm
) -> None:
    assert moments(run) == {DEVICE}
    for changes, place in (
        ({"offload_optimizer": True}, "cpu"),
        ({"delay_state_averaging": True, "delay_optimizer_step": True, "delay_grad_averaging": True}, "cpu"),
        ({"delay_state_averaging": False, "delay_optimizer_step": False, "delay_grad_averaging": False}, "cpu"),
        ({"offload_optimizer": False}, DEVICE),
        ({"reuse_grad_buffers": True}, DEVICE),
        ({"reuse_grad_buffers": False, "grad_compression": "float16"}, DEVICE),
    ):
        run.apply(**changes)
        assert run.wait(epochs=2, timeout=PATIENCE), changes
        eventually(lambda place=place: moments(run) == {place})
    sizes = run.history.snapshot().series["group_size"].values
    assert sizes[-1] == 2
    assert [peer.state for peer in swarm.local_peers] == ["training"]
    assert run.status.state is RunState.TRAINING


def test_memory_of_the_gpu_is_in_the_history_and_stop_and_start_go_on(
    run: hivenb.TrainingRun, eventually: Callable[..., None]
) -> None:
    if IS_CUDA:
        eventually(lambda: "gpu_memory" in run.history.snapshot().series)  # the monitor looks once a second
        assert run.history.snapshot().series["gpu_memory"].values[-1] > 0
    epoch = run.status.epoch
    run.stop()
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.status.epoch > epoch


class Large(WideModel):
    """Of four million parameters, so that what is counted is theirs."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(4, 2000), torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 2)
        )


@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")
def test_offloading_takes_the_moments_off_the_gpu_and_brings_them_back(swarm: hivenb.Swarm) -> None:
    options = hivenb.Options(target_batch_size=256, matchmaking_time=2.0)
    model = Large(optimizer=partial(torch.optim.AdamW, fused=True), lr=0.001)  # which takes no memory of its own
    parameters = sum(parameter.numel() for parameter in model.parameters())
    training = hivenb.TrainingRun(model, loader(4096, 8), swarm=swarm, options=options, **THERE)

    def bytes_each() -> float:
        assert training.wait(epochs=2, timeout=PATIENCE)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        assert training.wait(epochs=3, timeout=PATIENCE)
        return torch.cuda.max_memory_allocated() / parameters

    training.start()
    try:
        before = bytes_each()
        training.apply(offload_optimizer=True)
        assert before - bytes_each() == pytest.approx(8.0, abs=0.8)
        assert moments(training) == {"cpu"}
        training.apply(offload_optimizer=False)
        assert before - bytes_each() == pytest.approx(0.0, abs=0.8)
        assert moments(training) == {DEVICE}
        training.apply(reuse_grad_buffers=True)
        assert before - bytes_each() == pytest.approx(4.0, abs=0.8)
    finally:
        training.stop()


def test_an_interrupt_ends_the_cell_and_training_goes_on(tmp_path: Path) -> None:
    accelerator = THERE["accelerator"]
    kernel = Kernel(tmp_path)
    try:
        kernel.run(
            "import hivenb, tiny, torch\n"
            "swarm = hivenb.Swarm()\n"
            "options = hivenb.Options(target_batch_size=64, matchmaking_time=2.0)\n"
            "run = hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=options,\n"
            f"                         accelerator={accelerator!r})\n"
            f"torch.ones(1, device={DEVICE!r})\n"
            "swarm.add_local_peers(1, run)\n"
            "run.start()\n"
            "assert run.wait(epochs=2, timeout=60)"
        )
        cell = kernel.begin("run.wait()")
        time.sleep(0.5)  # it is to be in the middle of that
        kernel.interrupt()
        with pytest.raises(CellError, match="KeyboardInterrupt"):
            kernel.finish(cell)
        assert kernel.run("print(run.status.state.value, run.wait(epochs=2, timeout=60))").endswith("training True\n")
        assert kernel.run("{p.device.type for p in run.strategy.lightning_module.parameters()}") == f"{{{DEVICE!r}}}"
        kernel.run("run.stop(); swarm.close()")
    finally:
        kernel.close()
