"""Which buffers of a module peers average, and what comes of them; the rounds themselves are in another file."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hivenb.engine.averaging.extensions.buffers import MAX_INTEGERS, ModuleBuffers, averaged_numbers


class Holder(nn.Module):
    """A module with these buffers.

    :param unlisted: names of those that are not persistent
    """

    def __init__(self, unlisted: tuple[str, ...] = (), **buffers: Any):
        super().__init__()
        for name, value in buffers.items():
            value = value if torch.is_tensor(value) else torch.tensor(value)
            self.register_buffer(name, value, persistent=name not in unlisted)


def averaged(module: nn.Module, *averages: Any) -> list[str]:
    """Lets a round make this of a module's buffers, after it was loaded."""
    buffers = ModuleBuffers(module)
    buffers.load()
    return finish(buffers, *averages)


def finish(buffers: ModuleBuffers, *averages: Any) -> list[str]:
    assert len(averages) == len(buffers.tensors)
    for tensor, average in zip(buffers.tensors, averages, strict=True):
        tensor.copy_(torch.tensor(average, dtype=torch.float64))
    return buffers.apply()


class TestWhich:
    def test_those_of_batch_norm(self) -> None:
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
        buffers = ModuleBuffers(module)
        statistics, counts = buffers.tensors
        assert statistics.tolist() == [0, 0, 0, 1, 1, 1]
        assert counts.tolist() == [0]
        assert [key.takes_largest for key in buffers.keys] == [False, True]
        assert averaged_numbers(module) == (6, 1)

    def test_none_of_a_module_without_any(self) -> None:
        assert not ModuleBuffers(nn.Linear(3, 3))
        assert ModuleBuffers(nn.Linear(3, 3)).tensors == ()

    def test_none_that_are_derived_empty_or_of_another_kind(self) -> None:
        module = Holder(
            ("rotary",),
            rotary=[1.0],
            empty=torch.zeros(0),
            sparse=torch.eye(3).to_sparse(),
            nowhere=torch.zeros(3, device="meta"),
        )
        module.register_buffer("none", None)
        assert not ModuleBuffers(module)
        assert len(ModuleBuffers(nn.LazyBatchNorm1d())) == 1  # its count

    def test_one_that_is_shared_counts_once(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        module[1].running_mean = module[0].running_mean
        assert ModuleBuffers(module).tensors[0].numel() == 6
        assert ModuleBuffers(nn.Sequential(module[0], module[0])).tensors[0].numel() == 4

    def test_none_that_are_averaged_otherwise(self) -> None:
        module = nn.BatchNorm1d(2)
        assert ModuleBuffers(module, without=[module.running_mean]).tensors[0].tolist() == [1, 1]

    def test_large_integers_complex_numbers_and_bytes_of_floats_are_constants(self) -> None:
        module = Holder(
            positions=torch.arange(MAX_INTEGERS + 1),
            turns=torch.tensor([1j]),
            tiny=torch.ones(2).to(torch.float8_e4m3fn),
            count=7,
        )
        buffers = ModuleBuffers(module)
        assert len(buffers) == 4
        assert [tensor.tolist() for tensor in buffers.tensors] == [[7.0]]

    def test_peers_can_tell_whether_they_have_the_same(self) -> None:
        def fingerprint(*modules: nn.Module) -> str:
            return ModuleBuffers(nn.Sequential(*modules)).fingerprint

        assert fingerprint(nn.BatchNorm1d(2)) == fingerprint(nn.Linear(2, 2), nn.BatchNorm1d(2).bfloat16())
        assert fingerprint(nn.BatchNorm1d(2)) != fingerprint(nn.BatchNorm1d(3))
        assert fingerprint(nn.BatchNorm1d(2)) != fingerprint(nn.BatchNorm1d(2).double())


class TestRounds:
    def test_the_module_has_the_average_afterwards(self) -> None:
        module = Holder(mean=[1.0, 2.0], rough=torch.ones(1, dtype=torch.bfloat16), count=3, is_set=False)
        assert averaged(module, [5.0, 2.0, 1.5], [8, 1]) == []
        assert module.mean.tolist() == [5, 2]
        assert module.rough.tolist() == [1.5]
        assert module.rough.dtype == torch.bfloat16
        assert (int(module.count), bool(module.is_set)) == (8, True)

    def test_doubles_and_large_counts_are_exact(self) -> None:
        third = torch.tensor([1 / 3], dtype=torch.float64)
        module = Holder(third=third, count=2**53 - 1)
        assert averaged(module, [2 / 3], [2**53]) == []
        assert module.third.item() == 2 / 3
        assert int(module.count) == 2**53

    def test_what_was_added_meanwhile_stays(self) -> None:
        module = Holder(mean=[10.0, 10.0], count=5)
        buffers = ModuleBuffers(module)
        buffers.load()
        module.mean += torch.tensor([2.0, 0.0])
        module.count += 3
        finish(buffers, [0.0, 0.0], [6])
        assert module.mean.tolist() == [2, 0]
        assert int(module.count) == 8

    def test_a_variance_stays_between_what_it_is_and_the_average(self) -> None:
        module = Holder(variance=[10.0, 10.0])
        buffers = ModuleBuffers(module)
        buffers.load()
        module.variance.copy_(torch.tensor([1.0, 30.0]))
        finish(buffers, [5.0, 60.0])
        assert module.variance.tolist() == [1.0, 60.0]

    def test_one_that_is_another_tensor_by_now_is_found(self) -> None:
        module = Holder(mean=[1.0])
        buffers = ModuleBuffers(module)
        module.mean = torch.tensor([3.0])
        buffers.load()
        assert buffers.tensors[0].tolist() == [3.0]
        finish(buffers, [4.0])
        assert module.mean.tolist() == [4.0]

    def test_one_of_another_shape_by_now_is_left_alone(self) -> None:
        module = Holder(mean=[1.0], queue=[1.0])
        buffers = ModuleBuffers(module)
        assert buffers.are_as_described
        module.queue = torch.ones(2)
        assert not buffers.are_as_described
        assert buffers.state() is None
        buffers.load()
        finish(buffers, [4.0, 4.0])
        assert (module.mean.tolist(), module.queue.tolist()) == ([4], [1, 1])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_goes_to_nobody_and_is_mended(self, bad: float) -> None:
        module = nn.BatchNorm1d(2)
        buffers = ModuleBuffers(module)
        buffers.load()
        module.running_mean[0] = bad
        buffers.load()
        assert buffers.tensors[0].tolist() == [0, 0, 1, 1]
        assert finish(buffers, [3.0, 3.0, 1.0, 1.0], [0]) == ["running_mean"]
        assert module.running_mean.tolist() == [3, 3]

    def test_a_mask_of_infinities_stays_as_it_is(self) -> None:
        module = Holder(mask=[0.0, -math.inf])
        buffers = ModuleBuffers(module)
        for _ in range(2):
            buffers.load()
            assert finish(buffers, [0.0, math.nan]) == []  # which is what all-reduce makes of infinities
            assert module.mask.tolist() == [0, -math.inf]

    def test_what_has_not_changed_is_not_written_to(self) -> None:
        module = nn.BatchNorm1d(2)
        version = module.running_mean._version
        averaged(module, [0.0, 0.0, 1.0, 2.0], [0])
        assert module.running_mean._version == version
        assert module.running_var.tolist() == [1, 2]


class TestDownload:
    def test_a_newcomer_gets_all_of_them(self) -> None:
        ours, theirs = (
            Holder(mean=[value, value], rough=torch.tensor([value]).half(), positions=torch.arange(2000) + int(value))
            for value in (3.0, 0.0)
        )
        state = ModuleBuffers(ours).state()
        buffers = ModuleBuffers(theirs)
        assert buffers.load_state(state)
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name])
            assert value.dtype == theirs.state_dict()[name].dtype
        assert buffers.tensors[0].tolist() == [3, 3, 3]

    def test_one_that_repeats_its_numbers_can_be_written(self) -> None:
        ours, theirs = (Holder(index=torch.full((1,), value).expand(3)) for value in (5, 0))
        assert ModuleBuffers(theirs).load_state(ModuleBuffers(ours).state())
        assert theirs.index.tolist() == [5, 5, 5]

    def test_one_made_in_inference_mode_can_be_written(self) -> None:
        module = Holder(mean=[0.0])
        with torch.inference_mode():
            module.mean = torch.tensor([1.0])
        assert ModuleBuffers(module).load_state([torch.tensor([2.0])])
        assert module.mean.tolist() == [2.0]

    def test_what_does_not_fit_changes_nothing(self) -> None:
        module = nn.BatchNorm1d(2)
        assert not ModuleBuffers(module).load_state([torch.ones(2)])
        assert not ModuleBuffers(module).load_state([torch.ones(3), torch.ones(2), torch.tensor(1)])
        assert module.running_mean.tolist() == [0, 0]
