"""When a round begins before its trigger, and what whoever has allowed that is told; without a process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MSGPackSerializer
from rounds_without_averagers import FakeRound

from hivenb.engine.matchmaking.group_records import AT_ONCE, EARLY, all_offer_early, epoch_of, marked
from hivenb.engine.matchmaking.matchmaking import EarlyBeginnings

EPOCH = 7


def said(epoch: int = EPOCH, offers: str | None = EARLY) -> bytes:
    """What a peer of ours sends to its group."""
    plain = MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(epoch)])
    return marked(plain, [] if offers is None else [offers])


def a_round(epoch: int = EPOCH) -> Any:
    step: Any = FakeRound(epoch=epoch)
    step.data_for_gather = said(epoch)
    return step


def group_of(*gathered: bytes) -> GroupInfo:
    return GroupInfo(b"group", tuple(range(len(gathered))), gathered)  # type: ignore[arg-type]


@pytest.fixture
def early() -> EarlyBeginnings:
    return EarlyBeginnings()


def answer_to(early: EarlyBeginnings, *have_met: Any) -> Any:
    answer: Any = Future()
    early.allow(EPOCH, answer, have_met)
    return answer


def test_all_have_to_offer_it() -> None:
    for word in (EARLY, AT_ONCE):
        assert all_offer_early([said(offers=word), said(offers=word)])
        assert not all_offer_early([said(offers=word), said(offers=None)])
    assert not all_offer_early([said(offers=AT_ONCE), said(offers=EARLY)]), "one would wait for the other"
    plain = MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps("early"), "early"])
    assert not all_offer_early([said(), plain]), "without the mark of ours"
    assert epoch_of(said()) == EPOCH


@pytest.mark.parametrize("met_first", [True, False])
@pytest.mark.parametrize("offers", [EARLY, None])
def test_a_round_begins_when_it_is_allowed_and_has_a_group(
    early: EarlyBeginnings, met_first: bool, offers: str | None
) -> None:
    step, group = a_round(), group_of(said(), said(offers=offers))
    if met_first:
        early.note_group(step, group)
        assert not step.triggered
        answer = answer_to(early, (step, group))
    else:
        answer = answer_to(early)
        assert not answer.done()
        early.note_group(step, group)
    assert step.triggered is answer.result(0) is (offers is not None)


def test_one_of_another_epoch_does_not_begin(early: EarlyBeginnings) -> None:
    step = a_round(EPOCH + 1)
    answer = answer_to(early, (step, group_of(said(EPOCH + 1))))
    assert not answer.done()
    assert not step.triggered
    early.note_end(step)
    assert not answer.done()


def test_one_that_is_over_does_not(early: EarlyBeginnings) -> None:
    step = a_round()
    answer = answer_to(early)
    early.note_end(step)
    assert answer.result(0) is False


def test_one_that_was_given_up_does_not_when_its_group_becomes_known(early: EarlyBeginnings) -> None:
    step = a_round()
    answer = answer_to(early)
    step.cancel()
    early.note_group(step, group_of(said(), said()))
    assert answer.result(0) is False
