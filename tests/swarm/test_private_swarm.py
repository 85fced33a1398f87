"""Who can join a swarm: real ones, with the right secret, another one, and none."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hivemind
import pytest
import tiny
from hivemind.utils import get_dht_time

import hivenb
from hivenb.engine.network.access.tokens import Admin, Secret
from hivenb.errors import NotInvitedError, SwarmError
from hivenb.options import Options
from hivenb.swarm.invite import encode_invite, read_invite
from hivenb.swarm.start import read_settings
from hivenb.training import TrainingRun

SECRET, OTHER = Secret.random(), Secret.random()
KEY, OTHER_KEY = Admin(SECRET).new_invite(), Admin(OTHER).new_invite()
NOWHERE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"


@pytest.fixture(scope="module")
def home() -> Iterator[hivenb.Swarm]:
    with hivenb.Swarm("private home") as swarm:
        yield swarm


def secret_of(swarm: hivenb.Swarm) -> Secret:
    assert swarm._invites.membership is not None
    assert swarm._invites.membership.secret is not None
    return swarm._invites.membership.secret


def test_a_swarm_is_private_and_its_invite_leads_in(home: hivenb.Swarm) -> None:
    assert home.is_private
    invite = read_invite(home.invite)
    assert invite.addresses == home.addresses
    assert invite.key is not None
    with hivenb.Swarm.join(home.invite, "guest") as guest:
        assert guest.is_private
        assert read_invite(guest.invite).key == invite.key, "whoever has joined can invite others"
        home.dht.store("greeting", "hello", expiration_time=get_dht_time() + 60)
        assert guest.dht.get("greeting", latest=True).value == "hello"
        assert hivenb.Swarm.join(home.invite, "guest") is guest


def test_addresses_and_the_secret_lead_in(home: hivenb.Swarm) -> None:
    secret = secret_of(home)
    with hivenb.Swarm.join(home.addresses, "guest", secret=secret.reveal()) as guest:
        assert guest.is_private
        assert guest.can_ban


@pytest.mark.parametrize(
    ("secret", "words"),
    [(None, "the swarm is private, and no secret was given"), (OTHER, "the swarm has another secret than the one")],
    ids=["none", "another one"],
)
def test_whoever_has_no_invite_is_told_so(home: hivenb.Swarm, secret: Secret | None, words: str) -> None:
    with pytest.raises(NotInvitedError, match=words) as caught:
        hivenb.Swarm.join(home.addresses, "guest", secret=secret)
    told = "".join(traceback.format_exception(caught.value))
    assert "none of the peers answers" not in told
    assert OTHER.reveal() not in told
    with pytest.raises(SwarmError, match="no swarm named 'guest'"):
        hivenb.Swarm.get("guest")


def test_an_old_invite_to_the_same_addresses_is_said_to_be_one(home: hivenb.Swarm) -> None:
    with pytest.raises(NotInvitedError, match=r"closed and opened anew.*Ask for a new invite"):
        hivenb.Swarm.join(encode_invite(home.addresses, OTHER_KEY), "guest")


@pytest.mark.process
def test_an_invite_stays_good_with_the_same_secret_key_and_port(tmp_path: Path) -> None:
    """As the README says: the secret alone would leave the invite with the address of a peer that is gone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"/ip4/0.0.0.0/tcp/{probe.getsockname()[1]}"
    settings = {"secret": SECRET.reveal(), "identity_path": tmp_path / "peer.key", "host_maddrs": [address]}
    invites = []
    for _ in range(2):
        with hivenb.Swarm("again", public=True, **settings) as swarm:
            invites.append(swarm.invite)
            with hivenb.Swarm.join(invites[0], "guest") as guest:
                assert guest.is_private
    assert len(set(invites)) == 2, "each opening signs a key of its own"


def test_plain_hivemind_can_join_open_swarms_only(home: hivenb.Swarm) -> None:
    with pytest.raises(RuntimeError, match="bootstrap failed"):
        hivemind.DHT(initial_peers=list(home.addresses), start=True, **tiny.LOOPBACK)
    with hivenb.Swarm("open", private=False) as swarm:
        plain = hivemind.DHT(initial_peers=list(swarm.addresses), start=True, **tiny.LOOPBACK)
        try:
            assert plain.is_alive()
            with pytest.raises(NotInvitedError, match=r"have no credential for the swarm.*plain hivemind"):
                hivenb.Swarm.join([str(a) for a in plain.get_visible_maddrs()], "guest", secret=SECRET)
        finally:
            plain.shutdown()


@pytest.mark.process
@pytest.mark.parametrize(("is_open", "words"), [(True, "anybody can join"), (False, "invited only")])
def test_it_says_who_can_join(is_open: bool, words: str) -> None:
    with hivenb.Swarm("said", private=not is_open) as swarm:
        assert repr(swarm) == f"Swarm('said', open, this machine only, {words})"
        assert ("anybody who can reach an address" in swarm._repr_html_()) is is_open
        assert (read_invite(swarm.invite).key is None) is is_open
        if not is_open:
            shown = [repr(swarm), swarm._repr_html_(), repr(swarm._settings), repr(vars(swarm)), str(swarm.logs)]
            assert not any(secret_of(swarm).reveal() in text for text in shown)


