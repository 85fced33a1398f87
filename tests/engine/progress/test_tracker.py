"""Progress: announced, reported when others would reckon wrongly, withdrawn, forgotten; safe from what others write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT
from hivenb.engine.progress.failure_detector import AS_RECKONED
from hivenb.engine.progress.peer_reports import read_peers
from hivenb.engine.progress.tracker import METADATA_EXPIRATION, ProgressTracker


def store(dht: DHT, run_id: str, subkey: Any, value: Any) -> None:
    dht.store(f"{run_id}_progress", value, expiration_time=get_dht_time() + 60, subkey=subkey)


@contextlib.contextmanager
def silence(dht: DHT) -> Iterator[threading.Event]:
    """Lets the network not answer; tells of the first read."""
    reading = threading.Event()
    answer = dht.get

    def slow_get(*args: Any, **kwargs: Any) -> Any:
        future = answer(*args, **kwargs)
        if kwargs.get("return_future"):
            reading.set()
            slow: Any = type(future)()
            return slow
        return future

    dht.get = slow_get  # type: ignore[method-assign]
    try:
        yield reading
    finally:
        del dht.get


class TestTracker:
    def test_announced_before_its_first_samples(
        self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker()
        assert read_peers(dht, run_id, 10) == ()
        tracker.announce()
        eventually(lambda: [peer.samples for peer in read_peers(dht, run_id, 10)] == [0])
        eventually(lambda: tracker.global_progress.num_peers == 1)

    def test_shutting_down_says_goodbye(self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any) -> None:
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        tracker.shutdown(10)
        eventually(lambda: read_peers(dht, run_id, 10) == ())

    def test_two_in_one_process_count_as_two(
        self, make_tracker: Any, joining_dht: DHT, dht: DHT, eventually: Any
    ) -> None:
        first, second = make_tracker(), make_tracker(joining_dht)
        for tracker, count in ((first, 30), (second, 50)):
            tracker.report_local_progress(local_epoch=0, samples_accumulated=count)
        for tracker in (first, second):
            eventually(lambda tracker=tracker: tracker.global_progress.num_peers == 2)
            eventually(lambda tracker=tracker: tracker.global_progress.samples_accumulated == 80)

    def test_tells_who_has_gone_while_a_read_of_the_dht_waits_for_it(
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        told: list[tuple[int, frozenset[bytes]]] = []
        tracker = make_tracker(on_look=lambda reports, gone: told.append((len(reports), gone)) or frozenset())
        tracker.report_local_progress(local_epoch=0, samples_accumulated=7)
        report_and_vanish(joining_dht, run_id)
        eventually(lambda: (1, frozenset()) in told)
        eventually(lambda: tracker.list._detector._sightings[joining_dht.peer_id.to_bytes()].was_reached)
        with silence(dht) as reading:
            assert reading.wait(20)
            joining_dht.kill()
            eventually(lambda: told[-1] == (0, {joining_dht.peer_id.to_bytes()}))

    @pytest.mark.process
    def test_a_dht_that_is_closed_first_ends_it_quietly(
        self, run_id: str, capfd: pytest.CaptureFixture[str], eventually: Any
    ) -> None:
        dht = DHT(start=True, **LOOPBACK)
        tracker = ProgressTracker(dht, run_id, 100, start=True)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        dht.shutdown()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=2)
        tracker.shutdown(10)
        tracker.join(20)
        assert not tracker.is_alive()
        assert "Traceback" not in capfd.readouterr().err


def report_and_vanish(dht: DHT, run_id: str) -> None:
    """What a peer that is killed leaves in the DHT."""
    report = {
        "peer_id": dht.peer_id.to_bytes(),
        "epoch": 0,
        "samples_accumulated": 9,
        "samples_per_second": 1.0,
        "time": get_dht_time(),
        "client_mode": False,
    }
    assert dht.store(
        f"{run_id}_progress",
        report,
        expiration_time=get_dht_time() + METADATA_EXPIRATION,
        subkey=RSASignatureValidator(dht.private_key).local_public_key,
    )


class NoSwarm:
    """In place of a DHT: nobody is there."""

    peer_id, client_mode = PeerID(b"\x12\x20" + bytes(32)), False

    def add_validators(self, validators: object) -> None:
        pass

    def get(self, key: str, **kwargs: Any) -> None:
        return None


def tracker_at_rest() -> ProgressTracker:
    """One that does nothing by itself."""
    own: Any = NoSwarm()
    return ProgressTracker(own, "run", 100, start=False)


@pytest.mark.parametrize(
    ("remaining", "peers", "is_waited_for", "is_ready"),
    [
        (0.6, 2, True, False),
        (0.4, 2, True, True),
        (0.4, 2, False, False),
        (-0.1, 2, False, True),
        (0.4, 1, True, False),
    ],
    ids=["most of a batch", "less than half a batch", "nobody waits", "over", "alone"],
)
def test_an_epoch_ends_with_the_batch_whose_end_is_nearest(
    remaining: float, peers: int, is_waited_for: bool, is_ready: bool
) -> None:
    tracker = tracker_at_rest()
    tracker.performance_ema.samples_per_second = 10.0
    tracker._batch_size, tracker.is_waited_for = 10, is_waited_for  # a batch takes a second
    progress = tracker.global_progress
    progress.num_peers, progress.samples_accumulated = peers, 50
    progress.eta_next_epoch = get_dht_time() + remaining
    assert tracker.ready_to_update_epoch is is_ready


def test_what_was_announced_or_withdrawn_is_reported_at_once() -> None:
    tracker = tracker_at_rest()
    tracker._reported = tracker.local_progress
    assert tracker._report_due_after == AS_RECKONED
    tracker.announce()
    assert tracker._report_due_after == 0.0
    tracker._announced.clear()
    assert tracker._report_due_after == AS_RECKONED
    tracker.step_aside()
    assert tracker._report_due_after == 0.0
