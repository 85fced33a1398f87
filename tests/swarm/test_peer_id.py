from __future__ import annotations

from hivenb.swarm.peer_id import short_id


def test_ids_that_begin_alike_look_different():
    begin = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9"
    assert short_id(begin + "HyQ6X") == "…9HyQ6X"
    assert short_id(begin + "HyQ6Y") != short_id(begin + "HyQ6X")
