"""Copies between a device and main memory are those of torch, and main memory is pinned for them and let go again."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from hivenb.engine.averaging import staging
from hivenb.engine.averaging.staging import Staging

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: On both sides, and as many numbers as a page has or fewer.
SHAPES = [(3,), (64, 5), (1000, 1000), (0,)]


def test_without_a_gpu_it_copies_as_torch_does() -> None:
    sources = [torch.rand(shape, dtype=torch.float64) for shape in SHAPES]
    targets = [torch.zeros(shape, requires_grad=True) for shape in SHAPES]
    copying = Staging()
    copying.copy(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.float())
        assert not target.is_pinned()
    copying.close()
    copying.close()


def test_what_does_not_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Staging().copy([torch.zeros(1)], [])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_copied_there_and_back_is_the_same(dtype: torch.dtype) -> None:
    there = [torch.rand(shape, device="cuda").to(dtype) for shape in SHAPES]
    here = [torch.zeros(shape).share_memory_() for shape in SHAPES]
    back = [torch.zeros_like(one) for one in there]
    copying = Staging()
    for factor in (1, 3, 7):
        computed = [one * factor for one in there]  # not before the copy asks for it, perhaps
        copying.copy(computed, here)
        assert all(torch.equal(one, other.float().cpu()) for one, other in zip(here, computed, strict=True))
        copying.copy(here, back)
        for one in here:
            one.zero_()  # it is there already
        assert all(torch.equal(one, other) for one, other in zip(back, computed, strict=True))
    copying.close()


@pytest.mark.gpu
@pytest.mark.process
@on_gpu
@pytest.mark.parametrize("by", ["close", "garbage"])
def test_main_memory_is_pinned_until_the_end(by: str) -> None:
    here = [torch.zeros(3000).share_memory_(), torch.zeros(5), torch.zeros(2**20)]
    copying = Staging()
    copying.copy([torch.ones_like(one, device="cuda") for one in here], here)
    assert [one.is_pinned() for one in here] == [True, False, True]
    if (fork := os.fork()) == 0:
        copying.close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert here[0].is_pinned()
    if by == "close":
        copying.close()
    del copying
    gc.collect()
    assert [one.is_pinned() for one in here] == [False] * 3


@pytest.mark.gpu
@on_gpu
def test_what_cannot_be_pinned_is_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.zeros(3000).share_memory_(), torch.rand(3000).cuda()
    first, second = Staging(), Staging()
    first.copy([there], [here])
    here.zero_()
    said: list[str] = []
    monkeypatch.setattr(staging.logger, "warning", said.append)
    second.copy([there], [here])
    second.copy([there], [here])
    assert torch.equal(here, there.cpu())
    assert float((there * 2).sum()) > 0  # what CUDA said is not said of this
    assert len(said) == 1
    assert "already" in said[0]
    second.close()
    assert here.is_pinned()
    first.close()
