"""How far the peers of a run are, and who of them is there: trackers that talk, fall silent, die and come back."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration

from hivenb.engine.network.access.identity import id_of
from hivenb.engine.network.record_board import owner_of
from hivenb.engine.progress import failure_detector
from hivenb.engine.progress import tracker as module
from hivenb.engine.progress.failure_detector import FLOOD, MAX_UNREACHED, TRY_AGAIN_AFTER, FailureDetector, Pace
from hivenb.engine.progress.peer_reports import PeerInfo, read_peers
from hivenb.engine.progress.tracker import GONE_AFTER, METADATA_EXPIRATION, PeerList, ProgressTracker
from hivenb.errors import SwarmError
from in_memory.records import identity
from in_memory.swarm import RUN, InMemoryPeer, InMemorySwarm

NOBODY = PeerID(b"\x12\x20" + bytes(range(32)))


async def listed(memory: InMemorySwarm, peer: InMemoryPeer) -> tuple[PeerInfo, ...]:
    """Who is on the swarm's list, as a peer reads it."""
    found: tuple[PeerInfo, ...] = await memory.in_thread(read_peers, peer.dht, RUN)
    return found


async def samples(memory: InMemorySwarm, peer: InMemoryPeer) -> list[int]:
    return [one.samples for one in await listed(memory, peer)]


async def tracking(memory: InMemorySwarm, count: int, **kwargs: Any) -> list[InMemoryPeer]:
    """Peers with a tracker each."""
    peers = await memory.join(count)
    for peer in peers:
        await peer.track(**kwargs)
    return peers


def train(peer: InMemoryPeer, samples_per_second: int = 10) -> None:
    """Count batches, five in a second."""

    async def count() -> None:
        total = 0
        while True:
            await asyncio.sleep(0.2)
            total += samples_per_second // 5
            peer.tracker.report_local_progress(0, total)

    peer.do(count())


# -- the tracker ---------------------------------------------------------------------------------------------------


async def test_announced_before_its_first_samples(memory: InMemorySwarm) -> None:
    (peer,) = await tracking(memory, 1)
    assert await listed(memory, peer) == ()
    peer.tracker.announce()
    await asyncio.sleep(1.0)
    assert await samples(memory, peer) == [0]
    assert peer.tracker.global_progress.num_peers == 1


async def test_stepping_aside_takes_it_off_the_list_until_it_reports_again(memory: InMemorySwarm) -> None:
    (peer,) = await tracking(memory, 1)
    peer.tracker.report_local_progress(0, 1)
    await asyncio.sleep(2.0)
    assert await samples(memory, peer) == [1]
    peer.tracker.step_aside()
    await asyncio.sleep(0.5)
    assert await listed(memory, peer) == ()
    await asyncio.sleep(2.0)
    assert peer.tracker.global_progress.num_peers == 0
    peer.tracker.report_local_progress(0, 2)
    await asyncio.sleep(2.0)
    assert await samples(memory, peer) == [2]


async def test_shutting_down_says_goodbye(memory: InMemorySwarm) -> None:
    (peer,) = await tracking(memory, 1)
    peer.tracker.report_local_progress(0, 1)
    await asyncio.sleep(2.0)
    assert await samples(memory, peer) == [1]
    await memory.in_thread(peer.tracker.shutdown, 10)
    await asyncio.wait_for(peer.tracking, 10)
    await asyncio.sleep(0.5)
    assert await listed(memory, peer) == ()


async def test_one_that_counts_no_batches_for_long_is_not_waited_for(memory: InMemorySwarm) -> None:
    """hivemind goes on reporting what was counted before a validation, or for a training that is stuck."""
    (peer,) = await tracking(memory, 1)
    peer.tracker.announce()
    peer.tracker.report_local_progress(0, 1)
    await asyncio.sleep(module.SILENCE - 1.0)
    assert await samples(memory, peer) == [1]
    await asyncio.sleep(module.SILENCE)
    assert await listed(memory, peer) == ()
    peer.tracker.report_local_progress(0, 2)
    await asyncio.sleep(1.0)
    assert await samples(memory, peer) == [2]


