from __future__ import annotations

import math

import pytest
from hivemind.utils import MSGPackSerializer

from hivenb.engine.rounds.gathered import LONGEST_GATHER, epoch_of, is_marked, is_readable, marked

dumps = MSGPackSerializer.dumps


def test_what_peers_send_is_readable_marked_or_not():
    theirs = dumps([None, 0, dumps(7)])
    assert is_readable(theirs)
    assert is_readable(marked(theirs))
    assert is_readable(dumps([0.0, 1, dumps(None)]))
    assert epoch_of(theirs) is None
    assert epoch_of(marked(theirs)) == 7
    assert is_marked(MSGPackSerializer.loads(marked(theirs)))


@pytest.mark.parametrize(
    "gather",
    [
        b"",
        b"\xc1",
        dumps("text"),
        dumps(7),
        dumps([1.0]),
        dumps([1.0, 99, dumps(1)]),
        dumps([math.nan, 0, dumps(1)]),
        dumps([math.inf, 0, dumps(1)]),
        dumps([-1.0, 0, dumps(1)]),
        dumps(["x", 0, dumps(1)]),
        dumps([1.0, 0, b"\xc1"]),
        dumps([1.0, 0, 5]),
        b"\x91" * 100_000,
        dumps([1.0, 0, dumps(b"x" * LONGEST_GATHER)]),
    ],
)
def test_what_no_group_can_begin_with_is_not(gather: bytes):
    assert not is_readable(gather)
