"""Which rounds are looked at, and what is made of how they were recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from history_of_rounds import OPTIONS, HistoryOfRounds, standing_still

from hivenb.figures.advice import advise
from hivenb.figures.recent_rounds import LEAST_ROUNDS, MOST_ROUNDS, newest_rounds
from hivenb.history import History


@pytest.mark.parametrize("what", [{"size": 2}, {"failed": True}, {"stalled": 5.0}])
def test_nothing_is_advised_of_too_few_rounds(what: dict[str, object]) -> None:
    rounds = HistoryOfRounds().add_rounds(LEAST_ROUNDS - 1, **what)
    assert rounds.advice() == ()
    rounds.add_rounds(1, **what)
    assert len(rounds.advice()) == 1


def test_rounds_alone_say_nothing() -> None:
    rounds = HistoryOfRounds().add_rounds(LEAST_ROUNDS - 1, size=2).add_rounds(20, size=1, peers=1, stalled=5)
    assert rounds.advice() == ()
    rounds.add_round(size=2)
    assert rounds.rules() == ["too few peers"], "one more in company"
    rounds.add_rounds(MOST_ROUNDS, size=1, peers=1)
    assert rounds.advice() == (), "that was long ago"


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_peer_that_came_or_went_at_the_end_of_a_round_is_not_missed(before: int, after: int) -> None:
    history = History()
    for epoch in range(20):
        now = 1000.0 + 10 * epoch
        history.record("peers", before, time=now - 1)
        history.record("stalled_seconds", 0.0, epoch=epoch, time=now)
        history.record("group_size", 2, epoch=epoch, time=now)
        history.record("peers", after, time=now + 1)
    rounds = newest_rounds(history.snapshot())
    assert rounds is not None
    assert (rounds.peers, rounds.incomplete) == (2, 0)


def test_a_pause_does_not_make_a_stall_look_small() -> None:
    rounds = standing_still(0.4, rounds=10)
    rounds.now += 3600
    rounds.add_rounds(10, stalled=4.0, computing=6.0)
    (advice,) = rounds.advice()
    assert advice.figures["share"] == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("short", "advised"), [(10, True), (9, False)])
def test_a_long_run_whose_points_stand_for_several_rounds(short: int, advised: bool) -> None:
    # 64 points hold 128 rounds of which the last 40 are looked at
    rounds = HistoryOfRounds(capacity=64).add_rounds(88)
    for i in range(40):
        rounds.add_round(size=2 if i % 4 == 0 and i < 4 * short else 4)
    assert len(rounds.history.snapshot().series["group_size"]) == 64
    assert rounds.rules() == (["too few peers"] if advised else [])
    if advised:
        assert rounds.advice()[0].figures["rounds"] == 40
        assert rounds.advice()[0].figures["share"] == 0.25


@pytest.mark.parametrize("missing", ["group_size", "stalled_seconds", "peers"])
def test_without_one_of_the_figures_nothing_is_advised(missing: str) -> None:
    history = History()
    for i in range(40):
        for name, value in {"group_size": 2, "stalled_seconds": 5, "peers": 4}.items():
            if name != missing:
                history.record(name, value, epoch=i, time=10.0 * i)
    assert advise(history.snapshot(), OPTIONS) == ()


def test_a_snapshot_between_two_records_of_one_round() -> None:
    rounds = HistoryOfRounds().add_rounds(20, size=2)
    rounds.history.record("stalled_seconds", 0.0, epoch=21, time=rounds.now + 10)
    assert rounds.rules() == ["too few peers"]


@pytest.mark.parametrize(("codec", "advised"), [("none", True), ("float16", False), ("uniform8bit", False)])
def test_compression_where_the_network_is_what_takes_long(codec: str, advised: bool) -> None:
    rounds = HistoryOfRounds()
    rounds.rate = 10e6
    rounds.add_rounds(10, stalled=8.0, computing=52.0)
    options = OPTIONS.replace(grad_compression=codec)
    assert rounds.rules(options) == (["much traffic"] if advised else [])
    if advised:
        (advice,) = rounds.advice(options)
        assert advice.changes == {"grad_compression": "float16"}
        assert advice.text == (
            "In each of the last 10 rounds training stood still for 8 s, of which the network took 8 s for "
            "80.0 MB at 10.0 MB/s: send gradients in half as many bytes, "
            "rounded to three digits."
        )


@pytest.mark.parametrize(
    ("stalled", "quiet", "computing", "advised"),
    [
        (20.0, 9.0, 80.0, True),
        (20.0, 11.0, 80.0, False),  # most of the time nobody sent anything
        (20.0, 0.0, 200.0, False),  # not noticed
        (5.0, 0.0, 20.0, True),
        (3.0, 0.0, 12.0, False),  # too short to be measured
    ],
)
def test_compression_is_not_for_time_that_goes_elsewhere(
    stalled: float, quiet: float, computing: float, advised: bool
) -> None:
    rounds = HistoryOfRounds()
    rounds.rate = 1e6
    rounds.add_rounds(10, stalled=stalled, quiet=quiet, computing=computing)
    assert rounds.rules() == (["much traffic"] if advised else [])


def test_traffic_that_was_not_measured_or_did_not_flow_is_no_matter() -> None:
    for rate in (0.0, 1e-9, 1e5):
        rounds = HistoryOfRounds()
        rounds.rate = rate
        assert rounds.add_rounds(10, stalled=8.0, computing=52.0).rules() == []


def test_what_a_run_records_is_what_the_rules_look_at() -> None:
    from hivenb.engine.optimizer.scheduled_rounds import EpochReport
    from hivenb.run.recorder import Recorder

    def advice(report: Callable[[int], EpochReport]) -> list[str]:
        history = History()
        recorder = Recorder(history)
        for epoch in range(1, LEAST_ROUNDS + 1):
            history.record("peers", 3, epoch=epoch)
            recorder.on_epoch(report(epoch))
        return [advice.rule for advice in advise(history.snapshot(), OPTIONS)]

    assert advice(lambda epoch: EpochReport(epoch, 64, 3, 0.0)) == []
    assert advice(lambda epoch: EpochReport(epoch, 64, 2, 0.0)) == ["too few peers"]
    assert advice(lambda epoch: EpochReport(epoch, 64, 1, 0.0, failed="TimeoutError()")) == ["failed rounds"]