def test_the_invite_names_the_run_and_who_joins_trains_in_it(home: hivenb.Swarm) -> None:
    def run(swarm: hivenb.Swarm, **options: Any) -> TrainingRun:
        settings = Options(target_batch_size=64, **options)
        return TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=settings, accelerator="cpu")

    first = run(home, run_id="digits")
    with hivenb.Swarm.join(home.invite, "guest") as guest:
        assert guest.invited_to == "digits"
        assert run(guest).options.run_id == "digits"
        assert run(guest, run_id="another").options.run_id == "another"
        assert guest.invited_to == "digits", "whatever else has trained here since"
    assert first.options.run_id == "digits"
    assert home.invited_to is None
    assert run(home).options.run_id == "lightning_run", "only who was invited takes the name"


@pytest.mark.timeout(180)
def test_local_peers_of_a_private_swarm_train_with_it(swarm: hivenb.Swarm) -> None:
    run = TrainingRun(
        tiny.in_large_batches(tiny.PacedModel()),
        tiny.large_batches(),
        swarm=swarm,
        options=Options(target_batch_size=256),
        accelerator="cpu",
    )
    swarm.add_local_peers(1, run)
    run.start()
    assert run.wait(epochs=4, timeout=90)
    groups = run.history.snapshot().series["group_size"].values
    assert 2 in groups
    assert not any(secret_of(swarm).reveal() in line for line in run.log_lines)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [None, 0, "", 1, "no"])
def test_nothing_but_false_opens_a_swarm_to_all(private: object) -> None:
    with pytest.raises(SwarmError, match=r"private=.*: give True, or False to let everybody in"):
        read_settings({"private": private})


def test_each_new_swarm_has_a_secret_of_its_own() -> None:
    settings = read_settings({})
    assert settings == read_settings({"private": True})
    assert settings.key_or_secret() != settings.key_or_secret()
    assert read_settings({"public": True}).key_or_secret() is not None
    assert read_settings({"private": False}).key_or_secret() is None
    assert read_settings({"secret": SECRET.reveal()}).key_or_secret() == SECRET
    assert read_settings({"initial_peers": NOWHERE}).key_or_secret() is None, "as it is where it joins"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"private": False, "secret": SECRET}, "a swarm with a secret is private"),
        ({"private": False, "initial_peers": encode_invite([NOWHERE], KEY)}, "the invite is to a private swarm"),
        ({"secret": OTHER, "initial_peers": encode_invite([NOWHERE], KEY)}, "not that of the invite"),
        ({"secret": "guess me"}, "at least 32 characters"),
        ({"secret": 7}, "a secret is a text"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SwarmError, match=words) as caught:
        read_settings(settings)
    assert not any(text in str(caught.value) for text in (SECRET.reveal(), OTHER.reveal(), "guess me"))


def test_a_difference_is_told_without_the_secret() -> None:
    told = read_settings({"secret": OTHER}).difference(read_settings({"secret": SECRET}))
    assert told == "opened here with another secret"


def test_what_leads_elsewhere_is_told_in_words() -> None:
    """It said invite_key=<the key of an invite> instead of <the key of an invite>."""
    here, elsewhere = (
        read_settings({"initial_peers": encode_invite([NOWHERE], Admin(secret).new_invite())})
        for secret in (SECRET, OTHER)
    )
    another = "joined by an invite, which leads into another swarm than the one that is given now"
    assert here.difference(elsewhere) == another
    assert read_settings({}).difference(here) == "joined by an invite, and not opened here"
    assert here.difference(read_settings({})) == "opened here, and not joined by an invite"
    told = read_settings({"initial_peers": elsewhere.initial_peers, "client_mode": True}).difference(here)
    assert told == f"{another}; with client_mode=None instead of True"


def test_another_invite_of_one_swarm_leads_into_the_same_one() -> None:
    other = NOWHERE.replace("/tcp/", "/tcp/1")
    first, second, third = (
        read_settings({"initial_peers": encode_invite([address], Admin(SECRET).new_invite(), run), **more})
        for address, run, more in (
            (NOWHERE, "digits", {}), (other, "text", {}), (NOWHERE, "digits", {"public_name": "Ann"}),
        )
    )  # fmt: skip
    assert first != second
    assert first.is_same_swarm(second)
    assert not first.is_same_swarm(third)
    assert third.difference(first) == "with public_name=None instead of 'Ann'"
    addresses = [read_settings({"initial_peers": [one]}) for one in (NOWHERE, other)]
    assert addresses[0].is_same_swarm(addresses[1]), "of the same peer"


def test_an_invite_may_name_a_run_and_is_the_same_swarm() -> None:
    named = read_settings({"initial_peers": encode_invite([NOWHERE], KEY, "digits")})
    assert named.run_id == "digits"
    assert named == read_settings({"initial_peers": encode_invite([NOWHERE], KEY)})
    assert named != read_settings({"initial_peers": NOWHERE, "secret": SECRET})
    assert named.key_or_secret() == KEY
    assert "<the key of an invite>" in repr(named)
