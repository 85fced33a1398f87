"""The strategy's further keywords reach whoever takes them, and nobody's are swallowed."""

from __future__ import annotations

import inspect

import hivemind
import pytest
from hivemind.p2p import P2P

from hivenb.errors import OptionsError
from hivenb.options import FIELDS
from hivenb.strategy.checks import SortedKeywords, sort_keywords


def test_none() -> None:
    assert sort_keywords({}) == SortedKeywords()


def test_each_to_its_own() -> None:
    sorted_ = sort_keywords(
        {
            "grad_compression": "float16",
            "average_state_every": 2,
            "client_mode": True,
            "extra_tensors": (),
            "startup_timeout": 99.0,
            "identity_path": "key",
            "announce_maddrs": ["/ip4/1.2.3.4/tcp/1"],
            "record_validators": [],
            "num_workers": 2,
            "cache_size": 10,
        }
    )
    assert set(sorted_.options) == {"grad_compression", "average_state_every", "client_mode"}
    assert sorted_.optimizer == {"extra_tensors": ()}
    assert set(sorted_.dht) == {
        "startup_timeout",
        "identity_path",
        "announce_maddrs",
        "record_validators",
        "num_workers",
        "cache_size",
    }


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_option_is_one(name: str) -> None:
    assert sort_keywords({name: 1}).options == {name: 1}


def test_everything_that_hivemind_takes_has_a_home() -> None:
    ours = {"self", "dht", "optimizer", "params", "scheduler", "batch_size_per_step"}
    for name in set(inspect.signature(hivemind.Optimizer.__init__).parameters) - ours:
        sort_keywords({name: None})
    for name in set(inspect.signature(P2P.create).parameters) - {"host_maddrs", "kwargs"}:
        sort_keywords({name: None})


@pytest.mark.parametrize("name", ["no_such_keyword", "optimizer", "params", "scheduler", "start", "p2p", "self", "dht"])
def test_an_unknown_one_is_refused_with_a_list_of_those_that_are_known(name: str) -> None:
    with pytest.raises(OptionsError) as caught:
        sort_keywords({"verbose": True, name: 1})
    message = str(caught.value)
    assert f"does not know '{name}'." in message
    for known in ("grad_compression", "extra_tensors", "startup_timeout", "identity_path", "announce_maddrs"):
        assert known in message
    assert "'verbose'" not in message


def test_all_unknown_ones_are_named_at_once() -> None:
    with pytest.raises(OptionsError, match=r"does not know 'one', 'two'\."):
        sort_keywords({"one": 1, "two": 2})