async def test_one_that_left_without_a_goodbye_is_forgotten(memory: InMemorySwarm) -> None:
    left, stays = await tracking(memory, 2)
    for peer in (left, stays):
        train(peer)
    await asyncio.sleep(3.0)
    assert len(await listed(memory, stays)) == 2
    left.die()
    died = memory.now
    while len(await listed(memory, stays)) == 2 and memory.now - died < 2 * METADATA_EXPIRATION:
        await asyncio.sleep(1.0)
    assert METADATA_EXPIRATION - 2.0 <= memory.now - died <= METADATA_EXPIRATION + 2.0
    (left_over,) = await listed(memory, stays)
    assert left_over.is_self, "the one that is there has renewed its report meanwhile"


@pytest.mark.parametrize("count", [3, 8])
async def test_all_count_the_samples_of_all(memory: InMemorySwarm, count: int) -> None:
    peers = await tracking(memory, count)
    for peer in peers:
        peer.tracker.report_local_progress(0, 10 * peer.number)
    await asyncio.sleep(4.0)
    for peer in peers:
        progress = peer.tracker.global_progress
        assert (progress.num_peers, progress.samples_accumulated) == (count, 10 * sum(range(1, count + 1)))


async def test_the_training_thread_does_not_wait_for_a_read_of_the_dht(memory: InMemorySwarm) -> None:
    (peer,) = await tracking(memory, 1)
    memory.records.delay = 600.0
    await asyncio.sleep(10.0)
    assert peer.tracker.unanswered_for > 1.0
    acquired = peer.tracker.lock_global_progress.acquire(blocking=False)
    assert acquired, "it holds the lock while it waits for the network"


async def test_tells_who_has_gone_while_a_read_of_the_dht_waits_for_it(memory: InMemorySwarm) -> None:
    told: list[tuple[int, frozenset[bytes]]] = []
    peer, other = await tracking(memory, 2)
    peer.tracker.on_look = lambda reports, gone: told.append((len(reports), gone)) or frozenset()
    for one in (peer, other):
        train(one)
    await asyncio.sleep(8.0)
    assert told[-1] == (1, frozenset())
    memory.records.delay = 600.0
    await asyncio.sleep(1.0)
    before = peer.tracker.look
    assert before is not None
    other.die()
    await asyncio.sleep(4.0)
    assert told[-1] == (0, {other.id})
    assert peer.tracker.look.gone == {other.peer_id.to_base58()}
    assert (peer.tracker.look.taken_at, peer.tracker.look.peers) == (before.taken_at, before.peers)
    assert before.gone == frozenset(), "a look is a value"


async def test_its_newest_look_tells_any_thread_who_is_there(memory: InMemorySwarm) -> None:
    peer, other = await tracking(memory, 2)
    await asyncio.sleep(4.0)
    assert peer.tracker.look.peers == (), "nobody has announced itself yet"
    other.tracker.report_local_progress(0, 40)
    await asyncio.sleep(4.0)
    assert [(one.samples, one.is_self) for one in peer.tracker.look.peers] == [(40, False)]
    peer.tracker.report_local_progress(0, 7)
    await asyncio.sleep(4.0)
    look = peer.tracker.look
    assert [(one.samples, one.is_self) for one in look.peers] == [(7, True), (40, False)]
    assert [one.peer_id for one in look.peers] == [one.peer_id.to_base58() for one in (peer, other)]
    assert look.gone == frozenset()
    assert 0 <= memory.now - look.taken_at < 4.0


async def test_one_that_has_stepped_aside_goes_on_looking_at_the_others(memory: InMemorySwarm) -> None:
    peer, other = await tracking(memory, 2)
    for one in (peer, other):
        one.tracker.report_local_progress(0, 1)
    await asyncio.sleep(4.0)
    assert len(peer.tracker.look.peers) == 2
    peer.tracker.step_aside()
    await asyncio.sleep(4.0)
    assert [one.is_self for one in peer.tracker.look.peers] == [False]
    other.tracker.report_local_progress(0, 5)
    await asyncio.sleep(4.0)
    assert [one.samples for one in peer.tracker.look.peers] == [5]


