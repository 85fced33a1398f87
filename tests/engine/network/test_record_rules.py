"""What may stand under the keys of a run, and under others."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.access.identity import id_of, new_identity
from hivenb.engine.network.record_board import owner_of
from hivenb.engine.network.records import (
    LARGEST,
    LARGEST_PLAIN,
    LONGEST_NAME,
    RULES,
    Kind,
    RunRecords,
    is_peer_id,
    why_refused,
)

OWNER, PEER, PART = owner_of(RSAPrivateKey()), id_of(new_identity()), "0f" * 32 + "/12"

#: For each kind: a subkey, a value, and values that are none of that kind.
KINDS: dict[Kind, tuple[Any, Any, list[Any]]] = {
    Kind.PROGRESS: (OWNER, {"epoch": 3}, [7, "x", [1], True]),
    Kind.OPTIONS: (OWNER, b"{}", [7, "x", {}, True]),
    Kind.NAMES: (OWNER, {"name": "Ann"}, [7, "x", [1]]),
    Kind.MODEL: (PART, [1, b"[]"], [7, "x", {}, [1] * 5]),
    Kind.REST: (PART, [1, b"[]"], [7, "x", {}, [1] * 5]),
    Kind.RUNS: ("digits-2", True, [7, "x", 1.0, [True]]),
    Kind.MATCHMAKING: (PEER, True, [7, "x", 1.0, [True]]),
    Kind.BAN_LIST: (2**41, b"a signed list", [7, "x", {}, True, [1]]),
    Kind.SHARING: (PEER, 3.0, ["x", True, math.inf, math.nan, 10**12, [3]]),
}


def refusal(kind: Kind | None, subkey: Any, value: Any, seconds: float = 60.0) -> str | None:
    packed = MSGPackSerializer.dumps(value)
    key = DHTProtocol.IS_REGULAR_VALUE if subkey is None else MSGPackSerializer.dumps(subkey)
    return why_refused(DHTRecord(b"key", key, packed, get_dht_time() + seconds), packed, kind)


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_has_owners_values_and_an_end(kind: Kind) -> None:
    subkey, value, bad = KINDS[kind]
    assert refusal(kind, subkey, value) is None
    assert refusal(kind, subkey, None) is None, "what was withdrawn"
    assert [one for one in bad if refusal(kind, subkey, one) is None] == []
    assert refusal(kind, None, value) == "it would take the place of a dictionary"
    words = () if kind is Kind.RUNS else ("text", PART + "x", "0F" * 32 + "/1")
    for other in (*words, 7, b"bytes", PEER[:-1], OWNER + b"x", "", "x" * (LONGEST_NAME + 1)):
        assert refusal(kind, other, value) == "its subkey names no owner"
    assert refusal(kind, subkey, value, RULES[kind].longest + 60) is not None
    assert refusal(kind, subkey, value, math.inf) is not None
    assert refusal(kind, subkey, value, math.nan) is not None


def test_elsewhere_all_may_stand_that_can_be_read_is_short_and_ends() -> None:
    for subkey, value in ((None, "plain"), ("x", 7), (b"y", {"a": [1]}), (3, None)):
        assert refusal(None, subkey, value) is None
        assert refusal(None, subkey, value, 3600.0) is not None
    assert refusal(None, "x", b"x" * LARGEST) == "it is too long"
    assert refusal(None, None, b"x" * LARGEST) is None
    assert refusal(None, None, b"x" * LARGEST_PLAIN) == "it is too long"
    for rubbish in (b"", b"\xc1", b"\x91" * 2000, b"\x01\x02"):
        assert why_refused(DHTRecord(b"key", b"\x01", rubbish, get_dht_time()), rubbish, None) is not None
        assert why_refused(DHTRecord(b"key", rubbish or b"\x90", b"\x01", get_dht_time()), b"\x01", None) is not None


def test_the_keys_of_a_run_are_those_that_its_peers_use() -> None:
    kinds = RunRecords("run").kinds
    for key, kind in {
        "run_progress": Kind.PROGRESS,
        "run_options": Kind.OPTIONS,
        "run_names": Kind.NAMES,
        "run_model": Kind.MODEL,
        "run_rest": Kind.REST,
        "run_grad_averager.0b": Kind.MATCHMAKING,
        "run_state_averager.0b011010": Kind.MATCHMAKING,
        "run_state_averager.all_averagers": Kind.SHARING,
    }.items():
        assert kinds[DHTID.generate(key).to_bytes()] is kind
    assert DHTID.generate("another_progress").to_bytes() not in kinds


def test_ids_of_peers_are_told_from_other_bytes() -> None:
    assert is_peer_id(PEER)
    assert is_peer_id(b"\x12\x20" + b"x" * 32)
    for other in (b"", b"x" * 34, PEER + b"x", "text", OWNER, None):
        assert not is_peer_id(other)
