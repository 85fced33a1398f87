"""Progress: read without being one of the peers, announced, withdrawn, forgotten, and safe from what others write."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from tiny import LOOPBACK

from hivenb.engine import tracker as module
from hivenb.engine.dht import DHT
from hivenb.engine.tracker import METADATA_EXPIRATION, PeerInfo, ProgressTracker, read_peers
from hivenb.errors import SwarmError


@pytest.fixture
def make_tracker(dht: DHT, run_id: str) -> Iterator[Callable[..., ProgressTracker]]:
    made: list[ProgressTracker] = []

    def make(own: DHT = dht, **kwargs: Any) -> ProgressTracker:
        made.append(ProgressTracker(own, run_id, 100, start=True, private_key=own.private_key, **kwargs))
        return made[-1]

    yield make
    for tracker in made:
        tracker.shutdown(10)
        tracker.join(10)
        assert not tracker.is_alive()


@pytest.fixture
def other_dht(dht: DHT) -> Iterator[DHT]:
    opened = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
    yield opened
    opened.shutdown()


def store(dht: DHT, run_id: str, subkey: Any, value: Any) -> None:
    dht.store(f"{run_id}_progress", value, expiration_time=get_dht_time() + 60, subkey=subkey)


class TestReadPeers:
    def test_nobody(self, dht: DHT, run_id: str) -> None:
        assert read_peers(dht, run_id, 10) == ()

    def test_from_outside_and_from_inside(
        self, dht: DHT, other_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker(other_dht, client_mode=False)
        tracker.report_local_progress(local_epoch=3, samples_accumulated=40)
        eventually(lambda: read_peers(dht, run_id, 10))
        (seen,) = read_peers(dht, run_id, 10)
        assert seen == PeerInfo(
            other_dht.peer_id.to_base58(), 3, 40, seen.samples_per_second, False, seen.age, is_self=False
        )
        assert 0 <= seen.age < 30
        (own,) = read_peers(other_dht, run_id, 10)
        assert own.is_self

    def test_this_one_comes_first(
        self, dht: DHT, other_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        for own in (other_dht, dht):
            make_tracker(own).report_local_progress(local_epoch=0, samples_accumulated=1)
        for own in (other_dht, dht):
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
        bad: list[Any] = [None, 5, "text", b"bytes", [], {}, {**good, "epoch": -1}, {**good, "epoch": "1"}]
        for number, value in enumerate([*bad, good, {k: v for k, v in good.items() if k != "time"}]):
            store(dht, run_id, number, value)
        assert [(peer.epoch, peer.samples) for peer in read_peers(dht, run_id, 10)] == [(1, 2)]

    def test_a_record_that_is_no_list_of_reports(self, dht: DHT, run_id: str) -> None:
        dht.store(f"{run_id}_progress", "hello", expiration_time=get_dht_time() + 60)
        assert read_peers(dht, run_id, 10) == ()

    def test_a_dht_that_does_not_answer(self, run_id: str) -> None:
        dht = DHT(start=True, **LOOPBACK)
        try:
            dht.kill()
            dht.join(10)
            with pytest.raises((SwarmError, OSError)):
                read_peers(dht, run_id, 0.5)
        finally:
            dht.shutdown()


class TestTracker:
    def test_announced_before_its_first_samples(
        self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker()
        assert read_peers(dht, run_id, 10) == ()
        tracker.announce()
        eventually(lambda: [peer.samples for peer in read_peers(dht, run_id, 10)] == [0])
        eventually(lambda: tracker.global_progress.num_peers == 1)

    def test_stepping_aside_takes_it_off_the_list_until_it_reports_again(
        self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        tracker.step_aside()
        eventually(lambda: read_peers(dht, run_id, 10) == ())
        eventually(lambda: tracker.global_progress.num_peers == 0)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=2)
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)

    def test_shutting_down_says_goodbye(self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any) -> None:
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        tracker.shutdown(10)
        eventually(lambda: read_peers(dht, run_id, 10) == ())

    def test_one_that_counts_no_batches_for_long_is_not_waited_for(
        self,
        dht: DHT,
        run_id: str,
        make_tracker: Any,
        eventually: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """hivemind goes on reporting what was counted before a validation, or for a training that is stuck."""
        monkeypatch.setattr(module, "SILENCE", 1.0)
        tracker = make_tracker()
        tracker.announce()
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: read_peers(dht, run_id, 10) == ())
        tracker.report_local_progress(local_epoch=0, samples_accumulated=2)
        eventually(lambda: [peer.samples for peer in read_peers(dht, run_id, 10)] == [2])

    @pytest.mark.slow
    def test_one_that_left_without_a_goodbye_is_forgotten(
        self, dht: DHT, other_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker, samples = make_tracker(), itertools.count(1)

        def listed() -> int:
            tracker.report_local_progress(local_epoch=0, samples_accumulated=next(samples))
            return len(read_peers(dht, run_id, 10))

        report_and_vanish(other_dht, run_id)
        eventually(lambda: listed() == 2)
        eventually(lambda: listed() == 1, seconds=METADATA_EXPIRATION + 10)
        (left,) = read_peers(dht, run_id, 10)
        assert left.is_self, "the one that is there has renewed its report meanwhile"

    def test_two_in_one_process_count_as_two(
        self, make_tracker: Any, other_dht: DHT, dht: DHT, eventually: Any
    ) -> None:
        first, second = make_tracker(), make_tracker(other_dht)
        for tracker, count in ((first, 30), (second, 50)):
            tracker.report_local_progress(local_epoch=0, samples_accumulated=count)
        for tracker in (first, second):
            eventually(lambda tracker=tracker: tracker.global_progress.num_peers == 2)
            eventually(lambda tracker=tracker: tracker.global_progress.samples_accumulated == 80)

    def test_the_training_thread_does_not_wait_for_a_read_of_the_dht(
        self, dht: DHT, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker()
        reading = threading.Event()
        answer = dht.get

        def slow_get(*args: Any, **kwargs: Any) -> Any:
            future = answer(*args, **kwargs)
            if kwargs.get("return_future"):
                reading.set()
                slow: Any = type(future)()
                return slow  # of a network that never answers
            return future

        dht.get = slow_get  # type: ignore[method-assign]
        try:
            assert reading.wait(20)
            acquired = tracker.lock_global_progress.acquire(timeout=5)
            assert acquired, "it holds the lock while it waits for the network"
            tracker.lock_global_progress.release()
        finally:
            del dht.get

    def test_tells_how_many_peers_there_are_also_while_an_epoch_ends(self, make_tracker: Any, eventually: Any) -> None:
        told: list[int] = []
        tracker = make_tracker(on_look=lambda epochs: told.append(len(epochs)))
        tracker.report_local_progress(local_epoch=0, samples_accumulated=7)
        eventually(lambda: told and told[-1] == 0)
        with tracker.pause_updates():
            already = len(told)
            eventually(lambda: len(told) >= already + 2)

    def test_alone_it_soon_looks_again(self, make_tracker: Any, eventually: Any) -> None:
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: tracker.global_progress.num_peers == 1)
        assert tracker.global_progress.next_fetch_time - get_dht_time() <= tracker.default_refresh_period

    def test_what_others_write_does_not_end_it(
        self, dht: DHT, other_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker(other_dht)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=5)
        eventually(lambda: tracker.global_progress.num_peers == 1)
        for number, junk in enumerate([5, "text", {"epoch": 10**9}]):
            store(dht, run_id, number, junk)  # through a node that does not know what a report looks like
        before = tracker.global_progress
        eventually(lambda: tracker.global_progress is not before)
        assert tracker.is_alive()
        assert tracker.global_epoch == 0

    def test_what_others_wrote_before_does_not_keep_it_from_starting(
        self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        for number, junk in enumerate([5, "text", {"epoch": 10**9}]):
            store(dht, run_id, number, junk)
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=5)
        eventually(lambda: tracker.global_progress.num_peers == 1)

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
