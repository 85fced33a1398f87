"""What a group makes of its numbers when one of it dies, is slow, is not heard, or sends what is no number."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.compression import Float16Compression, Uniform8BitQuantization, serialize_torch_tensor
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from slow_sender import SlowSender

from hivenb.engine.averaging.gradient_averager import GradientAverager, own_factory
from hivenb.engine.averaging.round import Round
from hivenb.engine.exchange import all_reduce
from hivenb.engine.exchange import runner as module
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.matchmaking import matchmaking
from hivenb.engine.matchmaking.matchmaking import ExpectedPeers
from hivenb.engine.trust.aggregation import SampleReports, Told
from in_memory.network import Message
from in_memory.swarm import InMemoryPeer, InMemorySwarm, outcome

#: Numbers that peers share out among them, in small parts: two for each of three.
SHARED, SMALL_PARTS = 6_000, {"part_size_bytes": 4_000}


def ids(*peers: InMemoryPeer) -> set[Any]:
    return {peer.peer_id for peer in peers}


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers share tensors out among them, as they do with large ones."""
    monkeypatch.setattr(all_reduce, "suits_all_gather", lambda *args: False)


@pytest.fixture(params=["sent to each other", "shared out"])
def way(request: pytest.FixtureRequest) -> str:
    """How two peers exchange their numbers."""
    if request.param == "shared out":
        request.getfixturevalue("shared_out")
    return str(request.param)


