"""Progress: announced, reported when others would reckon wrongly, withdrawn, forgotten; safe from what others write."""

from __future__ import annotations

from typing import Any

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT
from hivenb.engine.progress.failure_detector import AS_RECKONED
from hivenb.engine.progress.peer_reports import read_peers
from hivenb.engine.progress.tracker import ProgressTracker, seconds_left


class TestTracker:
    def test_shutting_down_says_goodbye(self, dht: DHT, run_id: str, make_tracker: Any, eventually: Any) -> None:
        tracker = make_tracker()
        tracker.report_local_progress(local_epoch=0, samples_accumulated=1)
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        tracker.shutdown(10)
        eventually(lambda: read_peers(dht, run_id, 10) == ())

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


def report_of(number: int, samples_per_second: float, epoch: int = 0) -> LocalTrainingProgress:
    peer = PeerID(b"\x12\x20" + bytes([number]) + bytes(31)).to_bytes()
    return LocalTrainingProgress(
        peer_id=peer,
        epoch=epoch,
        samples_accumulated=0,
        samples_per_second=samples_per_second,
        time=get_dht_time(),
        client_mode=False,
    )


def look(tracker: ProgressTracker, reports: dict[bytes, LocalTrainingProgress]) -> None:
    """Let a tracker see these reports."""
    until = get_dht_time() + 60.0
    read = ValueWithExpiration({key: ValueWithExpiration(one.dict(), until) for key, one in reports.items()}, until)
    tracker.global_progress = tracker._parse_swarm_progress_data(read)


def begin_epoch(tracker: ProgressTracker, epoch: int) -> float | None:
    """Begin one, with nobody looked at since; seconds until its end is expected."""
    with tracker.pause_updates():
        tracker.update_epoch(epoch)
    return seconds_left(tracker.global_progress)


def test_the_end_of_an_epoch_is_estimated_from_its_beginning_on() -> None:
    # over a line of 300 ms, a look took 1.5 s at times: a peer that knew no end until then missed epochs of a second
    tracker = tracker_at_rest()
    look(tracker, {b"another": report_of(1, 30.0), b"a third": report_of(2, 20.0)})
    left = begin_epoch(tracker, 1)
    assert left is not None
    assert 1.5 < left <= 2.0  # 100 samples, of 50 a second
    assert not tracker.ready_to_update_epoch


def test_who_follows_into_an_epoch_goes_by_what_was_seen_of_it() -> None:
    tracker = tracker_at_rest()
    look(tracker, {b"another": report_of(1, 10.0, epoch=1)})
    tracker.global_progress.eta_next_epoch = get_dht_time() + 2.0
    left = begin_epoch(tracker, 1)
    assert left is not None
    assert left <= 2.0  # not the 10 s of a whole epoch


def test_whoever_is_alone_estimates_nothing() -> None:
    tracker = tracker_at_rest()
    look(tracker, {})
    assert begin_epoch(tracker, 1) is None