async def test_tells_how_many_peers_there_are_also_while_an_epoch_ends(memory: InMemorySwarm) -> None:
    told: list[int] = []
    (peer,) = await tracking(memory, 1)
    peer.tracker.on_look = lambda reports, gone: told.append(len(reports)) or frozenset()
    peer.tracker.report_local_progress(0, 7)
    await asyncio.sleep(4.0)
    assert told[-1] == 0
    with peer.tracker.pause_updates():
        already = len(told)
        await asyncio.sleep(2.0)
        assert len(told) >= already + 2


@pytest.mark.parametrize("is_there_before", [True, False])
async def test_what_others_write_neither_keeps_it_from_starting_nor_ends_it(
    memory: InMemorySwarm, is_there_before: bool
) -> None:
    peer, stranger = await memory.join(2)
    if not is_there_before:
        await peer.track()
    subkeys = (owner_of(stranger.dht.private_key), 7, b"anybody")
    junk = (5, "text", {"epoch": 10**9}, {"peer_id": 7, "epoch": -1})
    for number, (subkey, value) in enumerate(itertools.product(subkeys, junk)):
        memory.records.put_unchecked(f"{RUN}_progress", subkey, value, memory.loop.dht_time() + 60 + number)
    if is_there_before:
        await peer.track()
    peer.tracker.report_local_progress(0, 5)
    await asyncio.sleep(5.0)
    assert not peer.tracking.done()
    assert peer.tracker.global_progress.num_peers == 1
    assert peer.tracker.global_epoch == 0


async def test_an_error_of_its_own_that_ends_it_is_told_at_the_next_batch(memory: InMemorySwarm) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("a bug")

    (peer,) = await tracking(memory, 1)
    peer.tracker.report_local_progress(0, 1)
    peer.tracker.on_look = fail
    peer.tracker.look_at_once()
    await asyncio.wait_for(peer.tracking, 10)
    with pytest.raises(SwarmError, match=r"follows the swarm has ended with RuntimeError\('a bug'\)"):
        peer.tracker.report_local_progress(0, 2)


async def test_a_batch_that_misleads_the_others_is_reported_soon_and_others_once_a_second(
    memory: InMemorySwarm,
) -> None:
    stored: list[float] = []
    (peer,) = await tracking(memory, 1)
    store = peer.dht.store

    def noting(*args: Any, **kwargs: Any) -> Any:
        stored.append(memory.now)
        return store(*args, **kwargs)

    peer.dht.store = noting
    train(peer)
    await asyncio.sleep(10.0)
    stored.clear()
    await asyncio.sleep(10.0)
    assert 9 <= len(stored) <= 11
    await asyncio.sleep(0.05)
    before = len(stored)
    peer.tracker.report_local_progress(0, 5_000)
    await asyncio.sleep(0.15)
    assert len(stored) == before + 1


async def test_between_two_reports_it_rests(memory: InMemorySwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "AS_RECKONED", 600.0)
    looks: list[float] = []
    due_after: Any = ProgressTracker._report_due_after.fget
    monkeypatch.setattr(
        ProgressTracker, "_report_due_after", property(lambda self: looks.append(memory.now) or due_after(self))
    )
    (peer,) = await tracking(memory, 1)
    peer.tracker.report_local_progress(0, 10)
    peer.tracker.announce()
    await asyncio.sleep(2.0)
    peer.tracker.local_progress = peer.tracker._reported  # a batch that comes as reckoned
    looks.clear()
    peer.tracker.should_report_progress.set()
    await asyncio.sleep(5.0)
    assert 1 <= len(looks) <= 3


