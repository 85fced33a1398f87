"""A sender counts for what it has reported, and never for more than an epoch; one that does nothing wrong, for all."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.trust.aggregation import MARGIN, SampleReports, SenderWeights, Told

SENDERS = [PeerID(bytes([number])) for number in range(10)]
FLOOR = MARGIN * 100.0
NOBODY = PeerID(b"another one")


def reports(age: float = 0.0, others: float | None = 0.0, **told: Any) -> SampleReports:
    """What the first sender has reported of an epoch of 1000 samples, and each of the others.

    :param others: their samples; ``None`` for no report
    """
    values = {"epoch": 1, "samples": 0.0, "samples_per_second": 0.0, "time": get_dht_time() - age, **told}
    all_told = {SENDERS[0].to_bytes(): Told(**values)}
    if others is not None:
        all_told |= {sender.to_bytes(): Told(**{**values, "samples": others}) for sender in SENDERS[1:]}
    return SampleReports(1000.0, all_told)


def largest(*noted: SampleReports, own_id: PeerID = NOBODY) -> list[float]:
    weights = SenderWeights()
    for one in noted:
        weights.note(one)
    return weights.largest(SENDERS, own_id)


def test_without_a_word_from_the_tracker_nothing_is_known() -> None:
    assert largest() == [math.inf] * 10


def test_nobody_counts_for_more_than_an_epoch() -> None:
    assert largest(reports(samples=1e9))[0] == 1000.0 * MARGIN


def test_a_sender_counts_for_what_it_has_reported_and_has_gathered_since() -> None:
    assert largest(reports(samples=300.0))[0] == 300.0 * MARGIN
    since = reports(age=2.0, samples=100.0, samples_per_second=125.0, others=None)  # 350 of 1250 by now
    assert largest(since)[0] == pytest.approx(MARGIN * 350.0 * 1000.0 / 1250.0, rel=0.1)


def test_one_that_has_begun_the_next_epoch_counts_for_what_it_had_in_the_last() -> None:
    assert largest(reports(samples=300.0), reports(epoch=2))[0] == 300.0 * MARGIN
    assert largest(reports(samples=300.0), reports(epoch=2), reports(epoch=3))[0] == FLOOR


def test_one_of_whom_nothing_is_known_counts_for_twice_its_share() -> None:
    assert largest(reports(samples=300.0, others=None))[1:] == [FLOOR] * 9


def test_reports_that_are_late_are_late_for_all() -> None:
    """An epoch has so many samples, whatever they seem to have by now."""
    late = {"age": 9.0, "samples_per_second": 200.0}
    assert largest(reports(samples=10.0, others=10.0, **late)) == [FLOOR] * 10
    assert largest(reports(age=9.0, samples_per_second=1e9, others=0.0)) == [FLOOR] * 10
    assert largest(reports(age=9.0, samples_per_second=1e9, others=None))[0] == pytest.approx(
        MARGIN * 1000.0 * 1000.0 / 1900.0
    )


def test_all_that_was_reported_counts_where_peers_go_on_for_long_until_they_hear_that_an_epoch_is_over() -> None:
    """On a busy machine three peers had 51, 180 and 185 samples of an epoch of 192, and two counted for 168."""
    weights, now = SenderWeights(), get_dht_time()
    had = dict(zip(SENDERS, (51.0, 180.0, 200.0), strict=False))
    weights.note(SampleReports(192.0, {one.to_bytes(): Told(0, had[one], 70.0, now - 2.0) for one in had}))
    assert all(bound >= had[one] for one, bound in zip(had, weights.largest([*had], NOBODY), strict=True))


def test_this_peer_counts_for_what_it_has() -> None:
    """Its own reports are not among those that it reads: it was weighed down where it had more than its share."""
    assert largest(reports(samples=300.0), own_id=SENDERS[1]) == [300.0 * MARGIN, math.inf, *[FLOOR] * 8]


@pytest.mark.parametrize("samples", [math.nan, math.inf, -math.inf, -1.0])
def test_no_report_makes_weights_of_no_numbers(samples: float) -> None:
    for one in (reports(samples=samples), reports(age=1.0, samples_per_second=samples), reports(time=samples)):
        assert 0.0 < largest(one)[0] <= 1000.0 * MARGIN


def overstating(weight: float, *noted: SampleReports, epoch: int = 2) -> bool:
    weights = SenderWeights()
    for one in noted:
        weights.note(one)
    return SENDERS[0] in weights.overstating({SENDERS[0]: weight, NOBODY: 1.0}, epoch)


def test_who_reports_more_than_it_puts_in_is_known() -> None:
    before, now, then = reports(samples=1000.0), reports(epoch=2, samples=900.0), reports(epoch=3, samples=5.0)
    assert overstating(8.0, before, now)
    assert overstating(8.0, now, then), "with gradients in the background, the next epoch has begun"
    assert not overstating(450.0, before, now)


def test_what_a_peer_had_in_other_epochs_is_nothing_against_it() -> None:
    """Where epochs are short, one may be over before all have reported anything of it."""
    assert not overstating(8.0, reports(samples=1000.0), reports(epoch=3, samples=900.0))
    assert not overstating(8.0, reports(samples=1000.0))
    assert not overstating(0.0, reports(samples=0.0), reports(epoch=2, samples=0.0)), "a helper"


def test_only_what_no_honest_peer_has_is_implausible() -> None:
    """In the first epoch each peer has gone on until it heard of the others, long after its last report."""
    weights = SenderWeights()
    weights.note(reports(samples=16.0))
    first, *others = SENDERS
    assert weights.implausible({first: 1000.0, others[0]: 2048.0}) == frozenset()
    assert weights.implausible({first: 1e9, others[0]: 64.0, NOBODY: 1e5}) == {first, NOBODY}
    weights.note(reports(samples=50_000.0))
    assert weights.implausible({first: 60_000.0}) == frozenset(), "batches that are larger than an epoch"


def test_reports_are_those_of_the_tracker() -> None:
    report = LocalTrainingProgress(
        peer_id=b"a", epoch=3, samples_accumulated=5, samples_per_second=2.0, time=7.0, client_mode=False
    )
    assert SampleReports.of(64, [report]) == SampleReports(64, {b"a": Told(3, 5, 2.0, 7.0)})


def test_each_state_counts_for_one() -> None:
    averager: Any = SimpleNamespace(outer=None)
    assert TrainingStateAverager._largest_weights(averager, SENDERS) == [1.0] * 10