@pytest.fixture(params=["shared out", "sent to all"])
def way_of_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How three and more peers exchange few numbers: on short lines, and on long ones."""
    monkeypatch.setattr(all_reduce, "is_far", lambda record: request.param == "sent to all")
    return str(request.param)


async def average(memory: InMemorySwarm, *peers: InMemoryPeer) -> list[Any]:
    """What each has of a round in which they put in 1, 2, 3 and so on."""
    memory.expect_each_other(*peers)
    rounds = [await peer.search(float(value)) for value, peer in enumerate(peers, start=1)]
    return list(await asyncio.gather(*map(outcome, rounds)))


def begin_all(peers: Sequence[InMemoryPeer], rounds: Sequence[Round]) -> None:
    for value, (peer, control) in enumerate(zip(peers, rounds, strict=True), start=1):
        peer.begin(control, float(value))


def averaging(message: Message) -> bool:
    """Whether a message is of an exchange."""
    return message.handler.endswith("rpc_aggregate_part")


def numbers_sent(memory: InMemorySwarm) -> list[int]:
    """The bytes of each message with numbers to be averaged, from now on."""
    sent: list[int] = []

    def count(message: Message) -> bool:
        sent.append(len(message.data) if averaging(message) and not message.is_answer else 0)
        return False

    memory.network.breaks = count
    return sent


async def test_both_have_the_average(memory: InMemorySwarm, way: str) -> None:
    peers = await memory.join_with_averagers(2, SHARED, **SMALL_PARTS)
    began = memory.now
    groups = await average(memory, *peers)
    assert [set(group) for group in groups] == [ids(*peers)] * 2
    assert all(torch.allclose(peer.numbers, torch.full((SHARED,), 1.5)) for peer in peers)
    assert memory.now - began < 5.0


@pytest.mark.parametrize("count", [3, 8])
async def test_all_have_the_average(memory: InMemorySwarm, count: int, way_of_many: str) -> None:
    size = 2 * SHARED // count
    peers = await memory.join_with_averagers(count, size, **SMALL_PARTS)
    began = memory.now
    groups = await average(memory, *peers)
    assert [set(group) for group in groups] == [ids(*peers)] * count
    for peer in peers:
        assert torch.allclose(peer.numbers, torch.full((size,), (count + 1) / 2))
    assert memory.now - began < 5.0


@pytest.mark.parametrize("are_all", [True, False], ids=["all", "all but one"])
async def test_peers_send_all_to_each_other_if_the_lines_of_all_are_long(memory: InMemorySwarm, are_all: bool) -> None:
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    for peer in peers if are_all else peers[1:]:
        peer.averager.note_line(True)
    sent = numbers_sent(memory)
    await average(memory, *peers)
    shares = 6 if are_all else 2  # each of three sends to two others all of its numbers, or a third of them
    assert sum(sent) == pytest.approx(4 * SHARED * shares, rel=0.1)


async def test_where_that_takes_long_parts_are_shared_out_again(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    for peer in peers:
        peer.averager.note_line(True)
        memory.network.hosts[peer.peer_id].rate = 50_000.0  # bytes in a second, of 48,000 that each has to send
    bytes_of_rounds = []
    for _ in range(4):
        sent = numbers_sent(memory)
        await average(memory, *peers)
        bytes_of_rounds.append(sum(sent))
    all_of_it, a_third = (pytest.approx(4 * SHARED * shares, rel=0.1) for shares in (6, 2))
    assert bytes_of_rounds == [all_of_it, all_of_it, all_of_it, a_third]


# -- one that dies -------------------------------------------------------------------------------------------------


async def test_of_two_of_whom_one_dies_before_it_sends_the_other_one_goes_on_at_once(
    memory: InMemorySwarm, way: str
) -> None:
    living, dying = peers = await memory.join_with_averagers(2, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    dying.die()
    began = memory.now
    living.begin(rounds[0], 1.0)
    assert set(await outcome(rounds[0])) == ids(living)
    assert set(living.numbers.tolist()) == {1.0}
    assert memory.now - began < 2.0


async def test_where_one_dies_the_others_have_the_averages_of_all_parts_but_its_own(
    memory: InMemorySwarm, way_of_many: str
) -> None:
    *living, dying = peers = await memory.join_with_averagers(4, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    dying.die()
    began = memory.now
    begin_all(living, rounds[:3])
    groups = await asyncio.gather(*map(outcome, rounds[:3]))
    assert [set(group) for group in groups] == [ids(*living)] * 3
    for value, peer in enumerate(living, start=1):
        assert set(peer.numbers.tolist()) == ({float(value), 2.0} if way_of_many == "shared out" else {2.0})
    assert memory.now - began < 2.0


async def test_one_that_dies_in_the_middle_costs_the_others_no_deadline(
    memory: InMemorySwarm, way_of_many: str
) -> None:
    """Some of its numbers have arrived, and some have not."""
    *living, dying = peers = await memory.join_with_averagers(4, SHARED, **SMALL_PARTS)
    dying_host = memory.network.hosts[dying.peer_id]
    rounds = await memory.meet(*peers)
    began = memory.now
    dying_host.rate = 10_000.0  # bytes in a second, of 36,000 that it has to send
    begin_all(peers, rounds)
    await asyncio.sleep(1.0)
    dying.die()
    groups = await asyncio.gather(*map(outcome, rounds[:3]))
    assert [set(group) for group in groups] == [ids(*living)] * 3
    for value, peer in enumerate(living, start=1):
        # of each part, what was sent: by all, by all but one, or what this peer had, where that one was to average it
        assert set(peer.numbers.tolist()) <= {2.5, 2.0, float(value)}
        assert 2.0 in peer.numbers
    assert memory.now - began < 4.0


async def test_one_that_dies_while_it_waits_for_a_slower_one_costs_nobody_the_round(memory: InMemorySwarm) -> None:
    quick, dying, slow = peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    for peer, control, value in zip((quick, dying), rounds, (0.0, 9.0), strict=False):
        peer.begin(control, value)
    await asyncio.sleep(1.0)
    dying.die()
    await asyncio.sleep(1.0)
    slow.begin(rounds[2], 3.0)
    for control, peer, own in ((rounds[0], quick, 0.0), (rounds[2], slow, 3.0)):
        assert set(await outcome(control)) == ids(quick, slow)
        # in the part of the quick one, the dead one's data counts; its own part stays as it was
        assert set(peer.numbers.tolist()) == {own, 1.5, 4.0}


@pytest.mark.usefixtures("shared_out")
async def test_a_client_goes_on_if_who_averages_for_it_dies_while_it_sends(memory: InMemorySwarm) -> None:
    dying, client = peers = await memory.join(2)
    await dying.average_with(SHARED, **SMALL_PARTS)
    await client.average_with(SHARED, client_mode=True, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    memory.network.hosts[client.peer_id].rate = 4_000.0
    client.begin(rounds[1], 1.0)
    await asyncio.sleep(1.0)
    dying.die()
    assert set(await outcome(rounds[1])) == ids(client)
    assert client.numbers.eq(1.0).all()


# -- one that is silent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False], ids=["known before", "heard then"])
async def test_one_that_has_gone_is_left_out_as_soon_as_that_is_known(
    memory: InMemorySwarm, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one whose network was cut, nobody would find it out by dialling it, either."""
    monkeypatch.setattr(module, "DIAL_AFTER", 600.0)
    *living, silent = peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    memory.network.cut(silent.peer_id)

    def know() -> None:
        for peer in living:
            peer.averager.expect_peers(ExpectedPeers(frozenset(), gone=frozenset({silent.id})))

    if is_known:
        know()
    begin_all(living, rounds[:2])
    await asyncio.sleep(3.0)
    assert [control.done() for control in rounds[:2]] == [is_known] * 2
    know()
    for control in rounds[:2]:
        assert set(await outcome(control, 1.0)) == ids(*living)


