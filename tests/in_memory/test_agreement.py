"""Who decides on swarm-wide options, and from when on all train with them, as hosts come, go and change them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hivenb.engine.network.record_board import owner_of
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.errors import OptionsError
from hivenb.options import Options
from hivenb.options.swarm_wide import shared_part
from hivenb.swarm.agreement.host import CANDIDATES, RENEWAL, Hosting
from hivenb.swarm.agreement.options_record import EXPIRATION, NOTICE, Declaration, Plan, Records, label_of
from in_memory.swarm import RUN, InMemoryPeer, InMemorySwarm

OPTIONS = Options(target_batch_size=512, matchmaking_time=3.0, averaging_timeout=20.0, run_id=RUN)
SHARED = shared_part(OPTIONS)


def target(size: int) -> dict[str, Any]:
    """What all agree on, with another target batch size."""
    return shared_part(OPTIONS.replace(target_batch_size=size))


class Member:
    """A peer that takes part, and looks once a second as a run does."""

    def __init__(self, memory: InMemorySwarm, peer: InMemoryPeer, others: int = 0):
        self._memory, self.peer = memory, peer
        self.epoch, self.others = 0, others
        self.hosting: Hosting = peer.host(self.reports)
        #: what it has trained with, by epochs
        self.diary: dict[int, int] = {}

    def reports(self) -> tuple[PeerInfo, ...]:
        return tuple(PeerInfo(f"other {n}", self.epoch, 0, 1.0, False, 0.0, False) for n in range(self.others))

    async def join(self, shared: dict[str, Any] = SHARED) -> dict[str, Any]:
        joined: dict[str, Any] = await self._memory.in_thread(self.hosting.join, shared)
        return joined

    async def look(self) -> None:
        await self._memory.in_thread(self.hosting.look, self.reports())

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await self._memory.in_thread(method, *args)

    @property
    def leads(self) -> bool:
        return self.hosting.not_host_reason is None

    @property
    def size(self) -> int:
        """Of the batches that it trains with at the moment."""
        wanted = self.hosting.wanted(self.epoch, is_paused=False)
        assert wanted is not None
        return int(wanted["target_batch_size"])

    def train(self, seconds_per_epoch: float) -> None:
        """Look once a second, and go through epochs."""
        self.peer.do(self._go_on_looking())
        self.peer.do(self._go_on_training(seconds_per_epoch))

    async def _go_on_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(1.0)

    async def _go_on_training(self, seconds: float) -> None:
        while True:
            self.diary[self.epoch] = self.size
            await asyncio.sleep(seconds)
            self.epoch += 1
            self.hosting.note_epoch()


async def members(memory: InMemorySwarm, count: int, **kwargs: Any) -> list[Member]:
    return [Member(memory, peer, **kwargs) for peer in await memory.join(count)]


async def looks(*all_: Member) -> None:
    for member in all_:
        await member.look()


# -- who decides ---------------------------------------------------------------------------------------------------


async def test_the_elder_stays_host_and_the_next_one_follows_it(memory: InMemorySwarm) -> None:
    elder, younger = await members(memory, 2)
    assert await elder.join() == SHARED
    await asyncio.sleep(1.0)
    assert await younger.join(target(96)) == SHARED, "what is agreed on, instead of its own"
    await asyncio.sleep(0.1)  # until its declaration has arrived
    await looks(elder, younger)
    assert (elder.leads, younger.leads) == (True, False)
    with pytest.raises(OptionsError, match=rf"at this peer: .*{str(elder.peer.peer_id)[-6:]}"):
        younger.hosting.decide(target(96), 0, None)
    await elder.call(elder.hosting.leave)
    await looks(younger)
    assert younger.leads
    assert younger.size == 512, "what was agreed on stays"
    assert younger.hosting.decide(target(96), 5, None) == 5, "with nobody else there, at once"
    await asyncio.sleep(0.1)
    # who returns is the elder again, and goes on with what was decided meanwhile
    returned = Member(memory, elder.peer)
    assert await returned.join() == target(96)
    await asyncio.sleep(0.1)
    await looks(returned, younger)
    assert (returned.leads, younger.leads) == (True, False)
    assert younger.peer.host(may_host=False).not_host_reason is not None


@pytest.mark.parametrize("apart", [0.0, 0.5])
@pytest.mark.parametrize("count", [2, 4])
async def test_of_hosts_that_start_in_the_same_moment_one_is_left(
    memory: InMemorySwarm, count: int, apart: float
) -> None:
    """None finds what the others declare, as that is on its way."""
    memory.records.delay = 1.0
    all_ = await members(memory, count, others=1)

    async def start(number: int) -> None:
        await asyncio.sleep(number * apart / count)
        assert await all_[number].join(target(100 + number)) == target(100 + number)

    await asyncio.gather(*map(start, range(count)))
    for _ in range(3):
        await asyncio.sleep(1.0)
        await looks(*all_)
    assert sum(member.leads for member in all_) == 1
    assert len({member.size for member in all_}) == 1


@pytest.mark.parametrize("at_once", [True, False], ids=["all at once", "one after the other"])
@pytest.mark.parametrize("count", [6, 7])
async def test_one_host_is_left_when_all_that_have_declared_anything_have_gone(
    memory: InMemorySwarm, count: int, at_once: bool
) -> None:
    """Those behind them have seen nothing of each other."""
    all_ = await members(memory, count, others=count - 1)
    for member in all_:
        await member.join()
        await asyncio.sleep(1.0)
        await looks(*all_[: all_.index(member) + 1])
    for _ in range(40):  # nobody has just come any more
        await asyncio.sleep(1.0)
        await looks(*all_)
    gone, left = all_[:CANDIDATES], all_[CANDIDATES:]
    for member in gone:
        if at_once:
            member.peer.die()
        else:
            await member.call(member.hosting.leave)
            await asyncio.sleep(1.0)
            await looks(*all_[all_.index(member) + 1 :])
    for _ in range(int(2 * EXPIRATION)):
        await asyncio.sleep(1.0)
        await looks(*left)
    (host,) = [member for member in left if member.leads]
    host.hosting.decide(target(384), 0, None)
    for _ in range(20):
        await asyncio.sleep(1.0)
        for member in left:
            member.epoch += 1
        await looks(*left)
    assert [member.size for member in left] == [384] * len(left)


@pytest.mark.parametrize("sleeps", [True, False], ids=["asleep", "cut off"])
async def test_a_host_that_was_away_goes_on_with_what_was_decided_meanwhile(
    memory: InMemorySwarm, sleeps: bool
) -> None:
    host, other = await members(memory, 2, others=1)
    for member in (host, other):
        await member.join()
        await asyncio.sleep(1.0)
        await looks(host, other)
    assert host.leads
    read, host.hosting._records.read = host.hosting._records.read, lambda: ()
    write, host.hosting._records.write = host.hosting._records.write, lambda _: None
    for _ in range(int(EXPIRATION) + 15):
        await asyncio.sleep(1.0)
        await looks(*([other] if sleeps else [host, other]))
    assert other.leads
    other.hosting.decide_at_once(target(384), 0)
    await asyncio.sleep(5.0)
    await looks(other)
    host.hosting._records.read, host.hosting._records.write = read, write
    for _ in range(5):
        await looks(host, other)
        assert [host.size, other.size] == [384, 384]
        await asyncio.sleep(1.0)
    assert (host.leads, other.leads) == (True, False)


async def test_one_that_is_followed_no_more_is_nobody_to_catch_up_with(memory: InMemorySwarm) -> None:
    host, other = await members(memory, 2, others=1)
    for member in (host, other):
        await member.join()
        await asyncio.sleep(1.0)
        await looks(host, other)
    host.hosting.decide_at_once(target(384), 0)
    await looks(host)
    other.hosting.stop_following_host()
    for _ in range(int(2 * EXPIRATION) + 15):  # the host is away, and comes back
        await asyncio.sleep(1.0)
        await looks(other)
    for _ in range(3):
        await looks(host, other)
        await asyncio.sleep(1.0)
    assert (other.leads, other.size) == (True, 512)


async def test_a_host_that_dies_is_followed_until_its_declaration_expires(memory: InMemorySwarm) -> None:
    elder, *others = await members(memory, 3)
    for member in (elder, *others):
        await member.join()
        await asyncio.sleep(1.0)
    elder.peer.die()
    died = memory.now
    while not others[0].leads:
        assert memory.now - died < 2 * EXPIRATION
        await looks(*others)
        await asyncio.sleep(1.0)
    assert EXPIRATION - 4.0 <= memory.now - died <= EXPIRATION + 1.0
    await looks(*others)
    assert [member.leads for member in others] == [True, False]
    assert str(others[0].peer.peer_id)[-6:] in str(others[1].hosting.not_host_reason)


async def test_a_declaration_that_is_renewed_does_not_expire_and_one_that_is_not_does(memory: InMemorySwarm) -> None:
    one, reader = await members(memory, 2)
    await one.join()
    records = Records(reader.peer.dht, RUN)
    for _ in range(8):
        await asyncio.sleep(RENEWAL + 1.0)
        await one.look()
        assert len(await memory.in_thread(records.read)) == 1
    await asyncio.sleep(EXPIRATION + 1.0)
    assert await memory.in_thread(records.read) == ()


async def test_declarations_that_a_read_does_not_find_count_until_they_expire(memory: InMemorySwarm) -> None:
    one, reader = await members(memory, 2)
    await one.join()
    await asyncio.sleep(0.1)
    records = Records(reader.peer.dht, RUN)
    (declared,) = await memory.in_thread(records.read)
    memory.records.loss = 1.0
    assert await memory.in_thread(records.read) == (declared,)
    await asyncio.sleep(EXPIRATION)
    assert await memory.in_thread(records.read) == ()


async def test_a_dht_that_loses_a_fifth_of_what_it_is_asked_for_makes_nobody_else_the_host(
    memory: InMemorySwarm,
) -> None:
    all_ = await members(memory, 4, others=3)
    for member in all_:
        await member.join()
        await asyncio.sleep(1.0)
    await looks(*all_)
    memory.records.loss = 0.2
    for _ in range(40):
        await asyncio.sleep(1.0)
        await asyncio.gather(*(member.look() for member in all_))
        assert [member.leads for member in all_] == [True, False, False, False]


# -- when it counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds_per_epoch", [0.9, 3.0, 17.0])
async def test_all_change_at_one_epoch(memory: InMemorySwarm, seconds_per_epoch: float) -> None:
    memory.records.delay = 0.2
    host, *_ = all_ = await members(memory, 3, others=2)
    for member in all_:
        await member.join()
        await asyncio.sleep(0.37)
    for member in all_:
        member.train(seconds_per_epoch)
    await asyncio.sleep(3.5 * seconds_per_epoch)
    before = host.epoch
    since = host.hosting.decide(target(384), before, seconds_per_epoch / 2)
    assert before < since <= before + 2 + NOTICE / seconds_per_epoch
    await asyncio.sleep((since - before + 1) * seconds_per_epoch)
    for member in all_:
        assert {size for epoch, size in member.diary.items() if epoch < since} == {512}
        assert {size for epoch, size in member.diary.items() if epoch >= since} == {384}


async def test_one_that_comes_while_a_change_is_under_way_changes_with_the_others(memory: InMemorySwarm) -> None:
    host, _ = all_ = await members(memory, 2, others=2)
    for one in all_:
        await one.join()
        one.train(2.0)
    await asyncio.sleep(9.0)
    since = host.hosting.decide(target(384), host.epoch, 1.0)
    await asyncio.sleep(0.5)
    (late,) = await members(memory, 1, others=2)
    late.epoch = host.epoch
    assert await late.join(target(64)) == SHARED
    late.train(2.0)
    await asyncio.sleep(12.0)
    for one in (*all_, late):
        assert one.diary[since - 1] == 512
        assert one.diary[since] == 384


async def test_a_host_is_told_what_nobody_would_follow(memory: InMemorySwarm) -> None:
    (host,) = await members(memory, 1, others=1)
    await host.join()
    with pytest.raises(
        OptionsError, match=r"from 512 to 4097, which is more than 8 times .*: make it in several steps"
    ):
        host.hosting.decide(target(4097), 0, None)
    host.hosting.decide(target(4096), 0, None)


# -- whoever writes what is not so ---------------------------------------------------------------------------------


async def forge(peer: InMemoryPeer, version: int, since: float, size: int, first: InMemoryPeer | None = None) -> None:
    """Declare what is not so, as one can who has a key of its own.

    :param first: that it says was there before it
    """
    owner, plan = owner_of(peer.dht.private_key), Plan(version, ((0, target(size)),))
    order = (label_of(owner_of((first or peer).dht.private_key)), label_of(owner))
    packed = Declaration(owner, peer.peer_id.to_base58(), since, plan, order).pack()
    expires = peer.dht.loop.dht_time() + EXPIRATION + version
    assert await peer.dht.store(
        f"{RUN}_options",
        subkey=owner_of(peer.dht.private_key),
        value=packed,
        expiration_time=expires,
        return_future=True,
    )


async def test_whoever_claims_to_have_come_first_is_not_followed(memory: InMemorySwarm) -> None:
    founder, member = await members(memory, 2)
    await founder.join()
    await asyncio.sleep(1.0)
    await member.join()
    (forger,) = await memory.join()
    await forge(forger, version=9, since=0.0, size=96)
    await looks(founder, member)
    assert (founder.leads, member.leads) == (True, False)
    assert (founder.size, member.size) == (512, 512)
    (newcomer,) = await members(memory, 1)
    assert await newcomer.join(target(64)) == SHARED, "whom most of them follow"


async def test_a_newcomer_believes_who_has_invited_it_and_not_those_who_are_more(memory: InMemorySwarm) -> None:
    (founder,) = await members(memory, 1)
    await founder.join()
    first, *others = await memory.join(3)
    for forger in (first, *others):
        await forge(forger, version=9, since=0.0, size=96, first=first)
    for inviting, size in ((founder.peer, 512), (first, 96)):
        invite = f"/ip4/127.0.0.1/tcp/1/p2p/{inviting.peer_id}"
        newcomer = Member(memory, (await memory.join(initial_peers=[invite]))[0])
        assert await newcomer.join(target(64)) == target(size)


async def test_one_that_joined_and_missed_the_host_at_first_follows_it_and_says_so(
    memory: InMemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivenb.swarm.agreement.host.CANDIDATES", 1)
    host, peer = await memory.join(2)
    younger = Member(memory, (await memory.join(initial_peers=[f"/ip4/127.0.0.1/tcp/1/p2p/{peer.peer_id}"]))[0])
    records = Records(peer.dht, RUN)
    own = label_of(owner_of(younger.peer.dht.private_key))
    assert await younger.join(target(128)) == target(128), "it has found nobody"
    await asyncio.sleep(0.1)
    assert [one.order for one in await memory.in_thread(records.read)] == [(own,)]
    await forge(host, version=0, since=5.0, size=512)
    await younger.look()
    assert younger.size == 512
    assert not younger.leads
    await asyncio.sleep(0.1)
    told = {one.owner: one.order for one in await memory.in_thread(records.read)}
    assert (label_of(owner_of(host.dht.private_key)), own) in told.values()


async def test_a_host_that_changes_too_much_at_once_is_not_followed_any_more_when_told_so(
    memory: InMemorySwarm,
) -> None:
    host, peer = await memory.join(2)
    member = Member(memory, peer)
    await forge(host, version=0, since=5.0, size=512)
    assert await member.join(target(128)) == SHARED
    assert member.hosting.refusal is None
    await forge(host, version=1, since=5.0, size=63)
    await member.look()
    assert "target batch size from 512 to 63, which is more than 8 times" in str(member.hosting.refusal)
    assert member.size == 512
    await forge(host, version=2, since=5.0, size=64)
    await member.look()
    assert (member.hosting.refusal, member.size) == (None, 64)
    assert member.hosting.stop_following_host() == host.peer_id.to_base58()
    await member.look()
    assert member.leads
    assert member.size == 128, "not what the other one has decided"
    with pytest.raises(OptionsError, match="there is no other peer that decides"):
        member.hosting.stop_following_host()
