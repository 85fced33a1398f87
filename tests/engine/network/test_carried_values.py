"""What is packed in values of others: read within bounds, and never the end of a process."""

from __future__ import annotations

import time

import forked
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.network.untrusted_values import LONGEST_ID, MOST_NESTED, BoundedSerializer, bound_this_process

TUPLE, DICTIONARY, DESCRIPTOR = 0x40, 0x50, 0x51


def packed(depth: int, code: int) -> bytes:
    """A value in a value, and so on."""
    inner = b"\xc0"
    for _ in range(depth):
        wrapped = b"\x91" + inner
        inner = b"\xc9" + len(wrapped).to_bytes(4, "big") + bytes([code]) + wrapped
    return inner


@pytest.mark.parametrize("code", [TUPLE, DICTIONARY, DESCRIPTOR])
@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 100, 900, 100_000])
def test_too_much_in_each_other_is_refused(code: int, depth: int) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"packed|mixture|recursion|Unpack"):
            BoundedSerializer.loads(packed(min(depth, 900), code))
    assert BoundedSerializer.loads(BoundedSerializer.dumps((1, (2, 3)))) == (1, (2, 3)), "afterwards as before"


def read(bounded: bool) -> None:
    if bounded:
        bound_this_process()
    MSGPackSerializer.loads(packed(900, DESCRIPTOR))


@pytest.mark.process
def test_without_the_bound_it_ends_a_process() -> None:
    """Else there would be nothing to be bounded."""
    assert forked.run(read, False).code < 0, "by a signal"
    assert "ValueError" in forked.run(read, True).err


@pytest.mark.parametrize("value", [(), (1, ("a", (b"b", None))), [{"betas": (0.9, 0.999)}], tuple(range(1000))])
def test_what_peers_need_is_read(value: object) -> None:
    assert BoundedSerializer.loads(BoundedSerializer.dumps(value)) == value


def test_a_dictionary_of_records_is_read() -> None:
    sent = DictionaryDHTValue()
    sent.store("subkey", b"value", get_dht_time() + 60)
    read = BoundedSerializer.loads(BoundedSerializer.dumps(sent))
    assert isinstance(read, DictionaryDHTValue)
    assert read.get("subkey") == sent.get("subkey")


@pytest.mark.parametrize(
    "carried", [5, [1, 2], [None, 0, 3], [None, 0, [[[], b"", 0.0]]], [None, 0, [["a", b"", "b"]] * 2]]
)
def test_what_is_no_dictionary_of_records_is_refused(carried: object) -> None:
    raw = BoundedSerializer.dumps(carried)
    with pytest.raises(ValueError, match=r"cannot be read|values to unpack"):
        BoundedSerializer.loads(b"\xc8" + len(raw).to_bytes(2, "big") + bytes([DICTIONARY]) + raw)


def make_a_long_id() -> None:
    bound_this_process()
    assert PeerID(bytes(LONGEST_ID)).to_bytes() == bytes(LONGEST_ID)
    began = time.monotonic()
    with pytest.raises(ValueError, match="a peer's id of 200000 bytes"):
        PeerID(bytes([255]) * 200_000)
    assert time.monotonic() - began < 1.0


@pytest.mark.process
def test_an_id_that_is_none_is_refused_at_once_where_all_of_hivemind_is_bounded() -> None:
    done = forked.run(make_a_long_id)
    assert done.code == 0, done.err
