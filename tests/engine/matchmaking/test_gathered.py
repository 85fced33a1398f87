from __future__ import annotations

import math

import pytest
from fuzzing.averager_without_process import EVIL, GOOD, OWN, gathered
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from hivenb.engine.matchmaking.group_records import (
    GROUP_ID_BYTES,
    LARGEST_GROUP,
    LONGEST_GATHER,
    epoch_of,
    is_marked,
    is_readable,
    marked,
    why_no_group,
)

dumps = MSGPackSerializer.dumps

GROUP = bytes(range(GROUP_ID_BYTES))

MANY = tuple(PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(LARGEST_GROUP + 1))


def announced(*peers: PeerID, said: list[bytes] | None = None, group: bytes = GROUP) -> averaging_pb2.MessageFromLeader:
    """A group of those peers, as its leader announces it."""
    return averaging_pb2.MessageFromLeader(
        code=averaging_pb2.BEGIN_ALLREDUCE,
        group_id=group,
        ordered_peer_ids=[peer.to_bytes() for peer in peers],
        gathered=[gathered() for _ in peers] if said is None else said,
    )


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


@pytest.mark.parametrize("peers", [(EVIL, OWN), (OWN, GOOD, EVIL), (OWN, *MANY[1:-1])], ids=len)
def test_a_group_is_of_this_peer_and_some_others(peers: tuple[PeerID, ...]) -> None:
    assert why_no_group(announced(*peers), OWN) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (announced(EVIL, GOOD), "not in it"),
        (announced(OWN, GOOD, GOOD, EVIL), "twice"),
        (announced(OWN, OWN, EVIL), "twice"),
        (announced(OWN, *MANY[1:]), "more than 512"),
        (announced(OWN, EVIL, said=[gathered()]), "1 of its 2"),
        (announced(OWN, EVIL, said=[gathered(), b"nonsense"]), "nobody can have said"),
        (announced(OWN, EVIL, group=b""), "0 bytes"),
        (announced(OWN, EVIL, group=GROUP[:4]), "4 bytes"),
    ],
)
def test_what_is_no_group_is_told(message: averaging_pb2.MessageFromLeader, reason: str) -> None:
    assert reason in str(why_no_group(message, OWN))
