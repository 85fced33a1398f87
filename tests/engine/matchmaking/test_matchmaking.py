"""What one peer answers those that it may meet, and when its group is complete; who meets whom: tests/in_memory."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing.averager_without_process import EVIL, OTHER, OWN, anew, gathered, run, step, stream
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.matchmaking.group_records import LARGEST_GROUP, epoch_of, is_marked, marked
from hivenb.engine.matchmaking.matchmaking import Attendance, EpochMatchmaking, ExpectedPeers


def test_the_epoch_travels_with_the_request() -> None:
    gather = MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(7)])
    assert epoch_of(gather) is None, "a peer of plain hivemind may mean something else"
    assert epoch_of(marked(gather)) == 7
    assert is_marked(MSGPackSerializer.loads(marked(gather)))


@pytest.mark.parametrize("sent", [b"", b"nonsense", MSGPackSerializer.dumps(5), MSGPackSerializer.dumps([1, 2])])
def test_what_is_no_request_of_ours_has_no_epoch(sent: bytes) -> None:
    assert epoch_of(sent) is None


async def _matchmaking(target_group_size: int | None = None) -> EpochMatchmaking:
    own: Any = SimpleNamespace(peer_id=OWN)
    return EpochMatchmaking(
        own,
        b"schema",
        own,
        servicer_type=GradientAverager,
        prefix="run",
        target_group_size=target_group_size,
        min_group_size=2,
        min_matchmaking_time=5.0,
        request_timeout=2.0,
        client_mode=False,
    )


def test_who_asks_somebody_itself_answers_at_once_that_it_cannot_lead() -> None:
    """Two that ask each other would wait for each other's answer."""

    async def be_asked() -> None:
        asked, now = await _matchmaking(), get_dht_time()
        asked.potential_leaders.declared_expiration_time = now + 10.0
        context = P2PContext(handle_name="", local_id=OWN, remote_id=EVIL)

        def answer(expiration: float) -> asyncio.Task[averaging_pb2.MessageFromLeader]:
            request = averaging_pb2.JoinRequest(schema_hash=b"schema", expiration=expiration)
            return asyncio.ensure_future(anext(asked.rpc_join_group(request, context)))

        async with asked.lock_request_join_group:  # as while it asks somebody
            earlier, later = answer(now + 5.0), answer(now + 15.0)
            assert (await asyncio.wait_for(earlier, 10)).code == averaging_pb2.BAD_EXPIRATION_TIME
            assert not later.done(), "it may lead whoever has begun to look after it"
        assert (await asyncio.wait_for(later, 10)).code == averaging_pb2.NOT_LOOKING_FOR_GROUP

    asyncio.run(be_asked())


@pytest.mark.parametrize(("chosen", "size"), [(None, 3), (4, 4)])
def test_a_group_is_complete_with_those_who_are_there_or_with_as_many_as_the_user_has_chosen(
    chosen: int | None, size: int
) -> None:
    async def expect_two() -> int | None:
        matchmaking = await _matchmaking(chosen)
        assert matchmaking.target_group_size == chosen
        await matchmaking.expect(ExpectedPeers(frozenset({Attendance(b"one", 0, 0), Attendance(b"another", 0, 0)})))
        return matchmaking.target_group_size

    assert asyncio.run(expect_two()) == size


def test_a_group_takes_no_more_than_all_can_begin_with() -> None:
    async def expect_too_many() -> list[int | None]:
        found = []
        for chosen in (None, 10**6):
            matchmaking = await _matchmaking(chosen)
            await matchmaking.expect(ExpectedPeers(frozenset(Attendance(b"%d" % n, 0, 0) for n in range(1000))))
            found.append(matchmaking.target_group_size)
        return found

    assert asyncio.run(expect_too_many()) == [LARGEST_GROUP] * 2


