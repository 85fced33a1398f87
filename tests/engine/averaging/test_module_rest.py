"""What neither the optimizer nor the averaged buffers cover: which tensors those are, and how peers have the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hivenb.engine.averaging import module_rest
from hivenb.engine.averaging.module_rest import ModuleRest, RestEntry, digests_of


class Tuned(nn.Module):
    """A frozen base with BatchNorm, a table of positions, and a head that is tied to a part of it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head, self.tied = nn.Linear(8, 2), nn.Linear(4, 8, bias=False)
        self.tied.weight = self.base[0].weight
        self.register_buffer("table", torch.arange(8))
        self.register_buffer("cache", torch.randn(3), persistent=False)

    def rest(self) -> ModuleRest:
        return ModuleRest(self, self.head.parameters())


def test_it_is_what_the_optimizer_was_not_given_once_and_without_buffers_that_peers_average() -> None:
    names = [one.name for one in Tuned().rest().entries]
    assert names == ["base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"]
    layer = nn.Linear(3, 3)
    assert not ModuleRest(layer, layer.parameters())


def test_what_has_no_values_yet_is_left_alone() -> None:
    module = nn.ModuleList([nn.LazyLinear(3), nn.Linear(2, 2, device="meta")])
    assert not ModuleRest(module, ())


def test_digests_are_the_same_however_the_values_lie_in_memory() -> None:
    values = torch.randn(2, 3, 8, 8)
    assert digests_of(values) == digests_of(values.to(memory_format=torch.channels_last))
    assert digests_of(values) == digests_of(values.expand(2, 3, 8, 8).transpose(0, 1).contiguous().transpose(0, 1))
    other = values.clone()
    other[1, 2, 7, 7] += 1e-6
    assert digests_of(values) != digests_of(other)


def test_a_large_one_is_hashed_piece_by_piece_with_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = digests_of(values)
    monkeypatch.setattr(module_rest, "_CHUNK", 7)
    assert digests_of(values) == whole


def entry(tensor: torch.Tensor) -> RestEntry:
    return RestEntry("x", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digests_of(tensor))


@pytest.mark.parametrize("here", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("there", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_that_one_of_two_peers_has_rounded_are_the_same(here: torch.dtype, there: torch.dtype) -> None:
    if {here, there} == {torch.bfloat16, torch.float16}:
        source = torch.randn(1000).to(here)
    else:
        source = torch.randn(1000, dtype=torch.float64).float().double()
    assert entry(source.to(here)).is_same(entry(source.to(here).to(there) if here.itemsize == 2 else source.to(there)))
    assert not entry(source.to(here)).is_same(entry((source + 0.1).to(there)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor(2.0),
        torch.randint(0, 255, (6, 1), dtype=torch.uint8),
        torch.randn(4, 4).to_sparse(),
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors_of_all_kinds_have_digests(tensor: torch.Tensor) -> None:
    assert digests_of(tensor) == digests_of(tensor.clone()) != {}


class QuantState:
    """As bitsandbytes keeps beside a tensor of bytes what they mean."""

    def __init__(self, scale: float):
        self.scale = scale

    def as_dict(self, packed: bool) -> dict[str, object]:
        return {"absmax": torch.tensor([self.scale]), "kind": "nf4"}


def quantized(scale: float) -> ModuleRest:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    layer.weight.quant_state = QuantState(scale)
    return ModuleRest(layer, ())


def test_bytes_count_with_the_scales_that_give_them_a_meaning_and_do_not_travel_without_them() -> None:
    (one,), (same,), (other,) = (quantized(scale).entries for scale in (1.0, 1.0, 2.0))
    assert one.is_same(same)
    assert not one.is_same(other)
    assert not quantized(1.0).travels(0)


def transfer(source: ModuleRest, target: ModuleRest, number: int) -> bool:
    theirs = source.entries[number]
    pieces = [source.piece(number, start) for start in range(0, theirs.nbytes, module_rest.PIECE)]
    return target.take_over(number, theirs, torch.cat(pieces))


@pytest.mark.parametrize("most", [0, 2**20], ids=["from the module", "from the copy"])
def test_it_is_taken_over_piece_by_piece(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_rest, "PIECE", 16)
    monkeypatch.setattr(module_rest, "MOST_COPIED", most)
    model, joining = Tuned(1), Tuned(2).double()
    source, target = model.rest(), joining.rest()
    for number in range(len(target)):
        assert transfer(source, target, number)
        assert target.entries[number].is_same(source.entries[number])
    torch.testing.assert_close(joining.base[0].weight, model.base[0].weight.double())
    assert joining.tied.weight is joining.base[0].weight


def test_what_is_not_what_was_said_changes_nothing() -> None:
    source, joining = Tuned(1).rest(), Tuned(2)
    target, before = joining.rest(), joining.base[0].weight.clone()
    theirs = source.entries[0]
    assert not target.take_over(0, theirs, torch.zeros(theirs.nbytes, dtype=torch.uint8))
    torch.testing.assert_close(joining.base[0].weight, before)
    moving = RestEntry(theirs.name, theirs.shape, theirs.dtype)
    assert not target.take_over(0, moving, torch.full((8, 4), torch.nan).view(torch.uint8).reshape(-1))
    torch.testing.assert_close(joining.base[0].weight, before)


def test_what_a_copy_was_made_of_is_served_whatever_a_callback_puts_into_the_module() -> None:
    model = Tuned()
    rest = model.rest()
    with torch.no_grad():
        model.base[0].weight.fill_(1e4)
    assert rest.piece(0, 0).view(torch.float32).max() < 100


def test_what_training_changes_is_noticed_and_has_no_digest_from_then_on() -> None:
    model = Tuned()
    rest = model.rest()
    assert not rest.look_for_changes()
    model.base[0].weight.data.mul_(0.99)  # as a target network follows
    assert rest.look_for_changes()
    assert [one.is_moving for one in rest.entries] == [True, False, False, False]
    assert not rest.look_for_changes()
    model.base[0].weight.data.fill_(3.0)
    rest.look_for_changes()
    assert rest.piece(0, 0).view(torch.float32).unique().tolist() == [3.0]
