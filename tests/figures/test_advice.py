"""What is advised, from which figures on, and that it goes with its cause."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys

import pytest
from history_of_rounds import OPTIONS, HistoryOfRounds, standing_still

from hivenb.figures.advice import (
    FACTOR,
    LONGEST_AVERAGING,
    LONGEST_MATCHMAKING,
    SAID_FOR,
    SEVERAL_IN_A_ROW,
    advise,
    in_words,
)
from hivenb.figures.history import History
from hivenb.figures.recent_rounds import LEAST_ROUNDS, MOST_ROUNDS
from hivenb.options import Options

OVERLAPPED = OPTIONS.with_prerequisites(delay_grad_averaging=True)


def test_nothing_is_advised_of_nothing() -> None:
    assert HistoryOfRounds().advice() == ()


def test_nothing_is_advised_where_all_is_well() -> None:
    assert HistoryOfRounds().add_rounds(MOST_ROUNDS, stalled=0.5).advice() == ()


@pytest.mark.parametrize(("row", "advised"), [(SEVERAL_IN_A_ROW, True), (SEVERAL_IN_A_ROW - 1, False)])
def test_several_batches_in_a_row_that_were_skipped(row: int, advised: bool) -> None:
    history = History()
    for total in range(1, row + 1):
        history.record("skipped_batches", total, time=1000.0 + total)
        history.record("skipped_in_a_row", total, time=1000.0 + total)
    history.record("skipped_in_a_row", 0, time=1001.0 + row)
    found = advise(history.snapshot(), OPTIONS)
    assert [advice.rule for advice in found] == (["batches skipped"] if advised else [])
    for advice in found:
        assert advice.text.startswith(
            "The gradients of 3 batches in a row were not finite; 3 were skipped so far, and if it goes on the run "
            "ends. Lower the learning rate"
        )
        assert (advice.figures, advice.changes) == ({"in_a_row": 3, "skipped": 3}, {})
    history.record("loss", 1.0, time=1002.0 + row + SAID_FOR)
    assert advise(history.snapshot(), OPTIONS) == ()


@pytest.mark.parametrize(("short", "advised"), [(10, True), (9, False)])
def test_too_few_peers_in_a_quarter_of_the_rounds(short: int, advised: bool) -> None:
    rounds = HistoryOfRounds().add_rounds(40 - short).add_rounds(short, size=2)
    assert rounds.rules() == (["too few peers"] if advised else [])


@pytest.mark.parametrize(("size", "peers", "advised"), [(8, 10, True), (9, 10, False), (3, 4, True), (1, 2, True)])
def test_a_group_is_complete_from_nine_tenths_of_the_peers_on(size: int, peers: int, advised: bool) -> None:
    assert HistoryOfRounds().add_rounds(10, size=size, peers=peers).rules() == (["too few peers"] if advised else [])


def test_the_advice_says_its_figures_and_what_to_change() -> None:
    (advice,) = HistoryOfRounds().add_rounds(30).add_rounds(10, size=2).advice()
    assert advice.text == (
        "In 25 % of the last 40 rounds fewer than 0.9 of the peers averaged together, 3.5 of 4.0 on average: let a "
        "round wait for them for 10 s instead of 5 s."
    )
    assert advice.figures == {"share": 0.25, "rounds": 40, "group_size": 3.5, "peers": 4}
    assert advice.changes == {"matchmaking_time": 10.0}


@pytest.mark.parametrize(("failed", "advised"), [(10, True), (9, False)])
def test_rounds_that_failed_in_a_quarter_of_the_cases(failed: int, advised: bool) -> None:
    rounds = HistoryOfRounds().add_rounds(40 - failed).add_rounds(failed, failed=True)
    assert rounds.rules() == (["failed rounds"] if advised else [])
    if advised:
        (advice,) = rounds.advice()
        assert advice.changes == {"averaging_timeout": 60.0}
        assert advice.text == (
            "25 % of the last 40 rounds failed, and this peer went on with its local gradients: give a round 60 s "
            "instead of 30 s."
        )


def test_a_round_that_failed_is_not_counted_as_a_small_group_too() -> None:
    assert HistoryOfRounds().add_rounds(20).add_rounds(20, failed=True).rules() == ["failed rounds"]
    both = HistoryOfRounds().add_rounds(20).add_rounds(10, failed=True).add_rounds(10, size=2)
    assert both.rules() == ["too few peers", "failed rounds"]


def test_waiting_for_rounds_that_fail_is_no_reason_for_overlap() -> None:
    assert HistoryOfRounds().add_rounds(10, failed=True, stalled=5).rules() == ["failed rounds"]


def test_a_longer_matchmaking_time_takes_the_timeout_along() -> None:
    options = OPTIONS.replace(matchmaking_time=20, averaging_timeout=30)
    (advice,) = HistoryOfRounds().add_rounds(10, size=2).advice(options)
    assert advice.changes == {"matchmaking_time": 40.0, "averaging_timeout": 120.0}


def test_times_are_not_raised_for_ever() -> None:
    near = OPTIONS.replace(matchmaking_time=0.9 * LONGEST_MATCHMAKING, averaging_timeout=0.9 * LONGEST_AVERAGING)
    at = OPTIONS.replace(matchmaking_time=LONGEST_MATCHMAKING, averaging_timeout=LONGEST_AVERAGING)
    small, failing = HistoryOfRounds().add_rounds(10, size=2), HistoryOfRounds().add_rounds(10, failed=True)
    assert small.advice(near)[0].changes == {"matchmaking_time": LONGEST_MATCHMAKING}
    assert failing.advice(near)[0].changes == {"averaging_timeout": LONGEST_AVERAGING}
    assert small.advice(at) == failing.advice(at) == ()


@pytest.mark.parametrize(("share", "advised"), [(0.11, True), (0.09, False)])
def test_offload_without_overlap_once_it_is_noticed(share: float, advised: bool) -> None:
    rounds, offloaded = standing_still(share), OPTIONS.replace(offload_optimizer=True)
    assert rounds.rules(offloaded) == (["offload without overlap"] if advised else [])
    assert rounds.rules(OPTIONS) == rounds.rules(offloaded.with_prerequisites(delay_optimizer_step=True)) == []
    if advised:
        assert rounds.advice(offloaded)[0].changes == {"delay_optimizer_step": True, "delay_state_averaging": True}


@pytest.mark.parametrize(
    ("share", "rule"),
    [(0.29, None), (0.31, "no overlap"), (0.49, "no overlap"), (0.51, "rounds too often"), (0.9, "rounds too often")],
)
def test_overlap_as_long_as_a_round_fits_between_two_and_larger_epochs_beyond(share: float, rule: str | None) -> None:
    assert standing_still(share).rules() == ([] if rule is None else [rule])


def test_overlap_takes_all_along_that_it_needs_and_makes_up_for_late_gradients() -> None:
    (advice,) = standing_still(0.4).advice()
    assert advice.changes == {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "offload_optimizer": True,
    }
    assert OPTIONS.replace(**advice.changes).delay_compensation
    assert advice.text == (
        "Training stood still for 40 % of the time of the last 10 rounds, 4 s for each, which is less than the 6 s of "
        "training between them: let gradients and parameters be averaged in background. Meanwhile this peer goes on "
        "from a step with its own gradients, so that what it computes is hardly late."
    )
    half = OPTIONS.replace(offload_optimizer=True, delay_state_averaging=True)
    assert standing_still(0.05).advice(half) == ()
    assert standing_still(0.4).advice(half)[0].changes == {"delay_optimizer_step": True}
    step_delayed = OPTIONS.with_prerequisites(delay_optimizer_step=True)
    assert standing_still(0.4).advice(step_delayed)[0].changes == {"delay_grad_averaging": True}
    uncompensated = standing_still(0.4).advice(step_delayed.replace(delay_compensation=False))
    assert uncompensated[0].changes == {"delay_grad_averaging": True, "delay_compensation": True}


def test_larger_epochs_where_overlap_is_on_already_and_what_becomes_of_the_rate() -> None:
    (advice,) = standing_still(0.4).advice(OVERLAPPED)
    assert advice.changes == {"target_batch_size": 4096}
    assert advice.text == (
        "Training stood still for 40 % of the time of the last 10 rounds, 4 s for each although they overlap: gather "
        "4,096 samples for an update instead of 2,048. The learning rate stays as it is unless you change it: for 2 "
        "times the samples, that of SGD is usually multiplied by 2, that of Adam by 1.4."
    )
    assert advice.figures["rate_factor_of_sgd"] == 2
    assert advice.figures["rate_factor_of_adam"] == pytest.approx(2**0.5)


def test_local_updates_overlap_the_averaging_of_parameters_alone() -> None:
    local = OPTIONS.replace(use_local_updates=True)
    (advice,) = standing_still(0.4, size=1).advice(local)
    assert advice.changes == {"delay_state_averaging": True}


def test_what_other_options_rule_out_is_not_advised() -> None:
    local = OPTIONS.replace(use_local_updates=True, averager_opts={"reuse_tensors": True})
    assert standing_still(0.4).rules(local) == ["rounds too often"]


@pytest.mark.parametrize("share", [0.51, 0.7, 0.99, 1.0])
def test_epochs_are_enlarged_step_by_step_and_never_without_a_word_on_the_rate(share: float) -> None:
    (advice,) = standing_still(share).advice()
    assert advice.changes == {"target_batch_size": FACTOR * 2048}
    assert "learning rate" in advice.text
    assert FACTOR == 2


@pytest.mark.parametrize(("seconds", "advised"), [(1.2, True), (1.3, False)])
def test_epochs_much_shorter_than_the_matchmaking_time(seconds: float, advised: bool) -> None:
    rounds = standing_still(0.2, seconds=seconds)
    assert rounds.rules() == (["short epochs"] if advised else [])
    if advised:
        (advice,) = rounds.advice()
        assert advice.changes == {"target_batch_size": 4096}
        assert "epochs of 1.2 s are much shorter than the matchmaking time of 5 s" in advice.text
    assert standing_still(0.05, seconds=seconds).rules() == [], "no harm is done"


CAUSES: dict[str, dict[str, object]] = {
    "too few peers": {"size": 2},
    "failed rounds": {"failed": True},
    "no overlap": {"stalled": 5.0},
    "rounds too often": {"stalled": 30.0},
    "short epochs": {"stalled": 0.1, "computing": 0.5},
}


@pytest.mark.parametrize("rule", CAUSES)
def test_an_advice_goes_with_its_cause(rule: str) -> None:
    rounds = HistoryOfRounds().add_rounds(20, **CAUSES[rule])
    assert rounds.rules() == [rule]
    rounds.add_rounds(MOST_ROUNDS)
    assert rounds.advice() == ()


@pytest.mark.parametrize("rule", CAUSES)
def test_an_advice_that_was_followed_is_not_repeated_before_it_could_help(rule: str) -> None:
    rounds = HistoryOfRounds().add_rounds(20, **CAUSES[rule])
    after = OPTIONS.replace(**rounds.advice()[0].changes)
    rounds.changed()
    assert rounds.advice(after) == ()
    rounds.add_rounds(LEAST_ROUNDS - 1, **CAUSES[rule])
    assert rounds.advice(after) == ()


def test_a_change_that_failed_leaves_the_advice_as_it_is() -> None:
    rounds = HistoryOfRounds().add_rounds(20, size=2)
    rounds.changed("options not changed: SwarmError")
    assert rounds.rules() == ["too few peers"]


def test_a_helper_gets_no_advice_and_who_averages_no_gradients_none_on_groups() -> None:
    rounds = HistoryOfRounds().add_rounds(20, size=1, stalled=3.0)
    assert rounds.advice(OPTIONS.replace(auxiliary=True)) == ()
    assert rounds.rules(OPTIONS) == rounds.rules(OVERLAPPED) == ["too few peers"]
    assert rounds.rules(OPTIONS.replace(use_local_updates=True)) == []


def all_options() -> list[Options]:
    flags = {
        "offload_optimizer": (None, True),
        "delay_state_averaging": (False, True),
        "delay_optimizer_step": (None, False, True),
        "delay_grad_averaging": (False, True),
        "use_local_updates": (False, True),
        "reuse_grad_buffers": (False, True),
        "matchmaking_time": (0.1, 5.0, 59.0, 100.0),
    }
    found = []
    for values in itertools.product(*flags.values()):
        try:
            found.append(OPTIONS.replace(**dict(zip(flags, values, strict=True)), averaging_timeout=110.0))
        except ValueError:
            continue
    return found


def test_whatever_is_advised_can_be_done_and_is_a_change() -> None:
    chance = random.Random(0)
    seen: set[str] = set()
    everything = all_options()
    assert len(everything) > 50
    for _ in range(300):
        peers, wrong = chance.randint(2, 9), chance.choice((0.0, 0.3, 0.9))
        rounds = HistoryOfRounds()
        rounds.rate = chance.choice((0.0, 1e6))
        scale = 10 ** chance.uniform(-2, 1.5)
        for _ in range(chance.randint(5, 45)):
            kind = chance.choice(("small", "failed")) if chance.random() < wrong else ""
            rounds.add_round(
                size=chance.randint(1, peers) if kind == "small" else peers,
                peers=peers,
                failed=kind == "failed",
                stalled=scale * chance.random(),
                computing=scale * chance.choice((0.0, 0.5, 1.0, 20.0)),
            )
        for options in chance.sample(everything, 10):
            for advice in rounds.advice(options):
                seen.add(advice.rule)
                changed = options.replace(**advice.changes)
                assert set(options.difference(changed)) == set(advice.changes) != set()
                assert all(math.isfinite(number) for number in advice.figures.values())
                assert in_words(advice.changes)
                assert "delay_grad_averaging" not in advice.changes or changed.delay_compensation, "they come late"
                assert "target_batch_size" not in advice.changes or "learning rate" in advice.text
            asked = [name for advice in rounds.advice(options) for name in advice.changes]
            assert len(asked) == len(set(asked)) or set(asked) <= {"matchmaking_time", "averaging_timeout"}
    assert seen == {*CAUSES, "offload without overlap", "much traffic"}


def test_changes_in_words() -> None:
    assert in_words({"averaging_timeout": 120.0, "matchmaking_time": 40.0, "offload_optimizer": True}) == (
        "matchmaking time 40 seconds; averaging timeout 120 seconds; on: optimizer in main memory"
    )
    assert in_words({"target_batch_size": 4096, "delay_state_averaging": False}) == (
        "target batch size 4,096 samples; off: state averaging in background"
    )
    assert in_words({"grad_compression": "float16"}) == "gradients float16"


@pytest.mark.process
def test_advice_needs_neither_torch_nor_hivemind() -> None:
    code = "import sys, hivenb.figures.advice; print({'torch', 'hivemind', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
