"""Peers compare what the optimizer was not given, before they train."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from hivenb.engine.averaging.module_rest import ModuleRest, RestEntry
from hivenb.errors import SwarmError
from hivenb.swarm.agreement import frozen_parameters
from hivenb.swarm.agreement.frozen_parameters import difference, digest_of_rest, pack_rest, parse_rest, to_download


def rest_of(seed: int, *names: str, **kwargs: object) -> ModuleRest:
    torch.manual_seed(seed)
    return ModuleRest(nn.ModuleDict({name: nn.Linear(4, 4, bias=False, **kwargs) for name in names}), ())


def test_equal_ones_are_no_difference_whatever_wraps_the_module_and_in_whichever_order() -> None:
    ours = rest_of(0, "a", "b").entries
    assert difference(ours, ours) is None
    assert difference(ours, ours[::-1]) is None
    for prefix in ("_orig_mod.", "net._orig_mod."):
        wrapped = [RestEntry(prefix + one.name, one.shape, one.dtype, one.digests) for one in ours]
        assert difference(ours, wrapped) is None
        assert difference(wrapped, ours) is None


def test_a_difference_names_what_has_other_values_and_what_only_one_has() -> None:
    ours, theirs = rest_of(0, "a", "b").entries, rest_of(1, "b", "c").entries
    found = difference(ours, theirs)
    assert found is not None
    assert {number: one.name for number, one in found.others.items()} == {1: "b.weight"}
    assert (found.only_here, found.only_there) == (("a.weight",), ("c.weight",))


def test_small_differences_are_taken_over_and_large_ones_refused_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest, theirs = rest_of(0, "a", "b"), rest_of(1, "a", "b").entries
    found = difference(rest.entries, theirs)
    assert found is not None
    assert to_download(found, rest, "x", downloads=False) == {0: theirs[0], 1: theirs[1]}
    monkeypatch.setattr(frozen_parameters, "MOST_SENT", 100)
    assert to_download(found, rest, "x", downloads=True) == {0: theirs[0], 1: theirs[1]}
    with pytest.raises(
        SwarmError, match=r"'x': a\.weight \(float32 of shape \(4, 4\) here.*1 more.*='download'.*'own'"
    ):
        to_download(found, rest, "x", downloads=False)


def test_what_cannot_be_taken_over_is_refused() -> None:
    for kind in (RestEntry("a.weight", (4, 5), "float32", {"float32": "0"}), RestEntry("a.weight", (4, 4), "uint8")):
        rest = rest_of(0, "a")
        found = difference(rest.entries, [kind])
        assert found is not None
        with pytest.raises(SwarmError, match=r"a\.weight \(float32 of shape .* here, .* there\)") as error:
            to_download(found, rest, "x", downloads=True)
        assert "'download'" not in str(error.value)


def test_what_training_changes_comes_from_the_others_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_parameters, "MOST_SENT", 0)
    rest = rest_of(0, "a")
    moving = RestEntry("a.weight", (4, 4), "float32")
    found = difference(rest.entries, [moving])
    assert found is not None
    assert to_download(found, rest, "x", downloads=False) == {0: moving}


def board(packed: bytes) -> tuple[str, dict[str, object]]:
    digest = hashlib.sha256(packed).hexdigest()
    return digest, {f"{digest}/0": [1, packed]}


def test_a_description_is_read_as_it_was_written() -> None:
    entries = rest_of(0, "a", "b").entries
    digest, records = board(pack_rest(entries))
    assert digest == digest_of_rest(entries)
    assert parse_rest(digest, records) == entries
    assert parse_rest(digest, {}) is None


@pytest.mark.parametrize(
    "packed",
    [
        b"[" * 2000,
        b'{"a":1}',
        b'[["a",[3],"float32"]]',
        b'[["a",[3],"nn",{}]]',
        b'[["a",[-3],"float32",{}]]',
        b'[["a",[3],"float32",["x"]]]',
        b'[["a",[3],"float32",{"float32":7}]]',
        b'[["a",[3],"float32",{"float32":"' + b"0" * 33 + b'"}]]',
        b'[["a",[3],7,{}]]',
    ],
)
def test_what_is_no_description_is_passed_over(packed: bytes) -> None:
    assert parse_rest(*board(packed)) is None
