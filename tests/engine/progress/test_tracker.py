"""Progress: announced, reported when others would reckon wrongly, withdrawn, forgotten; safe from what others write."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT
from hivenb.engine.progress import failure_detector
from hivenb.engine.progress import tracker as module
from hivenb.engine.progress.failure_detector import AS_RECKONED
from hivenb.engine.progress.peer_reports import read_peers
from hivenb.engine.progress.tracker import METADATA_EXPIRATION, ProgressTracker
from hivenb.errors import SwarmError


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
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker, samples = make_tracker(metadata_expiration=5.0), itertools.count(1)

        def listed() -> int:
            tracker.report_local_progress(local_epoch=0, samples_accumulated=next(samples))
            return len(read_peers(dht, run_id, 10))

        report_and_vanish(joining_dht, run_id, expiration=5.0)
        eventually(lambda: listed() == 2, seconds=4)
        eventually(lambda: listed() == 1)
        (left,) = read_peers(dht, run_id, 10)
        assert left.is_self, "the one that is there has renewed its report meanwhile"

    def test_two_in_one_process_count_as_two(
        self, make_tracker: Any, joining_dht: DHT, dht: DHT, eventually: Any
    ) -> None:
        first, second = make_tracker(), make_tracker(joining_dht)
        for tracker, count in ((first, 30), (second, 50)):
            tracker.report_local_progress(local_epoch=0, samples_accumulated=count)
        for tracker in (first, second):
            eventually(lambda tracker=tracker: tracker.global_progress.num_peers == 2)
            eventually(lambda tracker=tracker: tracker.global_progress.samples_accumulated == 80)

    def test_the_training_thread_does_not_wait_for_a_read_of_the_dht(
        self, dht: DHT, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker()
        with silence(dht) as reading:
            assert reading.wait(20)
            acquired = tracker.lock_global_progress.acquire(timeout=5)
            assert acquired, "it holds the lock while it waits for the network"
            tracker.lock_global_progress.release()

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

    def test_its_newest_look_tells_any_thread_who_is_there(
        self, dht: DHT, joining_dht: DHT, make_tracker: Any, eventually: Any
    ) -> None:
        tracker, other = make_tracker(), make_tracker(joining_dht)
        eventually(lambda: tracker.look is not None)
        assert tracker.look.peers == (), "nobody has announced itself yet"
        other.report_local_progress(local_epoch=0, samples_accumulated=40)
        eventually(lambda: [(peer.samples, peer.is_self) for peer in tracker.look.peers] == [(40, False)])
        tracker.report_local_progress(local_epoch=0, samples_accumulated=7)
        eventually(lambda: [(peer.samples, peer.is_self) for peer in tracker.look.peers] == [(7, True), (40, False)])
        look = tracker.look
        assert [peer.peer_id for peer in look.peers] == [one.peer_id.to_base58() for one in (dht, joining_dht)]
        assert (look.gone, tracker.unanswered_for < 5) == (frozenset(), True)
        assert 0 <= time.monotonic() - look.taken_at < 20

    def test_one_that_has_stepped_aside_goes_on_looking_at_the_others(
        self, joining_dht: DHT, make_tracker: Any, eventually: Any
    ) -> None:
        tracker, other = make_tracker(), make_tracker(joining_dht)
        for one in (tracker, other):
            one.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: tracker.look is not None and len(tracker.look.peers) == 2)
        tracker.step_aside()
        eventually(lambda: [peer.is_self for peer in tracker.look.peers] == [False])
        other.report_local_progress(local_epoch=0, samples_accumulated=5)
        eventually(lambda: [peer.samples for peer in tracker.look.peers] == [5])

    def test_its_look_tells_who_has_gone_and_says_no_more_of_when_the_dht_answered(
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker, killed = make_tracker(), joining_dht.peer_id.to_base58()
        report_and_vanish(joining_dht, run_id)
        eventually(lambda: tracker.look is not None and [peer.peer_id for peer in tracker.look.peers] == [killed])
        eventually(lambda: tracker.list._detector._sightings[joining_dht.peer_id.to_bytes()].was_reached)
        with silence(dht) as reading:
            assert reading.wait(20)
            before = tracker.look
            joining_dht.kill()
            eventually(lambda: tracker.look.gone == {killed})
            assert (tracker.look.taken_at, tracker.look.peers) == (before.taken_at, before.peers)
            eventually(lambda: tracker.unanswered_for > 1)
            assert before.gone == frozenset(), "a look is a value"
        tracker.shutdown(10)
        assert tracker.unanswered_for == 0

    def test_tells_how_many_peers_there_are_also_while_an_epoch_ends(self, make_tracker: Any, eventually: Any) -> None:
        told: list[int] = []
        tracker = make_tracker(on_look=lambda reports, gone: told.append(len(reports)) or frozenset())
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
        self, dht: DHT, joining_dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        tracker = make_tracker(joining_dht)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=5)
        eventually(lambda: tracker.global_progress.num_peers == 1)
        for number, junk in enumerate([5, "text", {"epoch": 10**9}]):
            store(dht, run_id, number, junk)  # through a node that does not know what a report looks like
        before = tracker.global_progress
        eventually(lambda: tracker.global_progress is not before)
        assert tracker.is_alive()
        assert tracker.global_epoch == 0

    def test_an_error_of_its_own_that_ends_it_is_told_at_the_next_batch(
        self, make_tracker: Any, eventually: Any
    ) -> None:
        def fail(*args: Any) -> None:
            raise RuntimeError("a bug")

        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        tracker.on_look = fail
        tracker.look_at_once()
        eventually(lambda: not tracker.is_alive())
        with pytest.raises(SwarmError, match=r"follows the swarm has ended with RuntimeError\('a bug'\)"):
            tracker.report_local_progress(local_epoch=0, samples_accumulated=2)

    def test_what_others_wrote_before_does_not_keep_it_from_starting(
        self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any
    ) -> None:
        for number, junk in enumerate([5, "text", {"epoch": 10**9}]):
            store(dht, run_id, number, junk)
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=5)
        eventually(lambda: tracker.global_progress.num_peers == 1)

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


def report_and_vanish(dht: DHT, run_id: str, expiration: float = METADATA_EXPIRATION) -> None:
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
        expiration_time=get_dht_time() + expiration,
        subkey=RSASignatureValidator(dht.private_key).local_public_key,
    )


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
    make_tracker: Any, remaining: float, peers: int, is_waited_for: bool, is_ready: bool
) -> None:
    tracker = make_tracker(start=False)
    tracker.performance_ema.samples_per_second = 10.0
    tracker._batch_size, tracker.is_waited_for = 10, is_waited_for  # a batch takes a second
    progress = tracker.global_progress
    progress.num_peers, progress.samples_accumulated = peers, 50
    progress.eta_next_epoch = get_dht_time() + remaining
    assert tracker.ready_to_update_epoch is is_ready


def test_what_was_announced_or_withdrawn_is_reported_at_once(make_tracker: Any) -> None:
    tracker = make_tracker(start=False)
    tracker._reported = tracker.local_progress
    assert tracker._report_due_after == AS_RECKONED
    tracker.announce()
    assert tracker._report_due_after == 0.0
    tracker._announced.clear()
    assert tracker._report_due_after == AS_RECKONED
    tracker.step_aside()
    assert tracker._report_due_after == 0.0


class NoSwarm:
    """In place of a DHT: nobody is there, and it notes until when each report is to stand."""

    peer_id, client_mode = PeerID(b"\x12\x20" + bytes(32)), False

    def __init__(self) -> None:
        self.expirations: list[float] = []

    def add_validators(self, validators: object) -> None:
        pass

    def run_coroutine(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get(self, key: str, return_future: bool = False, **kwargs: Any) -> Any:
        return _done(None) if return_future else None

    def store(self, key: str, *, expiration_time: float, **kwargs: Any) -> Any:
        self.expirations.append(expiration_time)
        return _done(True)


def _done(result: Any) -> Any:
    answer: MPFuture[Any] = MPFuture()
    answer.set_result(result)
    return answer


@pytest.mark.parametrize("epoch", [0, 1], ids=["in its epoch", "at the next one"])
def test_a_clock_that_is_set_back_silences_nobody(epoch: int, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    dht, set_back = NoSwarm(), 0.0
    monkeypatch.setattr(module, "get_dht_time", lambda: get_dht_time() - set_back)
    monkeypatch.setattr(module, "SILENCE", 1.0)  # after half of which it reports in any case
    key = RSAPrivateKey()
    tracker = ProgressTracker(dht, "run", 10_000, private_key=key, client_mode=False, start=True)  # type: ignore[arg-type]
    try:
        tracker.report_local_progress(0, 1)
        tracker.announce()
        eventually(lambda: dht.expirations)
        set_back = 600.0
        before = len(dht.expirations)
        tracker.report_local_progress(epoch, 2)
        eventually(lambda: len(dht.expirations) >= before + 3, 10.0)
        assert dht.expirations[-1] < get_dht_time() - set_back + METADATA_EXPIRATION + 1.0
    finally:
        tracker.shutdown(10)


def test_a_batch_that_misleads_the_others_is_reported_and_no_other_one(
    make_tracker: Any, dht: DHT, run_id: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(failure_detector, "AS_RECKONED", 600.0)
    tracker = make_tracker()

    def reported() -> list[int]:
        return [peer.samples for peer in read_peers(dht, run_id)]

    tracker.report_local_progress(0, 10)
    tracker.announce()
    eventually(lambda: reported() == [10])
    tracker.local_progress = tracker._reported  # a batch that comes as reckoned
    tracker.should_report_progress.set()
    eventually(lambda: not tracker.should_report_progress.is_set())
    tracker.report_local_progress(0, 5_000)
    eventually(lambda: reported() == [5_000])


def test_between_two_reports_it_rests(
    make_tracker: Any, dht: DHT, run_id: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(failure_detector, "AS_RECKONED", 600.0)
    looks: list[float] = []
    due_after = ProgressTracker._report_due_after.fget
    monkeypatch.setattr(
        ProgressTracker, "_report_due_after", property(lambda self: looks.append(0.0) or due_after(self))
    )
    tracker = make_tracker()
    tracker.report_local_progress(0, 10)
    tracker.announce()
    eventually(lambda: bool(read_peers(dht, run_id)))
    tracker.local_progress = tracker._reported  # a batch that comes as reckoned
    looks.clear()
    tracker.should_report_progress.set()
    eventually(lambda: bool(looks))
    time.sleep(0.5)
    assert len(looks) <= 3
