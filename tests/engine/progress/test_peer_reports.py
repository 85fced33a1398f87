"""What peers report of themselves, read without being one of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hivemind.utils import get_dht_time
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT
from hivenb.engine.progress.peer_reports import PeerInfo, parse_report, read_peers
from hivenb.errors import SwarmError


def store(dht: DHT, run_id: str, subkey: Any, value: Any) -> None:
    dht.store(f"{run_id}_progress", value, expiration_time=get_dht_time() + 60, subkey=subkey)


class TestReadPeers:
    def test_nobody(self, dht: DHT, run_id: str) -> None:
        assert read_peers(dht, run_id, 10) == ()

    def test_from_outside_and_from_inside(
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker(joining_dht, client_mode=False)
        tracker.report_local_progress(local_epoch=3, samples_accumulated=40)
        eventually(lambda: read_peers(dht, run_id, 10))
        (seen,) = read_peers(dht, run_id, 10)
        assert seen == PeerInfo(
            joining_dht.peer_id.to_base58(), 3, 40, seen.samples_per_second, False, seen.age, is_self=False
        )
        assert 0 <= seen.age < 30
        (own,) = read_peers(joining_dht, run_id, 10)
        assert own.is_self

    def test_this_one_comes_first(
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        for own in (joining_dht, dht):
            make_tracker(own).report_local_progress(local_epoch=0, samples_accumulated=1)
        for own in (joining_dht, dht):
            eventually(lambda own=own: len(read_peers(own, run_id, 10)) == 2)
            assert [peer.is_self for peer in read_peers(own, run_id, 10)] == [True, False]

    def test_reports_of_another_shape_are_passed_over(self, dht: DHT, run_id: str) -> None:
        good = {
            "peer_id": dht.peer_id.to_bytes(),
            "epoch": 1,
            "samples_accumulated": 2,
            "samples_per_second": 3.0,
            "time": get_dht_time(),
            "client_mode": False,
        }
        assert parse_report(good) is not None
        odd = {"epoch": [True, 1e999, 2.0, 10**30], "samples_accumulated": [False, -1], "client_mode": [1, None]}
        odd |= {"samples_per_second": [True, math.inf, math.nan, -1.0, 1e300], "time": [math.nan, math.inf, "now"]}
        odd |= {"peer_id": ["text", b"", b"x" * 10_000, 7, None]}
        for name, value in ((name, value) for name, values in odd.items() for value in values):
            assert parse_report({**good, name: value}) is None, (name, value)
        bad: list[Any] = [None, 5, "text", b"bytes", [], {}, {**good, "epoch": -1}, {**good, "epoch": "1"}]
        for number, value in enumerate([*bad, good, {k: v for k, v in good.items() if k != "time"}]):
            store(dht, run_id, number, value)
        assert [(peer.epoch, peer.samples) for peer in read_peers(dht, run_id, 10)] == [(1, 2)]

    def test_a_record_that_is_no_list_of_reports(self, dht: DHT, run_id: str) -> None:
        dht.store(f"{run_id}_progress", "hello", expiration_time=get_dht_time() + 60)
        assert read_peers(dht, run_id, 10) == ()

    @pytest.mark.process
    def test_a_dht_that_does_not_answer(self, run_id: str) -> None:
        dht = DHT(start=True, **LOOPBACK)
        try:
            dht.kill()
            with pytest.raises((SwarmError, OSError)):
                read_peers(dht, run_id, 0.5)
        finally:
            dht.shutdown()