async def test_whoever_sends_nothing_is_waited_for_until_the_deadline_and_told(memory: InMemorySwarm) -> None:
    settings = {"sender_timeout": 2.0, "reducer_timeout": 4.0}
    *living, silent = peers = await memory.join_with_averagers(3, **settings)
    rounds = await memory.meet(*peers)
    begin_all(peers, rounds)
    began = memory.now
    memory.network.cut(silent.peer_id)
    for peer, control in zip(living, rounds, strict=False):
        assert set(await outcome(control)) == ids(*living)
        assert peer.numbers.tolist() == [1.5] * 3
        (account,) = peer.averager.take_round_reports()
        assert account.stalled == {silent.id}
    assert memory.now - began < 5.0


class SendsNothing(GradientAverager):
    """A peer that joins a group, and has no part for anybody."""

    def _runner_of(self, *args: Any, **settings: Any) -> Any:
        runner = super()._runner_of(*args, **settings)

        async def silent(peer_index: int) -> AsyncIterator[Any]:
            await asyncio.sleep(60)
            yield

        runner._generate_input_for_peer = silent
        return runner


async def test_who_sends_nothing_in_a_round_is_told(memory: InMemorySwarm, way: str) -> None:
    settings: dict[str, Any] = {"sender_timeout": 2.0, "reducer_timeout": 4.0, "part_size_bytes": 4_000}
    victim, attacker = await memory.join(2)
    await victim.average_with(SHARED, **settings)
    await attacker.average_with(SHARED, SendsNothing, **settings)
    memory.expect_each_other(victim, attacker)
    controls = [await victim.search(1.0), await attacker.search(2.0)]
    assert set(await outcome(controls[0])) == ids(victim)
    (account,) = victim.averager.take_round_reports()
    assert account.stalled == {attacker.id}
    assert not account.took_part
    assert 0.5 <= account.seconds < 5.0


class Silent(GradientAverager):
    """Averages what it is sent, and tells nobody."""

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            if message.code != averaging_pb2.AVERAGED_PART:
                yield message


