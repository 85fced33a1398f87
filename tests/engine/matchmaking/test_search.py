"""Which leaders let a search wait; what is told of them, and of those who are waited for in vain: tests/in_memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.matchmaking.matchmaking import ASKED_IN_VAIN, LeadersOfASearch

LEADER, OTHER = PeerID(b"leader"), PeerID(b"other")


def outcome(value: Any) -> Any:
    """A request that is over."""

    async def answer() -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    async def run() -> Any:
        task = asyncio.ensure_future(answer())
        await asyncio.wait([task])
        return task

    return asyncio.run(run())


def test_a_leader_that_lets_in_and_does_not_begin_is_asked_once():
    leaders = LeadersOfASearch()
    request = leaders.ask(LEADER, until=get_dht_time() - 3.0, timeout=2.0)
    leaders.note_welcome(LEADER)
    assert request.stalled_for(outcome(None)) is not None
    assert not leaders.may_be_asked(LEADER)
    assert leaders.may_be_asked(OTHER)


def test_a_leader_that_disbands_its_group_in_time_may_be_asked_again():
    leaders = LeadersOfASearch()
    request = leaders.ask(LEADER, until=get_dht_time() + 3.0, timeout=2.0)
    leaders.note_welcome(LEADER)
    assert request.stalled_for(outcome(None)) is None
    assert leaders.may_be_asked(LEADER)


def test_a_leader_that_sends_on_to_another_one_is_not_to_blame_for_that_one():
    leaders = LeadersOfASearch()
    request = leaders.ask(LEADER, until=get_dht_time() - 3.0, timeout=2.0)
    leaders.note_welcome(LEADER)
    leaders.ask(OTHER, until=get_dht_time() - 3.0, timeout=2.0)
    assert request.stalled_for(outcome(None)) is None
    assert leaders.may_be_asked(LEADER)


def test_a_leader_that_does_not_answer_is_asked_twice():
    leaders = LeadersOfASearch()
    told = []
    for _ in range(ASKED_IN_VAIN):
        assert leaders.may_be_asked(LEADER)
        told.append(leaders.ask(LEADER, until=get_dht_time() + 3.0, timeout=0.0).stalled_for(outcome(None)))
    assert not leaders.may_be_asked(LEADER)
    assert told[0] is None
    assert told[1] is not None


@pytest.mark.parametrize("error", [AssertionError(), ValueError("no id"), MatchmakingException("unreadable")])
def test_a_leader_whose_answer_is_of_no_use_is_not_asked_again(error: Exception):
    leaders = LeadersOfASearch()
    request = leaders.ask(LEADER, until=get_dht_time() + 3.0, timeout=2.0)
    assert request.stalled_for(outcome(error)) is not None
    assert not leaders.may_be_asked(LEADER)


def test_other_errors_are_nobodys_fault():
    leaders = LeadersOfASearch()
    request = leaders.ask(LEADER, until=get_dht_time() - 3.0, timeout=0.0)
    assert request.stalled_for(outcome(RuntimeError("a bug"))) is None
    assert leaders.may_be_asked(LEADER)


def test_a_leader_that_breaks_streams_off_is_asked_twice():
    leaders = LeadersOfASearch()
    told = []
    for _ in range(ASKED_IN_VAIN):
        assert leaders.may_be_asked(LEADER)
        request = leaders.ask(LEADER, until=get_dht_time() + 3.0, timeout=2.0)
        told.append(request.stalled_for(outcome(BrokenPipeError())))
    assert not leaders.may_be_asked(LEADER)
    assert told[0] is None
    assert told[1] is not None
