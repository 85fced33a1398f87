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


@pytest.mark.parametrize(
    ("bandwidth", "is_fine"),
    [(None, True), (0.0, True), (100, True), (1e-320, False), (-1.0, False), (1e300, False), ("5", False), ([], False)],
)
def test_a_bandwidth_is_one_that_a_model_can_be_shared_out_by(bandwidth: object, is_fine: bool) -> None:
    """hivemind's solver of linear programs fails with the others, and with it each round of the group."""
    own = MSGPackSerializer.dumps(3)
    assert is_readable(marked(MSGPackSerializer.dumps([bandwidth, 0, own]))) is is_fine