@pytest.mark.parametrize("is_given_up", [False, True], ids=["who searches", "who has given up its search"])
@pytest.mark.parametrize(
    ("peers", "group"),
    [((EVIL, OTHER), b"g" * 20), ((OWN, EVIL, EVIL), b"g" * 20), ((OWN, EVIL), b"")],
    ids=["of others", "somebody twice", "with the id that all others begin with"],
)
def test_a_leader_that_announces_no_group_is_blamed(peers: tuple[PeerID, ...], group: bytes, is_given_up: bool) -> None:
    message = averaging_pb2.MessageFromLeader(
        code=averaging_pb2.BEGIN_ALLREDUCE,
        group_id=group,
        ordered_peer_ids=[peer.to_bytes() for peer in peers],
        gathered=[gathered() for _ in peers],
    )

    async def follow() -> list[frozenset[bytes]]:
        matchmaking, told = anew()._matchmaking, []
        matchmaking.tell = lambda report: told.append(report.stalled)

        async def join(request: Any) -> Any:
            if is_given_up:
                matchmaking.assembled_group.cancel()
            return stream([averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED), message])

        matchmaking._servicer_type = SimpleNamespace(
            get_stub=lambda *args, **kwargs: SimpleNamespace(rpc_join_group=join)
        )
        async with matchmaking.looking_for_group(step()):
            assert await matchmaking._request_join_group(EVIL) is None
        assert not matchmaking._awaiting_trigger
        return told

    assert run(follow()) == [frozenset({EVIL.to_bytes()})]


def test_whoever_comes_unexpectedly_takes_nobodys_place() -> None:
    async def be_joined() -> None:
        matchmaking = await _matchmaking()
        await matchmaking.expect(ExpectedPeers(frozenset({Attendance(EVIL.to_bytes(), 0, 0)})))
        matchmaking.current_followers[PeerID(b"\x12\x20" + bytes(range(32)))] = averaging_pb2.JoinRequest()
        assert matchmaking.target_group_size == 3
        matchmaking.current_followers[EVIL] = averaging_pb2.JoinRequest()
        assert matchmaking.target_group_size == 3

    asyncio.run(be_joined())


def test_a_group_does_not_wait_for_the_dht_to_know_that_it_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    async def be_declared(keys: GroupKeyManager, *args: Any, looking_for_group: bool = True) -> bool:
        """As long as a node of the DHT does not answer."""
        await asyncio.sleep(60)
        return looking_for_group

    async def withdraw() -> None:
        keys = (await _matchmaking()).group_key_manager
        declaration = keys.current_key, OWN, get_dht_time() + 60.0
        assert await asyncio.wait_for(keys.declare_averager(*declaration, looking_for_group=False), 10)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(keys.declare_averager(*declaration), 0.1)

    monkeypatch.setattr(GroupKeyManager, "declare_averager", be_declared)
    asyncio.run(withdraw())


def test_whoever_has_gone_is_not_asked_to_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PeerID] = []

    async def be_asked(matchmaking: Matchmaking, leader: PeerID) -> None:
        asked.append(leader)

    async def search() -> None:
        matchmaking = await _matchmaking()
        await matchmaking._request_join_group(EVIL)
        await matchmaking.expect(ExpectedPeers(frozenset(), gone=frozenset({EVIL.to_bytes()})))
        await matchmaking._request_join_group(EVIL)

    monkeypatch.setattr(Matchmaking, "_request_join_group", be_asked)
    asyncio.run(search())
    assert asked == [EVIL]


@pytest.fixture(params=[False, True], ids=["asked itself", "asked after another one"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """That a leader was asked, who is to begin some time, and who is heard just when nobody waits for it any more."""
    was_asked, redirected = asyncio.Event(), iter([request.param, False])

    async def wait_for_the_leader(matchmaking: Matchmaking, leader: PeerID) -> None:
        if next(redirected):
            await matchmaking._request_join_group(leader)
            return
        was_asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    monkeypatch.setattr(Matchmaking, "_request_join_group", wait_for_the_leader)
    return was_asked


def test_a_search_that_has_ended_asks_nobody_else(asked: asyncio.Event) -> None:
    async def end_a_search() -> None:
        searching = asyncio.create_task((await _matchmaking())._request_join_group(EVIL))
        await asked.wait()
        searching.cancel()
        await asyncio.wait({searching}, timeout=10)
        assert searching.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "somebody is still being asked"

    asyncio.run(end_a_search())


def test_a_leader_that_has_gone_is_followed_no_longer(asked: asyncio.Event) -> None:
    async def follow() -> None:
        matchmaking = await _matchmaking()
        following = asyncio.create_task(matchmaking._request_join_group(EVIL))
        await asked.wait()
        await matchmaking.expect(ExpectedPeers(frozenset(), gone=frozenset({b"another"})))
        assert not (await asyncio.wait({following}, timeout=0.5))[0]
        await matchmaking.expect(ExpectedPeers(frozenset(), gone=frozenset({EVIL.to_bytes()})))
        assert await asyncio.wait_for(following, 10) is None

    asyncio.run(follow())