@pytest.mark.usefixtures("shared_out")
async def test_one_that_does_not_answer_has_not_taken_part(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(2, 3, Silent, sender_timeout=1.0, reducer_timeout=2.0)
    groups = await average(memory, *peers)
    # small as it is, one of them averages all of it, and the other one which parameters have a gradient
    assert [len(group) for group in groups] == [1, 1]
    assert sorted(bool(peer.numbers.eq(1.5).all()) for peer in peers) == [False, True]


async def test_where_two_send_each_other_all_nobody_needs_an_answer(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(2, 3, Silent)
    groups = await average(memory, *peers)
    assert [set(group) for group in groups] == [ids(*peers)] * 2
    assert [peer.numbers.tolist() for peer in peers] == [[1.5] * 3] * 2


# -- one that leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 2])
async def test_one_that_leaves_a_group_says_so(memory: InMemorySwarm, leaver: int) -> None:
    peers = await memory.join_with_averagers(3)
    rounds = await memory.meet(*peers)
    staying = [peers[number] for number in range(3) if number != leaver]
    controls = [rounds[number] for number in range(3) if number != leaver]
    began = memory.now
    staying[0].begin(controls[0], 1.0)
    rounds[leaver].cancel()
    staying[1].begin(controls[1], 2.0)
    for control, peer in zip(controls, staying, strict=True):
        assert set(await outcome(control)) >= ids(*staying)
        # as small as it is, one peer averages all of it; that may be the one that left
        assert sum(peer.numbers.sub(1.5).abs() < 1e-6) in (0, 3)
    assert memory.now - began < 1.0


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_one_that_leaves_before_anybody_begins_takes_no_part_of_the_averages_along(
    memory: InMemorySwarm, leaver: int, way_of_many: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As when one is stopped in the seconds between a group's meeting and the end of the epoch."""
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    rounds.pop(leaver).cancel()
    staying = [peer for number, peer in enumerate(peers) if number != leaver]
    await asyncio.sleep(2.0)
    began = memory.now
    staying[0].begin(rounds[0], 1.0)
    await asyncio.sleep(0.5)
    staying[1].begin(rounds[1], 2.0)
    for control, peer in zip(rounds, staying, strict=True):
        assert set(await outcome(control)) == ids(*staying)
        assert torch.allclose(peer.numbers, torch.full((SHARED,), 1.5))
    assert memory.now - began < 2.0
    assert not caplog.records


async def test_all_who_left_are_left_out_and_the_last_one_is_alone(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(5, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    for number in (1, 3):
        rounds[number].cancel()
    await asyncio.sleep(1.0)
    staying = [0, 2, 4]
    for number in staying:
        peers[number].begin(rounds[number], float(number))
    for number in staying:
        assert set(await outcome(rounds[number])) == ids(*(peers[one] for one in staying))
        assert torch.allclose(peers[number].numbers, torch.full((SHARED,), 2.0))
    rounds = await memory.meet(*peers)
    for control in rounds[1:]:
        control.cancel()
    await asyncio.sleep(1.0)
    peers[0].begin(rounds[0], 7.0)
    assert set(await outcome(rounds[0])) == ids(peers[0])
    assert torch.allclose(peers[0].numbers, torch.full((SHARED,), 7.0))


async def test_who_begins_later_follows_who_has_begun_without_one_that_left(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(4, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    began = memory.now
    rounds[3].cancel()
    await asyncio.sleep(1.0)
    peers[0].begin(rounds[0], 1.0)
    await asyncio.sleep(1.0)
    rounds[2].cancel()
    await asyncio.sleep(1.0)
    peers[1].begin(rounds[1], 2.0)
    for number in (0, 1):
        assert set(await outcome(rounds[number])) == ids(*peers[:2])
        own = float(number + 1)
        assert set(peers[number].numbers.tolist()) == {own, 1.5}, "all but the part of who left in the middle"
    assert memory.now - began < 5.0


async def test_one_that_pauses_long_before_the_others_begin_takes_nothing_along_either(memory: InMemorySwarm) -> None:
    """They may need longer than their senders are waited for, without its speed."""
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    staying = peers[:2]
    *rounds, left = await memory.meet(*peers)
    left.weight = 0.0
    left.allow_allreduce()
    await memory.until(left.done)
    assert left.cancelled()
    await asyncio.sleep(60.0)
    for value, (peer, control) in enumerate(zip(staying, rounds, strict=True), start=1):
        peer.begin(control, float(value))
    for peer, control in zip(staying, rounds, strict=True):
        assert set(await outcome(control)) == ids(*staying)
        assert torch.allclose(peer.numbers, torch.full((SHARED,), 1.5))


async def test_one_that_pauses_when_another_one_has_begun_averages_for_the_others(memory: InMemorySwarm) -> None:
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    staying = peers[:2]
    *rounds, left = await memory.meet(*peers)
    staying[0].begin(rounds[0], 1.0)
    await asyncio.sleep(0.5)
    left.weight = 0.0
    left.allow_allreduce()
    staying[1].begin(rounds[1], 2.0)
    for peer, control in zip(staying, rounds, strict=True):
        assert set(await outcome(control)) == ids(*peers)
        assert torch.allclose(peer.numbers, torch.full((SHARED,), 1.5))


async def test_with_a_helper_a_group_stays_as_it_has_met(memory: InMemorySwarm) -> None:
    """It sends nothing by which anybody would know that it has begun."""
    peers = await memory.join(4)
    for peer in peers:
        await peer.average_with(SHARED, auxiliary=peer is peers[3], **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    rounds[2].cancel()
    await asyncio.sleep(1.0)
    own = peers[0].matchmaking
    ((group_id, (step, _, group)),) = own._awaiting_trigger.items()
    assert (group_id, peers[2].peer_id) in own._declined
    assert own.without_those_who_left(group) is group
    step.weight = 0.0
    assert own.to_be_left(group) is None
    for control in rounds:
        control.cancel()


@pytest.mark.parametrize("leaves", ["cancelled", "without any weight"])
async def test_who_has_begun_before_a_group_is_known_counts(
    memory: InMemorySwarm, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers may be here before its leader has said that it has begun."""
    peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    late = peers[1].matchmaking
    ((group_id, (step, _, group)),) = late._awaiting_trigger.items()
    late._awaiting_trigger.clear()
    late._not_known_yet.append(group_id)
    late.step_control = step
    late._await_trigger(group)
    if leaves == "cancelled":
        late.decline(group_id, peers[2].peer_id)
        assert late.without_those_who_left(group) is group
    else:
        step.weight = 0.0
        assert late.to_be_left(group) is None
    for control in rounds:
        control.cancel()


async def test_one_that_cannot_be_told_averages_with_the_others_all_the_same(memory: InMemorySwarm) -> None:
    node, client, leaving = peers = await memory.join(3)
    await node.average_with(SHARED, **SMALL_PARTS)
    await client.average_with(SHARED, client_mode=True, **SMALL_PARTS)
    await leaving.average_with(SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    rounds[2].cancel()
    await asyncio.sleep(1.0)
    began = memory.now
    node.begin(rounds[0], 1.0)
    await asyncio.sleep(1.0)
    client.begin(rounds[1], 2.0)
    for control, peer in zip(rounds, (node, client), strict=False):
        assert set(await outcome(control)) >= ids(node, client)
        assert 1.5 in peer.numbers
    assert memory.now - began < 5.0


def test_who_is_left_out_is_read_from_the_id_of_what_is_left(memory: InMemorySwarm) -> None:
    whole = bytes(range(20))
    named = whole + b" without " + bytes([0, 2, 0, 1, 0, 3])
    assert matchmaking._left_out(whole, whole) is None
    assert matchmaking._left_out(whole + b"PHASE_P", whole) is None
    assert matchmaking._left_out(named, whole) == {1, 3}
    assert matchmaking._left_out(named + b"PHASE_P", whole) == {1, 3}
    assert matchmaking._left_out(whole + b" without ", whole) == frozenset()


@pytest.mark.parametrize("after", [0.0, 1.0], ids=["at once", "when all know"])
async def test_what_is_left_of_a_group_goes_through_both_halves_of_a_round(
    memory: InMemorySwarm, after: float, caplog: pytest.LogCaptureFixture
) -> None:
    low_rank = own_factory(partial(PowerSGDGradientAverager, averager_rank=1))
    peers = await memory.join(3)
    for peer in peers:
        await peer.average_with((8, 8), low_rank)
    gone, *rounds = await memory.meet(*peers)
    gone.cancel()
    await asyncio.sleep(after)
    for peer, control in zip(peers[1:], rounds, strict=True):
        peer.begin(control, 1.0)
    for control in rounds:
        assert set(await outcome(control)) == ids(*peers[1:])
    assert not caplog.records


async def test_one_that_leaves_a_group_says_so_for_both_halves_of_a_round(memory: InMemorySwarm) -> None:
    low_rank = own_factory(partial(PowerSGDGradientAverager, averager_rank=1))
    leaving, *staying = peers = await memory.join(3)
    # in client mode it averages nothing for the others, who would notice its absence when they send to it
    await leaving.average_with((8, 8), low_rank, client_mode=True)
    for peer in staying:
        await peer.average_with((8, 8), low_rank)
    gone, *rounds = await memory.meet(*peers)
    gone.cancel()
    for peer, control in zip(staying, rounds, strict=True):
        peer.begin(control, 1.0)
    for control in rounds:
        assert set(await outcome(control)) == ids(*staying)


# -- lines ---------------------------------------------------------------------------------------------------------


async def test_a_slow_peer_makes_the_round_as_long_as_its_line_and_takes_part(
    memory: InMemorySwarm, way_of_many: str
) -> None:
    *_, slow = peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS)
    rounds = await memory.meet(*peers)
    memory.network.hosts[slow.peer_id].rate = 12_000.0  # bytes in a second
    began = memory.now
    begin_all(peers, rounds)
    groups = await asyncio.gather(*map(outcome, rounds))
    assert [set(group) for group in groups] == [ids(*peers)] * 3
    for peer in peers:
        assert torch.allclose(peer.numbers, torch.full((SHARED,), 2.0))
    sent = 4 * SHARED * (4 / 3 if way_of_many == "shared out" else 2)
    assert sent / 12_000 - 0.5 < memory.now - began < sent / 12_000 + 2.0
    assert not any(account.stalled for peer in peers for account in peer.averager.take_round_reports())


@pytest.mark.parametrize("loss", [0.1, 0.4])
async def test_what_the_line_loses_arrives_later_and_nothing_is_missing(
    memory: InMemorySwarm, loss: float, way_of_many: str
) -> None:
    memory.network.loss = loss
    peers = await memory.join_with_averagers(4, SHARED, **SMALL_PARTS)
    groups = await average(memory, *peers)
    assert [set(group) for group in groups] == [ids(*peers)] * 4
    for peer in peers:
        assert torch.allclose(peer.numbers, torch.full((SHARED,), 2.5))


@pytest.mark.parametrize("is_answer", [False, True], ids=["numbers", "answers"])
async def test_a_stream_that_breaks_costs_what_was_in_it_and_a_deadline_at_most(
    memory: InMemorySwarm, is_answer: bool
) -> None:
    settings = {"sender_timeout": 2.0, "reducer_timeout": 4.0}
    one, other, third = peers = await memory.join_with_averagers(3, SHARED, **SMALL_PARTS, **settings)
    rounds = await memory.meet(*peers)
    broken: list[Message] = []

    def breaks(message: Message) -> bool:
        is_wanted = averaging(message) and message.is_answer is is_answer
        if is_wanted and {message.sender, message.receiver} == ids(one, other) and not broken:
            broken.append(message)
            return True
        return False

    memory.network.breaks = breaks
    began = memory.now
    begin_all(peers, rounds)
    groups = await asyncio.gather(*map(outcome, rounds))
    assert broken
    assert set(groups[2]) == ids(*peers)
    assert all(set(group) >= {own.peer_id, third.peer_id} for group, own in zip(groups, peers, strict=False))
    for value, peer in enumerate(peers, start=1):
        assert set(peer.numbers.tolist()) <= {float(value), 1.5, 2.0, 2.5}
    assert memory.now - began < 5.0


# -- what cannot be averaged ---------------------------------------------------------------------------------------


class Sender(GradientAverager):
    """Sends what it is told to, with such a weight, to those who average."""

    value: ClassVar[float | None] = None
    weight: ClassVar[float | None] = None

    async def _run_allreduce_inplace_(self, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if self.value is not None:
            for tensor in tensors:
                tensor.view(-1)[-1] = self.value
        await super()._run_allreduce_inplace_(tensors, *args, **kwargs)

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        runner.weight = runner.weight if self.weight is None else self.weight
        return runner


class OtherShape(GradientAverager):
    """Sends parts of another shape than the others expect."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        generate = runner._generate_input_for_peer

        async def reshaped(peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
            async for message in generate(peer_index):
                message.head.tensor_part.CopyFrom(serialize_torch_tensor(torch.ones(7)))
                yield message.head

        runner._generate_input_for_peer = reshaped
        return runner


class Garbler(FaultTolerantRunner):
    """Answers with numbers that are no average."""

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._accumulate_parts_streaming(stream, sender_index):
            garbage = serialize_torch_tensor(torch.full(tuple(message.tensor_part.size), math.nan))
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=garbage)


class GarblingReducer(GradientAverager):
    """Its averages are garbage."""

    def _runner_of(self, *args: Any, **settings: Any) -> FaultTolerantRunner:
        runner = super()._runner_of(*args, **settings)
        runner.__class__ = Garbler
        return runner


async def attacked(
    memory: InMemorySwarm, kind: Callable[..., GradientAverager], rule: str = "norm_bound", **of_third: Any
) -> tuple[list[Any], list[InMemoryPeer]]:
    """What two honest peers, and one of such a kind, have of a round in which they put in 1, 2 and 6."""
    peers = await memory.join(3)
    for number, (peer, one) in enumerate(zip(peers, (GradientAverager, GradientAverager, kind), strict=True)):
        options = {"robust_aggregation": rule, **(of_third if number == 2 else {"bandwidth": 1.0})}
        await peer.average_with(SHARED, one, **SMALL_PARTS, **options)
    memory.expect_each_other(*peers)
    rounds = [await peer.search(value) for peer, value in zip(peers, (1.0, 2.0, 6.0), strict=True)]
    return list(await asyncio.gather(*map(outcome, rounds[:2]))), peers


ATTACKS: dict[str, dict[str, Any]] = {
    "nan": {"value": math.nan},
    "infinity": {"value": math.inf},
    "1e30": {"value": 1e30},
    "much larger than usual": {"value": 1e6},
    "a weight of nan": {"weight": math.nan},
    "a negative weight": {"weight": -1.0},
    "an infinite weight": {"weight": math.inf},
}


@pytest.mark.parametrize("attack", [*ATTACKS, "another shape"])
async def test_the_others_average_without_a_sender_of_such(memory: InMemorySwarm, attack: str) -> None:
    kind = OtherShape if attack == "another shape" else type("OneOfThose", (Sender,), ATTACKS[attack])
    outcomes, (*honest, attacker) = await attacked(memory, kind, client_mode=True)
    # the one of the two that averages the last part sees the number in it
    named = [outcome for outcome in outcomes if outcome.refused]
    assert named
    for one in named:
        assert one.refused.keys() == ids(attacker)
        assert attacker.peer_id not in one
    for peer in honest:
        # parts of those that average before the last number, which is the bad one, may hold all three
        assert bool(peer.numbers.isfinite().all())
        assert peer.numbers[-1].item() == 1.5


@pytest.mark.parametrize("attack", [*ATTACKS, "another shape"])
async def test_each_of_those_who_get_all_of_it_refuses_it(
    memory: InMemorySwarm, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "is_far", lambda record: True)
    kind = OtherShape if attack == "another shape" else type("OneOfThose", (Sender,), ATTACKS[attack])
    outcomes, (*honest, attacker) = await attacked(memory, kind, bandwidth=1.0)
    # one whose weight is none ends its part of the round itself, maybe before the last of them has heard of it
    assert any(one.refused for one in outcomes)
    for one, peer in zip(outcomes, honest, strict=True):
        assert one.refused.keys() <= ids(attacker)
        assert set(one) == ids(*honest)
        assert peer.numbers.tolist()[-1] == 1.5
        assert set(peer.numbers.tolist()) <= {1.5, 3.0}


@pytest.mark.parametrize("chosen", [Float16Compression(), Uniform8BitQuantization()], ids=["float16", "8 bits"])
async def test_codecs_hide_nothing(memory: InMemorySwarm, chosen: Any) -> None:
    kind = type("SendsNan", (Sender,), {"value": math.nan})
    outcomes, (*_, attacker) = await attacked(memory, kind, client_mode=True, compression=chosen)
    assert any(set(outcome.refused) == ids(attacker) for outcome in outcomes)


async def test_without_a_rule_all_that_is_finite_counts(memory: InMemorySwarm) -> None:
    large = type("Large", (Sender,), {"value": 3e6})
    outcomes, (*honest, attacker) = await attacked(memory, large, rule="none", client_mode=True)
    assert all(attacker.peer_id in outcome and not outcome.refused for outcome in outcomes)
    assert [peer.numbers[-1].item() for peer in honest] == [1_000_001.0] * 2


async def test_with_centered_clipping_one_of_three_has_no_more_force_than_the_others(memory: InMemorySwarm) -> None:
    outcomes, (*honest, attacker) = await attacked(memory, GradientAverager, rule="centered_clipping", client_mode=True)
    assert all(attacker.peer_id in outcome for outcome in outcomes)
    for peer in honest:
        assert 1.5 <= peer.numbers.min().item() <= peer.numbers.max().item() <= 2.5  # the mean is 3


@pytest.mark.usefixtures("shared_out")
async def test_an_average_that_is_none_leaves_this_peers_own(memory: InMemorySwarm) -> None:
    outcomes, (*honest, attacker) = await attacked(memory, GarblingReducer, bandwidth=1.0)
    for one, peer, own in zip(outcomes, honest, (1.0, 2.0), strict=True):
        assert one.refused.keys() == ids(attacker)
        assert "as an average" in one.refused[attacker.peer_id]
        assert set(peer.numbers.tolist()) == {own, 3.0}


class Nonsense(GradientAverager):
    """Sends what cannot be averaged."""

    async def _run_allreduce_inplace_(self, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        for tensor in tensors:
            tensor.fill_(math.nan)
        await super()._run_allreduce_inplace_(tensors, *args, **kwargs)


async def test_numbers_that_are_none_are_refused_by_the_one_they_are_sent_to(memory: InMemorySwarm) -> None:
    attacker, other = peers = await memory.join(2)
    await attacker.average_with(3, Nonsense)
    await other.average_with()
    groups = await average(memory, *peers)
    assert groups[1].refused.keys() == ids(attacker)
    assert other.numbers.tolist() == [2.0] * 3
    assert bool(attacker.numbers.isnan().all())


async def test_numbers_that_are_none_are_refused_by_whoever_averages_them(memory: InMemorySwarm) -> None:
    attacker, *others = peers = await memory.join(3)
    await attacker.average_with(SHARED, Nonsense, **SMALL_PARTS)
    for peer in others:
        await peer.average_with(SHARED, **SMALL_PARTS)
    groups = await average(memory, *peers)
    for value, (group, peer) in enumerate(zip(groups[1:], others, strict=True), start=2):
        assert group.refused.keys() == ids(attacker)
        # 2.5 is the average of what was not refused; what the attacker was to average stays as it was
        assert 2.5 in peer.numbers
        assert set(peer.numbers.tolist()) <= {2.5, float(value)}


# -- what a sender claims ------------------------------------------------------------------------------------------


async def honest_and_liar(memory: InMemorySwarm, reported: float) -> list[InMemoryPeer]:
    """Two, one of whom has reported so many samples of an epoch of 32."""
    honest, liar = peers = await memory.join(2)
    await honest.average_with()
    await liar.average_with(client_mode=True)
    memory.expect_each_other(*peers)
    honest.averager.note_reports(SampleReports(32.0, {liar.id: Told(1, reported, 0.0, 0.0)}))
    return peers


async def test_a_claim_of_a_thousand_million_samples_counts_for_those_that_were_reported(memory: InMemorySwarm) -> None:
    honest, liar = peers = await honest_and_liar(memory, reported=16.0)
    rounds = [await honest.search(0.0, weight=32.0), await liar.search(1.0, weight=1e9)]
    groups = await asyncio.gather(*map(outcome, rounds))
    assert [set(group) for group in groups] == [ids(*peers)] * 2
    assert [peer.numbers.tolist() for peer in peers] == [[0.5] * 3] * 2


async def test_in_a_round_it_is_seen_who_has_reported_more_than_it_puts_in(memory: InMemorySwarm) -> None:
    honest, liar = peers = await honest_and_liar(memory, reported=32.0)
    rounds = [await peer.search(0.0, weight=8.0) for peer in peers]
    await asyncio.gather(*map(outcome, rounds))
    (account,) = honest.averager.take_round_reports()
    assert account.overstated == {liar.id}


# -- what is still to be sent --------------------------------------------------------------------------------------


async def test_what_is_still_to_be_sent_is_not_changed_before(memory: InMemorySwarm) -> None:
    slow, quick = peers = await memory.join(2)
    await slow.average_with(SHARED, SlowSender, **SMALL_PARTS)
    await quick.average_with(SHARED, **SMALL_PARTS)
    groups = await average(memory, *peers)
    assert [set(group) for group in groups] == [ids(*peers)] * 2
    for peer in peers:
        assert torch.equal(peer.numbers, torch.full((SHARED,), 1.5))