@pytest.mark.parametrize("epoch", [0, 1], ids=["in its epoch", "at the next one"])
async def test_a_clock_that_is_set_back_silences_nobody(
    memory: InMemorySwarm, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back = 0.0
    monkeypatch.setattr(module, "get_dht_time", lambda: memory.loop.dht_time() - set_back)
    (peer,) = await tracking(memory, 1)
    stored: list[float] = []
    store = peer.dht.store

    def noting(*args: Any, expiration_time: float, **kwargs: Any) -> Any:
        stored.append(expiration_time)
        return store(*args, expiration_time=expiration_time, **kwargs)

    peer.dht.store = noting
    peer.tracker.report_local_progress(0, 1)
    peer.tracker.announce()
    await asyncio.sleep(2.0)
    set_back = 600.0
    before = len(stored)
    peer.tracker.report_local_progress(epoch, 2)
    await asyncio.sleep(2 * module.SILENCE)
    assert len(stored) >= before + 3
    assert stored[-1] < memory.loop.dht_time() - set_back + METADATA_EXPIRATION + 1.0


async def test_nor_does_it_blind_anybody(memory: InMemorySwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    set_back = 0.0
    monkeypatch.setattr(module, "get_dht_time", lambda: memory.loop.dht_time() - set_back)
    (peer,) = await tracking(memory, 1)
    looked: list[Any] = []
    get = peer.dht.get

    def noting(*args: Any, **kwargs: Any) -> Any:
        looked.append(args)
        return get(*args, **kwargs)

    peer.dht.get = noting
    peer.tracker.report_local_progress(0, 1)
    await asyncio.sleep(2.0)
    set_back = 600.0
    before = len(looked)
    await asyncio.sleep(30.0)
    assert len(looked) >= before + 10


async def test_alone_it_soon_looks_again(memory: InMemorySwarm) -> None:
    (peer,) = await tracking(memory, 1)
    peer.tracker.report_local_progress(0, 1)
    await asyncio.sleep(4.0)
    progress = peer.tracker.global_progress
    assert progress.num_peers == 1
    assert progress.next_fetch_time - memory.loop.dht_time() <= peer.tracker.default_refresh_period


# -- the list of peers ---------------------------------------------------------------------------------------------


def record(memory: InMemorySwarm, **peers: bytes) -> ValueWithExpiration[Any]:
    """What peers have reported, by the keys under which they have."""
    report = {"epoch": 0, "samples_accumulated": 1, "samples_per_second": 1.0, "client_mode": False}
    report |= {"time": memory.loop.dht_time()}
    entries = {key.encode(): ValueWithExpiration({**report, "peer_id": peer}, math.inf) for key, peer in peers.items()}
    return ValueWithExpiration(entries, math.inf)


async def test_of_several_that_name_one_peer_the_first_counts(memory: InMemorySwarm) -> None:
    own, other = await memory.join(2)
    peers = PeerList(own.dht)
    assert set(peers.take_in(record(memory, true=other.id), b"own", GONE_AFTER)) == {b"true"}
    both = record(memory, forged=other.id, true=other.id)
    both.value[b"forged"].value["epoch"] = 7
    assert {key: one.epoch for key, one in peers.take_in(both, b"own", GONE_AFTER).items()} == {b"true": 0}
    assert peers.look is not None
    assert [info.epoch for info in peers.look.peers] == [0]
    peers.take_in(record(memory), b"own", GONE_AFTER)
    assert set(peers.take_in(both, b"own", GONE_AFTER)) == {b"forged"}, "nobody else was there meanwhile"


async def test_rounds_wait_for_nobody_who_does_not_answer_and_a_flood_is_not_counted(memory: InMemorySwarm) -> None:
    own, other = await memory.join(2)
    peers, seen = PeerList(own.dht), []
    peers.on_look = lambda reports, gone: seen.append([one.peer_id for one in reports]) or frozenset()
    flood = {f"bogus{number}": id_of(identity(1000 + number)) for number in range(3 * MAX_UNREACHED)}
    for _ in range(20):
        counted = peers.take_in(record(memory, true=other.id, **flood), b"own", GONE_AFTER)
        assert len(counted) <= MAX_UNREACHED + 1
        assert b"true" in counted
        await asyncio.sleep(0.2)
    assert seen[-1] == [other.id]
    assert peers.pace.peers == 1 + FLOOD + 1, "they are not to slow it down"


async def test_the_more_are_on_the_list_the_more_seldom_each_reports(memory: InMemorySwarm) -> None:
    own, other = await memory.join(2)
    peers = PeerList(own.dht)
    assert peers.pace == Pace(1)
    peers.take_in(record(memory, own=own.id, other=other.id), b"own", GONE_AFTER)
    assert peers.pace == Pace(2)
    peers.take_in(record(memory), b"own", GONE_AFTER)
    assert peers.pace == Pace(1)


async def test_silence_is_what_is_heard_while_somebody_listens(
    memory: InMemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = await memory.join()
    peers, told = PeerList(own.dht), []
    monkeypatch.setattr(peers._detector, "find_gone", lambda *args: told.append(args) or frozenset())
    peers.look_for_the_gone(GONE_AFTER, reading_since=0.0)
    assert told == [], "nobody is known yet"
    peers.take_in(record(memory), b"own", GONE_AFTER)
    assert peers.look is not None
    for seconds in (3.0, -3.0):  # until the next look began; it was under way already
        peers.look_for_the_gone(GONE_AFTER, reading_since=peers.look.taken_at + seconds)
    assert [unread for *_, unread in told[1:]] == [pytest.approx(3.0), 0.0]


async def test_what_is_no_list_holds_nobody(memory: InMemorySwarm) -> None:
    (own,) = await memory.join()
    peers = PeerList(own.dht)
    for rubbish in (None, 7, "x", ValueWithExpiration(b"plain", 1.0), ValueWithExpiration({"a": 1}, 1.0)):
        assert peers.take_in(rubbish, b"own", GONE_AFTER) == {}


async def test_what_does_not_count_is_seen_and_not_counted(memory: InMemorySwarm) -> None:
    own, other = await memory.join(2)
    peers = PeerList(own.dht)
    peers.on_look = lambda reports, gone: frozenset(one.peer_id for one in reports)
    assert peers.take_in(record(memory, true=other.id), b"own", GONE_AFTER) == {}
    assert peers.look is not None
    assert [info.peer_id for info in peers.look.peers] == [other.peer_id.to_base58()]
    assert peers.look.uncounted == {other.peer_id.to_base58()}


# -- who is there --------------------------------------------------------------------------------------------------


class Watch:
    """A detector that is asked ten times a second, with a report of each that is there."""

    def __init__(self, memory: InMemorySwarm, own: InMemoryPeer, *watched: InMemoryPeer, is_client: bool = False):
        self._memory, self.detector = memory, FailureDetector(own.dht)
        self.reports = [self.report(peer.peer_id, is_client) for peer in watched]
        self.gone: frozenset[bytes] = frozenset()

    def report(self, peer: PeerID, is_client: bool = False) -> LocalTrainingProgress:
        return LocalTrainingProgress(
            peer_id=peer.to_bytes(),
            epoch=0,
            samples_accumulated=0,
            samples_per_second=1.0,
            time=self._memory.loop.dht_time(),
            client_mode=is_client,
        )

    async def go_on(self, seconds: float) -> frozenset[bytes]:
        for _ in range(round(10 * seconds)):
            self.gone = self.detector.find_gone(self.reports, GONE_AFTER)
            await asyncio.sleep(0.1)
        return self.gone

    def was_reached(self, peer: InMemoryPeer) -> bool:
        return self.detector._sightings[peer.id].was_reached


@pytest.fixture(params=[False, True], ids=["node", "client"])
def is_client(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def watch(memory: InMemorySwarm, count: int, is_client: bool) -> tuple[Watch, list[InMemoryPeer]]:
    """A detector, and peers that it has reached, whose reports stay as they are."""
    own, *others = await memory.join(1 + count)
    for peer in others:
        await peer.dht.p2p._client.connect(own.peer_id, [])  # as averagers do, and clients have to
    made = Watch(memory, own, *others, is_client=is_client)
    assert await made.go_on(1.0) == frozenset()
    assert all(map(made.was_reached, others))
    return made, others


async def test_whoever_dies_is_gone_until_it_reports_again(memory: InMemorySwarm, is_client: bool) -> None:
    made, (stays, dies) = await watch(memory, 2, is_client)
    dies.die()
    assert await made.go_on(3.0) == {dies.id}
    newer = [made.reports[0], made.report(dies.peer_id, is_client)]
    assert made.detector.find_gone(newer, GONE_AFTER) == frozenset()
    assert made.detector.find_gone(made.reports[:1], GONE_AFTER) == frozenset(), "not on the list any more"
    assert made.was_reached(stays)


async def test_whoever_does_not_answer_for_long_is_gone(memory: InMemorySwarm, is_client: bool) -> None:
    """As when its network is cut: the connection stays."""
    made, (cut,) = await watch(memory, 1, is_client)
    memory.network.cut(cut.peer_id)
    assert await made.go_on(GONE_AFTER - 1.0) == frozenset()
    assert await made.go_on(5.0) == {cut.id}
    memory.network.heal()
    assert await made.go_on(2 * TRY_AGAIN_AFTER) == frozenset(), "it is asked again, and answers"


async def test_a_report_that_is_seen_late_says_nothing_of_now(memory: InMemorySwarm, is_client: bool) -> None:
    made, (dies,) = await watch(memory, 1, is_client)
    last = made.report(dies.peer_id, is_client)
    dies.die()
    assert await made.go_on(3.0) == {dies.id}
    assert made.detector.find_gone([last], GONE_AFTER) == {dies.id}


async def test_one_whose_reports_come_before_its_answers_is_reached_all_the_same(
    memory: InMemorySwarm, is_client: bool
) -> None:
    own, other = await memory.join(2)
    await other.dht.p2p._client.connect(own.peer_id, [])
    made = Watch(memory, own)
    for _ in range(20):
        made.detector.find_gone([made.report(other.peer_id, is_client)], GONE_AFTER)
        await asyncio.sleep(0.01)
    assert made.was_reached(other)


async def test_whoever_could_never_be_reached_may_be_there_for_others(memory: InMemorySwarm, is_client: bool) -> None:
    own, other = await memory.join(2)
    made = Watch(memory, own)
    for _ in range(100):
        stranger = made.report(NOBODY, is_client)
        assert made.detector.find_gone([stranger, made.report(other.peer_id)], GONE_AFTER) == frozenset()
        await asyncio.sleep(0.1)
    assert [made.detector.in_doubt(peer.to_bytes()) for peer in (NOBODY, other.peer_id)] == [True, False]


async def test_whoever_can_not_be_reached_and_reports_no_more_was_gone_before(
    memory: InMemorySwarm, is_client: bool
) -> None:
    (own,) = await memory.join(1)
    made = Watch(memory, own)
    made.reports = [made.report(NOBODY, is_client)]
    assert await made.go_on(TRY_AGAIN_AFTER - 1.0) == frozenset()
    assert await made.go_on(2 * TRY_AGAIN_AFTER) == {NOBODY.to_bytes()}


async def test_one_that_a_look_misses_is_remembered(memory: InMemorySwarm, is_client: bool) -> None:
    made, (other,) = await watch(memory, 1, is_client)
    assert made.detector.find_gone([], GONE_AFTER) == frozenset()
    assert made.was_reached(other)


async def test_nobody_is_asked_for_a_silence_in_which_nobody_listened(memory: InMemorySwarm) -> None:
    """In a large swarm there are seconds between two looks at the reports, and all would be asked before each."""
    made, (other,) = await watch(memory, 1, is_client=False)
    for _ in range(10):
        made.reports = [made.report(other.peer_id)]
        await made.go_on(0.5)
    asked = memory.network.asked["DHTProtocol.rpc_ping"]
    read_at = memory.now
    await asyncio.sleep(2.0)
    made.detector.find_gone(made.reports, GONE_AFTER, unread=memory.now - read_at)
    await asyncio.sleep(0.1)
    assert memory.network.asked["DHTProtocol.rpc_ping"] == asked
    made.detector.find_gone(made.reports, GONE_AFTER)
    await asyncio.sleep(0.1)
    assert memory.network.asked["DHTProtocol.rpc_ping"] == asked + 1


async def test_of_a_flood_no_more_are_counted_than_can_be_asked(memory: InMemorySwarm) -> None:
    made, (other,) = await watch(memory, 1, is_client=False)
    flood = [made.report(PeerID(number.to_bytes(2, "big") + b"x" * 32)) for number in range(10 * MAX_UNREACHED)]
    made.detector.find_gone([*flood, *made.reports], GONE_AFTER)
    too_many = made.detector.too_many()
    assert len(too_many) == 9 * MAX_UNREACHED
    assert other.id not in too_many
    assert made.detector.in_doubt(flood[0].peer_id), "before it was asked"
    assert not made.detector.in_doubt(other.id)


async def test_a_line_that_is_long_makes_nobody_gone(memory: InMemorySwarm) -> None:
    memory.network.latency, memory.network.jitter, memory.network.loss = 0.3, 0.1, 0.1
    own, other = await memory.join(2)
    made = Watch(memory, own, other)
    assert await made.go_on(30.0) == frozenset()
    assert 0.6 <= made.detector.round_trip <= 1.0
    assert made.was_reached(other)
