"""What a search costs and which leaders let it wait; and what an averager's process tells of its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.matchmaking.matchmaking import ASKED_IN_VAIN, Attendance, ExpectedPeers, LeadersOfASearch
from hivenb.engine.network.dht import DHT
from hivenb.engine.trust.conduct import Account

Make = Callable[..., Any]

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


def all_accounts(
    averager: GradientAverager, until: Callable[[list[Account]], object], eventually: Make
) -> list[Account]:
    taken: list[Account] = []

    def is_there() -> object:
        taken.extend(averager.take_accounts())
        return until(taken)

    eventually(is_there)
    return taken


def test_a_round_that_waits_for_nobody_blames_nobody(
    dht: DHT, joining_dht: DHT, make_averager: Make, expect_each_other: Make, eventually: Make
):
    averagers = [make_averager(own, min_matchmaking_time=1.0, request_timeout=0.5) for own in (dht, joining_dht)]
    expect_each_other(*averagers, epoch=3)
    controls = [one.step(gather=3, wait=False, timeout=20.0) for one in averagers]
    assert all(len(control.result(30)) == 2 for control in controls)
    for one, other in (averagers, averagers[::-1]):
        (account,) = all_accounts(one, len, eventually)
        assert account == Account(3, took_part=frozenset({other.peer_id.to_bytes()}))


def test_who_is_waited_for_and_does_not_come_is_told(dht: DHT, joining_dht: DHT, make_averager: Make, eventually: Make):
    averagers = [make_averager(own, min_matchmaking_time=1.5, request_timeout=0.5) for own in (dht, joining_dht)]
    absent = Attendance(b"absent", 0, 3)
    for one, other in (averagers, averagers[::-1]):
        one.expect_peers(ExpectedPeers(frozenset({absent, Attendance(other.peer_id.to_bytes(), 0, 3)})))
    controls = [one.step(gather=3, wait=False, timeout=20.0) for one in averagers]
    assert all(len(control.result(30)) == 2 for control in controls)
    for one in averagers:
        accounts = all_accounts(one, lambda taken: len(taken) >= 2, eventually)
        assert {peer for account in accounts for peer in account.missed} == {b"absent"}
        assert max(account.seconds for account in accounts) >= 0.5
        assert not any(account.stalled for account in accounts)


class SendsNothing(GradientAverager):
    """A peer that joins a group, and has no part for anybody."""

    def _runner_of(self, *args: Any, **settings: Any) -> Any:
        runner = super()._runner_of(*args, **settings)

        async def silent(peer_index: int) -> AsyncIterator[Any]:
            await asyncio.sleep(60)
            yield

        runner._generate_input_for_peer = silent
        return runner


def test_who_sends_nothing_in_a_round_is_told(dht: DHT, joining_dht: DHT, make_averager: Make, eventually: Make):
    settings = {"min_matchmaking_time": 1.0, "request_timeout": 0.5, "sender_timeout": 2.0, "reducer_timeout": 4.0}
    settings["shape"] = 300_000  # of few numbers there would be one part, which one of them averages alone
    victim, attacker = make_averager(dht, **settings), make_averager(joining_dht, kind=SendsNothing, **settings)
    attacker.step(gather=3, wait=False, timeout=20.0)
    assert len(victim.step(gather=3, timeout=20.0)) == 1
    (account,) = all_accounts(victim, len, eventually)
    assert account.stalled == {attacker.peer_id.to_bytes()}
    assert not account.took_part
    assert account.seconds >= 0.5


class NeverBegins(GradientAverager):
    """A peer that lets others into its group, and does not begin."""

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(60)


def test_a_leader_that_never_begins_costs_a_deadline_once(
    dht: DHT, joining_dht: DHT, make_averager: Make, eventually: Make
):
    settings = {"min_matchmaking_time": 1.0, "request_timeout": 0.5}
    attacker, victim = make_averager(dht, kind=NeverBegins, **settings), make_averager(joining_dht, **settings)
    leading = attacker.step(gather=3, wait=False, timeout=30.0)
    eventually(lambda: leading.stage.name == "LOOKING_FOR_GROUP")
    searching = victim.step(gather=3, wait=False, timeout=8.0, allow_retries=False)
    accounts = all_accounts(victim, len, eventually)
    assert accounts[0].stalled == {attacker.peer_id.to_bytes()}
    wait([searching], 20)  # it finds nobody, or the attacker, once that has asked to be let in
    assert searching.done()
    assert not any(account.stalled for account in victim.take_accounts())  # it was not asked again in that search
    leading.cancel()


def test_who_is_avoided_is_not_let_in(dht: DHT, joining_dht: DHT, make_averager: Make, eventually: Make):
    averagers = [make_averager(own, min_matchmaking_time=1.0, request_timeout=0.5) for own in (dht, joining_dht)]
    one, other = averagers
    left_out = frozenset({other.peer_id.to_bytes()})
    one.expect_peers(ExpectedPeers(frozenset(), left_out=left_out, avoided=left_out))
    controls = [averager.step(gather=3, wait=False, timeout=4.0, allow_retries=False) for averager in averagers]
    for control in controls:
        with pytest.raises(Exception, match="could not find a group"):
            control.result(20)
