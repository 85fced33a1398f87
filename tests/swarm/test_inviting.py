"""Invites that expire, and peers that are banned: real swarms, real training."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import tiny
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

import hivenb
from hivenb.engine.network.access.tokens import Admin, InviteKey, membership_of
from hivenb.engine.network.daemon import TiedP2P
from hivenb.errors import NotInvitedError, SwarmError
from hivenb.options.options import DEFAULT_RUN_ID
from hivenb.swarm.invite import encode_invite, read_invite

STRANGE = "12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"
RUN_ID = "bans"

Join = Callable[..., hivenb.Swarm]


@pytest.fixture(scope="module")
def host() -> Iterator[hivenb.Swarm]:
    """One for all tests that ban nobody."""
    with hivenb.Swarm("host") as opened:
        yield opened


@pytest.fixture
def join() -> Iterator[Join]:
    with ExitStack() as stack:
        yield lambda invite, name: stack.enter_context(hivenb.Swarm.join(invite, name))


def seconds_from_now(swarm: hivenb.Swarm, seconds: float) -> str:
    return swarm.invite_for(hours=seconds / 3600)


def start(swarm: hivenb.Swarm, name: str = RUN_ID, slower: float = 1.0) -> hivenb.TrainingRun:
    """Start a run.

    :param slower: so many times as long is an epoch: where time has to pass, it costs less
    """
    options = hivenb.Options(target_batch_size=640, matchmaking_time=2.0, averaging_timeout=10.0, run_id=name)
    model = tiny.in_large_batches(tiny.PacedModel())
    model.pace *= slower
    run = hivenb.TrainingRun(model, tiny.large_batches(), swarm=swarm, options=options, accelerator="cpu")
    run.start()
    return run


def group(run: hivenb.TrainingRun) -> float | None:
    return run.history.snapshot().last("group_size")


def key_of(swarm: hivenb.Swarm) -> InviteKey:
    assert swarm._invites.membership is not None
    return swarm._invites.membership.key


def record_of(writer: hivenb.Swarm, reader: hivenb.Swarm) -> bool:
    """Whether one reads what another writes now."""
    value = time.time()
    writer.dht.store(f"by {writer.name}", value, expiration_time=get_dht_time() + 60)
    found = reader.dht.get(f"by {writer.name}", latest=True)
    return found is not None and found.value == value


async def states_of(swarms: list[hivenb.Swarm], key: InviteKey) -> list[int]:
    """Bytes of its state that each sends to somebody new who comes by an invite."""
    addresses = [address for swarm in swarms for address in swarm.addresses]
    p2p = await TiedP2P.create(host_maddrs=tiny.LOOPBACK["host_maddrs"], initial_peers=addresses)
    p2p.admit_only(membership_of(key))
    received = []
    try:
        for swarm in swarms:
            peer = PeerID.from_base58(swarm.peer_id)
            stub, size = TrainingStateAverager.get_stub(p2p, peer, namespace=f"{RUN_ID}_state_averager"), 0
            with suppress(P2PHandlerError, P2PDaemonError, asyncio.IncompleteReadError):
                async for part in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
                    size += part.ByteSize()
            received.append(size)
    finally:
        await p2p.shutdown()
    return received


@pytest.mark.process
class TestInvites:
    def test_who_may_give_one_that_expires(self, host: hivenb.Swarm, join: Join) -> None:
        invite = read_invite(host.invite_for(hours=2))
        assert invite.addresses == host.addresses
        assert invite.key is not None
        assert 7190 < invite.key.expires - time.time() <= 7201
        guest = join(host.invite, "guest")
        assert not guest.can_ban
        with pytest.raises(SwarmError, match="only the peer that opened the swarm, or knows its secret, decides"):
            guest.invite_for(hours=2)
        for wrong in (0, -1, float("nan"), float("inf"), "2", None, True):
            with pytest.raises(SwarmError, match="more than 0 and up to"):
                host.invite_for(hours=wrong)  # type: ignore[arg-type]
        with hivenb.Swarm("open", private=False) as everybodys:
            for ask in (partial(everybodys.invite_for, 1), partial(everybodys.ban, STRANGE)):
                with pytest.raises(SwarmError, match="open to all, and nobody decides"):
                    ask()

    def test_a_newer_one_leads_the_next_run_to_where_the_others_train_and_both_pages_tell_meanwhile(
        self, swarm: hivenb.Swarm, join: Join, eventually: Any
    ) -> None:
        first, invite = start(swarm), swarm.invite
        guest = join(invite, "guest")
        theirs = start(guest)
        runs = [first, theirs]
        try:
            eventually(lambda: group(first) == group(theirs) == 2, 90)
            runs.append(second := start(swarm))  # a model that was made anew
            name = second.options.run_id
            assert name == f"{RUN_ID}-2"
            eventually(lambda: second.status.elsewhere == {RUN_ID: 1} and theirs.status.elsewhere == {name: 1}, 60)
            assert f"1 peer trains another run in this swarm, {name!r}, and not {RUN_ID!r}" in "\n".join(
                theirs.log_lines
            )
            assert read_invite(swarm.invite).run_id == name
            assert hivenb.Swarm.join(swarm.invite, "guest") is guest
            assert guest.invited_to == name
            theirs.stop()
            runs.append(again := start(guest, DEFAULT_RUN_ID))
            assert again.options.run_id == name
            eventually(lambda: group(second) == group(again) == 2, 90)
            eventually(lambda: second.status.elsewhere == again.status.elsewhere == {}, 60)
        finally:
            for run in runs:
                run.stop()

    def test_it_names_a_run_that_trains_or_will(self, host: hivenb.Swarm) -> None:
        class Fails(tiny.TinyModel):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise ValueError("on purpose")

        settings = hivenb.Options(target_batch_size=64, run_id="fails")
        trains = start(host)
        fails = hivenb.TrainingRun(Fails(), tiny.loader(), swarm=host, options=settings, accelerator="cpu")
        assert host.newest_run_id == RUN_ID, "the other one has not begun"
        fails.start()
        with pytest.raises(ValueError, match="on purpose"):
            fails.wait(timeout=60)
        assert host.newest_run_id == RUN_ID
        trains.stop()
        assert read_invite(host.invite).run_id == RUN_ID

    def test_nobody_comes_in_by_one_that_has_expired(self, host: hivenb.Swarm) -> None:
        invite = seconds_from_now(host, 0.1)
        time.sleep(1.5)
        with pytest.raises(NotInvitedError, match=r"was good until \d{4}-.* and has expired; ask for a new invite"):
            hivenb.Swarm.join(invite, "late")

    @pytest.mark.timeout(240)
    @pytest.mark.slow
    def test_who_came_by_one_is_out_when_it_expires_and_the_others_train_on(
        self, swarm: hivenb.Swarm, join: Join, eventually: Any
    ) -> None:
        expires = time.time() + 30
        short, stays = join(seconds_from_now(swarm, 30), "short"), join(swarm.invite, "stays")
        runs = [start(one, slower=3.0) for one in (swarm, stays, short)]
        try:
            eventually(lambda: all(group(run) == 3 for run in runs), expires - time.time())
            assert record_of(swarm, short)
            with pytest.raises(NotInvitedError, match="has expired; ask for a new invite"):
                runs[2].wait(timeout=90)
            assert time.time() > expires
            epoch = runs[0].status.epoch
            eventually(lambda: runs[0].status.epoch >= epoch + 3 and [group(run) for run in runs[:2]] == [2, 2], 90)
            assert not record_of(swarm, short)
            assert not record_of(short, swarm)
        finally:
            for run in runs:
                run.stop()


@pytest.mark.process
class TestBans:
    def test_who_may_show_it_and_to_whom(self, host: hivenb.Swarm, join: Join) -> None:
        guest = join(host.invite, "guest")
        with pytest.raises(SwarmError, match="only the peer that opened the swarm, or knows its secret"):
            guest.ban(host.peer_id)
        with pytest.raises(SwarmError, match="cannot ban itself"):
            host.ban(host.peer_id)
        for wrong in ("", "Ann", STRANGE[:-1], "<script>"):
            with pytest.raises(SwarmError, match="no peer's id"):
                host.ban(wrong)
        assert host.banned == ()

    @pytest.mark.timeout(300)
    @pytest.mark.slow
    def test_who_is_shown_it_gets_nothing_from_anybody(self, swarm: hivenb.Swarm, join: Join, eventually: Any) -> None:
        """The others, who came by the same invite, stay; nobody new comes by it."""
        invite = swarm.invite
        stays, bad = join(invite, "stays"), join(invite, "bad")
        key = key_of(bad)
        assert key == key_of(stays)
        runs = [start(swarm), start(stays), start(bad)]
        try:
            eventually(lambda: all(group(run) == 3 for run in runs), 90)
            assert min(asyncio.run(states_of([swarm, stays], key))) > 0, "there is something to be had"
            swarm.ban(bad.peer_id)
            eventually(lambda: swarm.banned == stays.banned == (bad.peer_id,), 30)
            assert asyncio.run(states_of([swarm, stays], key)) == [0, 0], "another id, the same invite"
            assert [record_of(bad, one) or record_of(one, bad) for one in (swarm, stays)] == [False, False]
            with pytest.raises(NotInvitedError, match="was banned"):
                hivenb.Swarm.join(invite, "bad again")
            with pytest.raises(NotInvitedError, match="was banned"):
                hivenb.Swarm.join(encode_invite(stays.addresses, key), "bad at the guest's")
            epoch = runs[0].status.epoch
            eventually(lambda: runs[0].status.epoch >= epoch + 3 and [group(run) for run in runs[:2]] == [2, 2], 90)
            with pytest.raises(NotInvitedError, match=r"does not let this peer in: .* banned .*Ask for"):
                runs[2].wait(timeout=90)
            assert [group(run) for run in runs[:2]] == [2, 2]
            eventually(lambda: any("does not talk to this one any more" in line for line in runs[2].log_lines), 30)
            assert runs[1].status.excluded_peers == {bad.peer_id: "banned"}
            assert swarm.invite != invite
            assert record_of(swarm, join(swarm.invite, "invited anew"))
        finally:
            for run in runs:
                run.stop()

    def test_it_is_remembered_when_the_dht_is_started_anew_and_told_to_newcomers(
        self, swarm: hivenb.Swarm, join: Join, eventually: Any
    ) -> None:
        stays, bad = join(swarm.invite, "stays"), join(swarm.invite, "bad")
        swarm.ban(bad.peer_id)
        newcomer = join(swarm.invite, "newcomer")
        eventually(lambda: newcomer.banned == stays.banned == (bad.peer_id,), 30)
        before = swarm.dht.pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: swarm.dht.pid not in (before, None), 60)
        swarm.dht.require()
        assert swarm.banned == (bad.peer_id,)
        with pytest.raises(NotInvitedError):
            hivenb.Swarm.join(encode_invite(swarm.addresses, key_of(bad)), "bad again")

    def test_peers_of_this_machine_come_by_another_invite(self, swarm: hivenb.Swarm, join: Join) -> None:
        local = read_invite(swarm._invites.way_in()).key
        bad = join(swarm.invite, "bad")
        assert local not in (None, key_of(bad), key_of(swarm))
        swarm.ban(bad.peer_id)
        assert read_invite(swarm._invites.way_in()).key == local
        assert record_of(swarm, join(swarm._invites.way_in(), "local"))
        swarm.ban(hivenb.Swarm.get("local").peer_id)
        assert read_invite(swarm._invites.way_in()).key != local

    def test_a_second_who_knows_the_secret_goes_on_with_the_same_list(self, swarm: hivenb.Swarm, join: Join) -> None:
        assert swarm._invites.membership is not None
        secret = swarm._invites.membership.secret
        assert secret is not None
        with hivenb.Swarm.join(swarm.addresses, "second", secret=secret) as second:
            first_bad, second_bad = (join(swarm.invite_for(1), name) for name in ("first bad", "second bad"))
            swarm.ban(first_bad.peer_id)
            second.ban(second_bad.peer_id)
            assert set(second.banned) == {first_bad.peer_id, second_bad.peer_id}
            assert key_of(second).admin == Admin(secret).public


@pytest.mark.process
def test_a_newer_invite_leads_to_where_its_peer_is_by_now(
    tmp_path: Any, join: Join, eventually: Callable[..., None]
) -> None:
    """As when the one at home has another address since the night, and nobody else is there."""
    secret, key = os.urandom(16).hex(), tmp_path / "identity"
    with hivenb.Swarm("at home", secret=secret, identity_path=str(key)) as before:
        joined = join(before.invite, "guest")
        eventually(lambda: record_of(before, joined))
        places = before.addresses
    with hivenb.Swarm("at home again", secret=secret, identity_path=str(key)) as after:
        assert set(after.addresses).isdisjoint(places)
        assert join(after.invite, "guest") is joined
        eventually(lambda: record_of(after, joined))
        os.kill(ended := joined.dht.pid, signal.SIGKILL)
        eventually(lambda: joined.dht.pid not in (None, ended), 60)
        joined.dht.require()
        eventually(lambda: record_of(after, joined), 60)
