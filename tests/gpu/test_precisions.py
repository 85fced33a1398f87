"""Training on a GPU is what Lightning alone does there, in each precision and mode; and whose gradients overflow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning import Trainer
from strategy.peer import WideModel
from strategy.peers import Start, starting_peers
from tiny import DELAYS, QUIET, TinyModel, loader, own_run, parameters, trainer
from torch._inductor.async_compile import shutdown_compile_workers
from training_device import IS_CUDA, ON_A_GPU, THERE

import hivenb
from hivenb.strategy import HivemindStrategy

pytestmark = ON_A_GPU

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "offloaded": {"offload_optimizer": True},
    "reused gradient buffers": {"reuse_grad_buffers": True},
}

#: What a GPU rounds otherwise than another order of the same sums does.
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 4e-2}

#: Optimizers, and whether they are of a GPU alone.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": partial(torch.optim.AdamW, foreach=False, fused=False),
    "several at once": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "capturable": partial(torch.optim.AdamW, capturable=True),
}


@pytest.fixture
def start_peer() -> Iterator[Start]:
    with starting_peers() as start:
        yield start


def strategy(swarm: hivenb.Swarm, **kwargs: Any) -> HivemindStrategy:
    """One whose epochs are a batch of sixteen long."""
    return HivemindStrategy(16, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


def assert_as_lightning(swarm: hivenb.Swarm, make: Callable[[], Any], tolerance: float, **kwargs: Any) -> None:
    flags = {**THERE, "max_epochs": 4, **kwargs.pop("trainer", {})}
    model, plain, chosen = make(), make(), strategy(swarm, **kwargs)
    trainer(chosen, **flags).fit(model, loader(64, 16))
    Trainer(**{**QUIET, **flags}).fit(plain, loader(64, 16))
    assert chosen.hivemind_epoch == 16
    for one, other in zip(parameters(model), parameters(plain), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_it_trains_as_lightning_does(swarm: hivenb.Swarm, precision: str, mode: str) -> None:
    flags = {"precision": precision}
    assert_as_lightning(swarm, partial(TinyModel, lr=0.1), TOLERANCES[precision], trainer=flags, **MODES[mode])


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_way_of_stepping_does_the_same(swarm: hivenb.Swarm, name: str, mode: str) -> None:
    if name == "capturable" and (mode == "offloaded" or not IS_CUDA):
        pytest.skip("an optimizer that CUDA graphs capture has its parameters on the device")
    assert_as_lightning(swarm, partial(TinyModel, OPTIMIZERS[name], lr=0.05), 1e-4, **MODES[mode])


#: Ways to compile a model, of which the second captures CUDA graphs.
COMPILED: dict[str, dict[str, Any]] = {"compiled": {}, "captured": {"mode": "reduce-overhead"}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_model_trains_as_one_that_is_not(swarm: hivenb.Swarm, way: str, mode: str) -> None:
    if IS_CUDA and shutil.which("cc") is None:
        pytest.skip("torch.compile needs a compiler")
    compiled = partial(torch.compile, **(COMPILED[way] if IS_CUDA else {"backend": "eager"}))
    try:
        assert_as_lightning(swarm, lambda: compiled(TinyModel(lr=0.1)), 1e-4, **MODES[mode])
    finally:
        shutdown_compile_workers()  # torch's, which would live as long as this process


class Overflowing(WideModel):
    """Whose gradients are too large for any precision in three of eight batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx % 8 > 4 else loss


@pytest.mark.parametrize("mode", [{}, {"reuse_grad_buffers": True}], ids=["synchronous", "reused"])
def test_an_overflow_at_one_peer_is_skipped_and_the_others_go_on(start_peer: Start, mode: dict[str, Any]) -> None:
    flags = {**THERE, "precision": "16-mixed"}
    common = {"peers": 2, "epochs": 6, "target": 128, "strategy": mode, "trainer": flags, "module": WideModel}
    sound = start_peer(0, common)
    addresses = sound.wait_until(lambda: sound.addresses, "its addresses")
    overflowing = start_peer(1, {**common, "module": Overflowing}, addresses=addresses)
    for peer in (sound, overflowing):
        peer.wait_for_end()
        assert all(bool(tensor.isfinite().all()) for tensors in peer.history().values() for tensor in tensors)
    assert max(report.group_size for report in sound.reports()) == 2
    mine, theirs = (sum(report.samples for report in peer.reports()) for peer in (sound, overflowing))
    assert 0 < theirs < mine


@pytest.mark.parametrize("mode", [{}, DELAYS], ids=["synchronous", "all delays"])
def test_a_peer_on_a_gpu_and_one_on_a_cpu_end_with_the_same_parameters(start_peer: Start, mode: dict[str, Any]) -> None:
    common = {"peers": 2, "epochs": 6, "target": 128, "strategy": mode, "module": WideModel}
    here = start_peer(0, {**common, "trainer": THERE})
    there = start_peer(1, common, addresses=here.wait_until(lambda: here.addresses, "its addresses"))
    for peer in (here, there):
        peer.wait_for_end()
    assert max(report.group_size for report in here.reports()) == 2
    if not mode:  # with delays, what has been computed meanwhile is on top
        shared = sorted(here.history().keys() & there.history().keys())
        assert len(shared) > 2
        for one, other in zip(here.history()[shared[-1]], there.history()[shared[-1]], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)


def test_several_peers_train_on_one_gpu(start_peer: Start) -> None:
    common = {"peers": 3, "epochs": 4, "target": 192, "trainer": THERE, "module": WideModel}
    first = start_peer(0, common)
    addresses = first.wait_until(lambda: first.addresses, "its addresses")
    peers = [first, *(start_peer(number, common, addresses=addresses) for number in (1, 2))]
    for peer in peers:
        peer.wait_for_end()
        assert max(report.group_size for report in peer.reports()) == 3
