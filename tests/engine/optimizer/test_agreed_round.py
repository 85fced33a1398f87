"""The next round of one averager: looked for in the background, known when it is there, left without harm."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hivemind.averaging.control import AveragingStage
from rounds_without_averagers import FakeRound

from hivenb.engine.optimizer.scheduled_rounds import AgreedRound
from hivenb.errors import ProcessEndedError


def test_training_goes_on_while_an_averager_begins_to_look(eventually: Callable[..., None]) -> None:
    agreed, goes_on, found = AgreedRound(), threading.Event(), FakeRound()
    agreed.look_for(lambda: goes_on.wait(20) and found)  # type: ignore[arg-type, return-value]
    assert agreed.take() is None
    goes_on.set()
    eventually(lambda: agreed.take() is found)
    assert agreed.take() is found, "it is to come still"


def test_it_is_looked_for_once() -> None:
    agreed, asked = AgreedRound(), list[FakeRound]()

    def schedule() -> FakeRound:
        asked.append(FakeRound())
        return asked[-1]

    for _ in range(3):
        agreed.look_for(schedule)  # type: ignore[arg-type]
    assert agreed.take(wait=True) is asked[0]
    assert len(asked) == 1


def test_what_goes_wrong_in_the_background_is_raised_where_it_is_waited_for() -> None:
    agreed = AgreedRound()
    agreed.look_for(lambda: exec("raise OSError('the averager is gone')"))  # type: ignore[arg-type, return-value, func-returns-value]
    with pytest.raises(OSError, match="the averager is gone"):
        agreed.take(wait=True)


def test_there_is_none_where_the_averager_has_been_killed_meanwhile() -> None:
    agreed, found = AgreedRound(), FakeRound()

    def killed() -> FakeRound:
        raise ProcessEndedError("the averager was killed")

    agreed.look_for(killed)  # type: ignore[arg-type]
    assert agreed.take(wait=True) is None, "who makes a successor has to be able to leave"
    assert agreed.leave() is None
    agreed.look_for(lambda: found)  # type: ignore[arg-type, return-value]
    assert agreed.take(wait=True) is found


@pytest.mark.parametrize("what", ["begun", "over"])
def test_one_that_has_begun_or_is_over_is_not_to_come_any_more(what: str) -> None:
    agreed, control = AgreedRound(), FakeRound()
    agreed.control = control  # type: ignore[assignment]
    if what == "begun":
        control.allow_allreduce()
    else:
        control.cancel()
    assert agreed.take() is None


def test_leaving_gives_up_a_search() -> None:
    agreed, control = AgreedRound(), FakeRound(AveragingStage.LOOKING_FOR_GROUP)
    agreed.control = control  # type: ignore[assignment]
    assert agreed.leave() is control
    assert control.cancelled()
    assert agreed.control is None
    assert agreed.leave() is None


def test_leaving_a_group_that_has_met_is_to_count_for_nothing_in_it() -> None:
    """Its peers would wait for one that had simply gone."""
    agreed, control = AgreedRound(), FakeRound(AveragingStage.AWAITING_TRIGGER)
    agreed.control = control  # type: ignore[assignment]
    assert agreed.leave() is control
    assert (control.weight, control.triggered, control.cancelled()) == (0.0, True, False)
