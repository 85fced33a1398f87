"""Names that peers give themselves: told through a real DHT, and read as text of strangers."""

from __future__ import annotations

import pytest
from hivemind.utils import get_dht_time

import hivenb
from hivenb.engine.network.record_board import RecordBoard
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.public_names import MAX_LENGTH, PublicNames, clean, parse_name


@pytest.fixture(scope="module")
def swarm():
    with hivenb.Swarm("names") as opened:
        yield opened


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Ann", "Ann"),
        ("  Ann \n of\tGreen  Gables ", "Ann of Green Gables"),
        ("a" * 100, "a" * MAX_LENGTH),
        ("\u202eevil\x00\x1b[31m", "evil [31m"),
        (b"bytes", ""),
        (None, ""),
        (7, ""),
        ("\u200b\ufeff", ""),
        ("Zoë 🐝", "Zoë 🐝"),
    ],
)
def test_a_name_is_one_short_line_of_text(written, read):
    assert clean(written) == read


def test_others_read_the_name_that_a_peer_has_told(swarm, eventually):
    with hivenb.Swarm.join(swarm.invite, "named", public_name="  Ann  ") as guest:
        assert guest.public_name == "  Ann  "
        telling = PublicNames(guest.dht, "run", guest.public_name)
        assert telling.look() == {guest.peer_id: "Ann"}
        eventually(lambda: PublicNames(swarm.dht, "run", "").look() == {guest.peer_id: "Ann"})
        assert PublicNames(swarm.dht, "another", "").look() == {}


def test_only_a_peer_itself_can_tell_its_name(swarm, eventually):
    with hivenb.Swarm.join(swarm.invite, "named") as guest:
        board = RecordBoard(guest.dht, "proven_names")

        def write(subkey, peer_id, name, proof):
            board.write(subkey, {"peer": peer_id, "name": name, "proof": proof})

        write(board.owner, swarm.peer_id, "an impostor", guest.dht.prove(board.owner))
        assert PublicNames(swarm.dht, "proven", "").look() == {}
        write(board.owner, guest.peer_id, "x" * 500, guest.dht.prove(board.owner))
        names = {guest.peer_id: "x" * MAX_LENGTH}
        eventually(lambda: PublicNames(swarm.dht, "proven", "").look() == names)
        assert PublicNames(swarm.dht, "proven", "me").look() == {**names, swarm.peer_id: "me"}


@pytest.mark.parametrize("value", [None, 7, "text", [], {}, {"peer": 7, "name": "x", "proof": b""}])
def test_what_is_no_name_is_passed_over(value):
    assert parse_name(b"owner", value) is None


@pytest.mark.parametrize("peer_id", ["x" * 200, "0OIl", "", "12D3KooW"])
def test_ids_that_are_none_have_no_proof(peer_id):
    told = parse_name(b"owner", {"peer": peer_id, "name": "Ann", "proof": b""})
    assert told is None or told == (peer_id, "Ann")


def test_a_record_of_another_shape_is_no_names(swarm):
    assert swarm.dht.store("malformed_names", "just text", expiration_time=get_dht_time() + 60)
    assert PublicNames(swarm.dht, "malformed", "").look() == {}


def test_a_swarm_of_another_public_name_is_another_swarm(swarm):
    with pytest.raises(SwarmError, match="public_name"):
        hivenb.Swarm(swarm.name, public_name="Ann")
