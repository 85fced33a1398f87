"""Who meets whom, how soon, and whoever comes late, dies meanwhile, or is at another epoch."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
from hivemind.averaging.partition import AllreduceException
from hivemind.optim.grad_averager import GradientAverager as PlainGradientAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.matchmaking import SEARCH_EVERY, Attendance, ExpectedPeers
from hivenb.engine.trust.reliability import RoundReport
from in_memory.swarm import SETTINGS, InMemoryPeer, InMemorySwarm, outcome

#: Seconds for which hivemind's peers look for others in any case.
MATCHMAKING = SETTINGS["min_matchmaking_time"]


def ids(*peers: InMemoryPeer) -> set[Any]:
    return {peer.peer_id for peer in peers}


async def groups_of(*rounds: Round) -> list[set[Any]]:
    return [set(group) for group in await asyncio.gather(*map(outcome, rounds))]


@pytest.mark.parametrize("count", range(3, 9))
async def test_all_that_expect_each_other_meet_in_one_group_at_once(memory: InMemorySwarm, count: int) -> None:
    peers = await memory.join_with_averagers(count)
    memory.expect_each_other(*peers)
    began = memory.now
    rounds = [await peer.search(float(peer.number)) for peer in peers]
    assert await groups_of(*rounds) == [ids(*peers)] * count
    assert memory.now - began < 1.0
    for peer in peers:
        assert peer.numbers.tolist() == [(count + 1) / 2] * 3


@pytest.mark.parametrize("is_expected", [True, False], ids=["expected", "not expected"])
async def test_a_latecomer_is_taken_in(memory: InMemorySwarm, is_expected: bool) -> None:
    *early, absent, late = await memory.join_with_averagers(5)
    began = memory.now
    memory.expect_each_other(*early, absent, *([late] if is_expected else []))
    rounds = [await peer.search() for peer in early]
    await asyncio.sleep(3.0)
    rounds.append(await late.search())
    assert await groups_of(*rounds) == [ids(*early, late)] * 4
    assert MATCHMAKING - 0.1 < memory.now - began < MATCHMAKING + 2.0, "for the one that is absent"


async def test_a_group_begins_as_soon_as_the_last_one_has_come(memory: InMemorySwarm) -> None:
    *early, late = peers = await memory.join_with_averagers(4)
    memory.expect_each_other(*peers)
    rounds = [await peer.search() for peer in early]
    await asyncio.sleep(2.0)
    came = memory.now
    rounds.append(await late.search())
    assert await groups_of(*rounds) == [ids(*peers)] * 4
    assert memory.now - came < 1.0


async def gathering(memory: InMemorySwarm, count: int) -> tuple[list[InMemoryPeer], list[Round]]:
    """Peers all of whom follow the first one, which waits for yet another."""
    *peers, absent = await memory.join_with_averagers(count + 1)
    memory.expect_each_other(*peers, absent)
    rounds = []
    for peer in peers:
        rounds.append(await peer.search(float(peer.number)))
        await asyncio.sleep(0.1)
    leader = peers[0].matchmaking
    await memory.until(lambda: len(leader.current_followers) == count - 1)
    await memory.until(lambda: {peer.matchmaking.current_leader for peer in peers[1:]} == ids(peers[0]))
    return peers, rounds


async def test_when_the_leader_dies_while_it_gathers_the_others_meet_without_it(memory: InMemorySwarm) -> None:
    (leader, *others), (_, *rounds) = await gathering(memory, 4)
    leader.die()
    assert await groups_of(*rounds) == [ids(*others)] * 3
    assert others[0].numbers.tolist() == [3.0] * 3
    assert memory.now < 1000.0 + 2 * MATCHMAKING + 2.0


async def test_a_leader_that_is_cut_off_is_followed_until_it_is_known_to_be_gone(memory: InMemorySwarm) -> None:
    (leader, *others), (_, *rounds) = await gathering(memory, 3)
    memory.network.cut(leader.peer_id)
    await asyncio.sleep(1.0)
    assert [peer.matchmaking.current_leader for peer in others] == [leader.peer_id] * 2
    there = {peer: Attendance(peer.id, 0, 1) for peer in others}
    for peer in others:
        expected = frozenset(one for other, one in there.items() if other is not peer)
        peer.averager.expect_peers(ExpectedPeers(expected, gone=frozenset({leader.id})))
    known = memory.now
    assert await groups_of(*rounds) == [ids(*others)] * 2
    assert memory.now - known < 1.5


async def test_a_follower_that_dies_is_not_in_the_group(memory: InMemorySwarm) -> None:
    (*living, dying), rounds = await gathering(memory, 4)
    dying.die()
    assert await groups_of(*rounds[:3]) == [ids(*living)] * 3
    assert living[0].numbers.tolist() == [2.0] * 3


async def test_two_that_ask_each_other_wait_for_no_deadline(memory: InMemorySwarm) -> None:
    """One has not heard that the other one has begun anew, and looks for a group since before it."""
    first, second = await memory.join_with_averagers(2)
    await memory.join()  # through which they hear of each other
    memory.expect_each_other(first, second)
    memory.network.cut(first.peer_id, second.peer_id)
    began = memory.now
    rounds = [await first.search()]
    await asyncio.sleep(0.5)
    rounds.append(await second.search())
    await asyncio.sleep(began + MATCHMAKING + 0.3 - memory.now)
    assert [peer.matchmaking.lock_request_join_group.locked() for peer in (first, second)] == [True, True]
    memory.network.heal()
    healed = memory.now
    assert await groups_of(*rounds) == [ids(first, second)] * 2
    assert memory.now - healed < 1.0


async def test_peers_at_different_epochs_do_not_meet(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(2)
    rounds = [await peer.search(epoch=peer.number, timeout=15.0, allow_retries=False) for peer in peers]
    for control in rounds:
        with pytest.raises(AllreduceException):
            await outcome(control)


async def test_who_gives_up_an_old_epoch_meets_those_of_the_new_one(memory: InMemorySwarm) -> None:
    late, ahead = await memory.join_with_averagers(2)
    old, new = await late.search(epoch=3), await ahead.search(epoch=4)
    await asyncio.sleep(1.0)
    assert not late.averager.give_up_searches(before=3)
    assert late.averager.give_up_searches(before=4)
    assert old.cancelled()
    assert await groups_of(await late.search(epoch=4), new) == [ids(late, ahead)] * 2


@pytest.mark.parametrize("gather", [None, 9])
async def test_a_peer_of_plain_hivemind_is_met_at_any_epoch(memory: InMemorySwarm, gather: Any) -> None:
    plain, ours = await memory.join(2)
    await plain.average_with(kind=PlainGradientAverager)
    await ours.average_with()
    began = memory.now
    rounds = [await ours.search(2.0, epoch=4)]
    await asyncio.sleep(1.5)  # so that it leads
    rounds.append(await plain.search(1.0, epoch=gather))
    assert await groups_of(*rounds) == [ids(plain, ours)] * 2
    assert [peer.numbers.tolist() for peer in (plain, ours)] == [[1.5] * 3] * 2
    assert memory.now - began < MATCHMAKING + 1.0, "else ours would have followed, later"


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_a_dht_that_is_slow_or_loses_what_it_is_asked_for_only_makes_it_late(
    memory: InMemorySwarm, loss: float
) -> None:
    memory.records.delay, memory.records.loss = 0.5, loss
    peers = await memory.join_with_averagers(4)
    memory.expect_each_other(*peers)
    rounds = [await peer.search() for peer in peers]
    assert await groups_of(*rounds) == [ids(*peers)] * 4


async def test_it_looks_for_peers_at_a_pace(memory: InMemorySwarm) -> None:
    (peer,) = await memory.join_with_averagers(1)
    memory.network.latency = memory.network.jitter = 0.0
    reads: list[float] = []
    get = peer.dht.get

    def noting(*args: Any, **kwargs: Any) -> Any:
        reads.append(memory.now)
        return get(*args, **kwargs)

    peer.dht.get = noting
    await peer.search()
    await asyncio.sleep(2.0)
    assert 2.0 / SEARCH_EVERY - 1 <= len(reads) <= 2.0 / SEARCH_EVERY + 1


# -- what is told of the others ------------------------------------------------------------------------------------


async def test_a_round_that_waits_for_nobody_blames_nobody(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(2)
    memory.expect_each_other(*peers, epoch=3)
    await groups_of(*[await peer.search(epoch=3) for peer in peers])
    for one, other in (peers, peers[::-1]):
        assert one.averager.take_round_reports() == [RoundReport(3, took_part=frozenset({other.id}))]


async def test_who_is_waited_for_and_does_not_come_is_told(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(2)
    absent = Attendance(b"absent", 0, 3)
    for one, other in (peers, peers[::-1]):
        one.averager.expect_peers(ExpectedPeers(frozenset({absent, Attendance(other.id, 0, 3)})))
    await groups_of(*[await peer.search(epoch=3) for peer in peers])
    for peer in peers:
        missing, taking_part = peer.averager.take_round_reports()
        assert missing.missed == {b"absent"}
        assert 0.5 <= missing.seconds < MATCHMAKING + 1.0
        assert not missing.stalled
        assert not taking_part.stalled


class NeverBegins(GradientAverager):
    """A peer that lets others into its group, and does not begin."""

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(60)


async def test_a_leader_that_never_begins_costs_a_deadline_once(memory: InMemorySwarm) -> None:
    attacker, victim = await memory.join(2)
    await attacker.average_with(kind=NeverBegins)
    await victim.average_with()
    await attacker.search(epoch=3)
    await asyncio.sleep(0.5)
    searching = await victim.search(epoch=3)
    await asyncio.sleep(MATCHMAKING + SETTINGS["request_timeout"] + 0.5)
    (account,) = victim.averager.take_round_reports()
    assert account.stalled == {attacker.id}
    assert set(await outcome(searching)) == ids(attacker, victim), "which has asked to be let in"
    assert not any(account.stalled for account in victim.averager.take_round_reports()), "it was not asked again"


async def test_who_is_avoided_is_not_let_in(memory: InMemorySwarm) -> None:
    one, other = peers = await memory.join_with_averagers(2)
    left_out = frozenset({other.id})
    one.averager.expect_peers(ExpectedPeers(frozenset(), excluded=left_out, avoided=left_out))
    rounds = [await peer.search(epoch=3, timeout=8.0, allow_retries=False) for peer in peers]
    for control in rounds:
        with pytest.raises(AllreduceException, match="could not find a group"):
            await outcome(control)
