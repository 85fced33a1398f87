"""What is packed in values of others: read within bounds, and never the end of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import get_dht_time

from hivenb.engine.network.values import MOST_NESTED, BoundedSerializer

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


@pytest.mark.process
def test_without_the_bound_it_ends_a_process() -> None:
    """Else there would be nothing to be bounded."""
    read = "from hivemind.utils import MSGPackSerializer; import hivemind, sys"
    read += "; MSGPackSerializer.loads(sys.stdin.buffer.read())"
    done = subprocess.run([sys.executable, "-c", read], input=packed(900, DESCRIPTOR), capture_output=True, timeout=60)
    assert done.returncode < 0, "by a signal"
    bound = f"from hivenb.engine.network.values import bound_this_process; bound_this_process(); {read}"
    done = subprocess.run([sys.executable, "-c", bound], input=packed(900, DESCRIPTOR), capture_output=True, timeout=60)
    assert b"ValueError" in done.stderr


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


@pytest.mark.process
def test_an_id_that_is_none_is_refused_at_once_where_all_of_hivemind_is_bounded() -> None:
    code = (
        "import time; from hivemind.p2p import PeerID; from hivenb.engine.network.values import *\n"
        "bound_this_process(); assert PeerID(bytes(LONGEST_ID)).to_bytes() == bytes(LONGEST_ID)\n"
        "began = time.monotonic()\ntry: PeerID(bytes([255]) * 200_000)\n"
        "except ValueError as e: print(e, time.monotonic() - began < 1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "a peer's id of 200000 bytes True\n", done.stderr
