"""Names that peers give themselves: told through a real DHT, and read as text of strangers."""

from __future__ import annotations

import pytest
from hivemind.utils import get_dht_time

import hivenb
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.public_names import MAX_LENGTH, PublicNames, clean


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


def test_what_strangers_write_is_cleaned_and_never_replaces_ones_own(swarm):
    def write(subkey, value):
        assert swarm.dht.store("run_names", subkey=subkey, value=value, expiration_time=get_dht_time() + 60)

    write("someone", "x" * 500)
    write("else", {"not": "text"})
    write(17, "no id")
    write(swarm.peer_id, "an impostor")
    found = PublicNames(swarm.dht, "run", "me").look()
    assert found == {"someone": "x" * MAX_LENGTH, swarm.peer_id: "me"}


def test_a_record_of_another_shape_is_no_names(swarm):
    assert swarm.dht.store("run_names", "just text", expiration_time=get_dht_time() + 60)
    assert PublicNames(swarm.dht, "run", "").look() == {}


def test_a_swarm_of_another_public_name_is_another_swarm(swarm):
    with pytest.raises(SwarmError, match="public_name"):
        hivenb.Swarm(swarm.name, public_name="Ann")
