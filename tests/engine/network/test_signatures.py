"""Who has written a record: real keys and identities, and what is forged with them."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.access.identity import id_of, identity_in, is_proven, new_identity, prove
from hivenb.engine.network.records import RunRecords, SignatureValidator

Make = Callable[..., DHTRecord]


@pytest.fixture
def key() -> RSAPrivateKey:
    return RSAPrivateKey()


@pytest.fixture
def make(key: RSAPrivateKey) -> Make:
    """Makes records as a peer does that has that key, and an identity if one is given."""

    def made(value: object, subkey: object = None, name: str = "run", identity: bytes | None = None) -> DHTRecord:
        signer = SignatureValidator(key, identity)
        subkey = signer.local_public_key if subkey is None else subkey
        record = DHTRecord(
            DHTID.generate(name).to_bytes(),
            MSGPackSerializer.dumps(subkey),
            MSGPackSerializer.dumps(value),
            get_dht_time() + 60,
        )
        return dataclasses.replace(record, value=signer.sign_value(record))

    return made


class TestPublicKeys:
    def test_what_was_forged_is_none_of_them(self, make: Make) -> None:
        validator, genuine = SignatureValidator(RSAPrivateKey()), make(1)
        assert validator.validate(genuine)
        assert validator.strip_value(genuine) == MSGPackSerializer.dumps(1)
        forged = dataclasses.replace(genuine, value=b"\x02" + genuine.value[1:])
        later = dataclasses.replace(genuine, expiration_time=genuine.expiration_time + 1)
        assert not validator.validate(forged)
        assert not validator.validate(later)

    def test_what_is_no_key_is_refused(self, make: Make) -> None:
        for subkey in (b"[owner:x]", b"[owner:ssh-rsa AAAA]", b"[owner:" + b"x" * 5000 + b"]"):
            record = make(1, subkey)
            signed = dataclasses.replace(record, value=record.value + b"[signature:x]")
            assert not SignatureValidator(RSAPrivateKey()).validate(signed)


class TestPeers:
    IDENTITY, OTHER = new_identity(), new_identity()

    def test_what_a_peer_has_said_is_proven_by_its_id(self) -> None:
        proof = prove(self.IDENTITY, b"so")
        assert is_proven(id_of(self.IDENTITY), b"so", proof)
        assert not is_proven(id_of(self.IDENTITY), b"not so", proof)
        assert not is_proven(id_of(self.OTHER), b"so", proof)
        for bad in (b"", b"x", id_of(self.IDENTITY)[:-1], b"\x12\x20" + b"x" * 32):
            assert not is_proven(bad, b"so", proof)
        assert not is_proven(id_of(self.IDENTITY), b"so", b"")

    def test_an_identity_in_a_file_proves_as_much_if_it_is_of_that_kind(self, tmp_path: Path) -> None:
        path = tmp_path / "identity"
        assert identity_in(path) is None
        path.write_bytes(self.IDENTITY)
        assert identity_in(path) == self.IDENTITY
        P2P.generate_identity(str(tmp_path / "rsa"))
        assert identity_in(tmp_path / "rsa") is None

    def test_where_all_sign_nobody_writes_under_the_id_of_another(self, make: Make) -> None:
        own = make(True, id_of(self.IDENTITY), identity=self.IDENTITY)
        reader = SignatureValidator(RSAPrivateKey(), self.OTHER, all_sign=True)
        assert reader.validate(own)
        assert MSGPackSerializer.loads(reader.strip_value(own)) is True
        forged = make(False, id_of(self.IDENTITY), identity=self.OTHER)
        taken = dataclasses.replace(own, value=MSGPackSerializer.dumps(False) + own.value[1:])
        elsewhere = dataclasses.replace(own, key=DHTID.generate("another").to_bytes())
        assert [reader.validate(one) for one in (forged, taken, elsewhere)] == [False] * 3

    def test_one_whose_id_holds_no_key_cannot_sign(self, make: Make) -> None:
        assert SignatureValidator(RSAPrivateKey(), self.OTHER, all_sign=True).validate(
            make(True, b"\x12\x20" + b"x" * 32)
        )

    def test_in_open_swarms_peers_of_plain_hivemind_write_without_a_signature(self, make: Make) -> None:
        assert SignatureValidator(RSAPrivateKey()).validate(make(True, id_of(self.IDENTITY)))


def test_runs_are_learned_and_travel_with_it(make: Make) -> None:
    validators = CompositeValidator([SignatureValidator(RSAPrivateKey())])
    record = make(7, "text", "learned_progress")
    assert validators.validate(record)
    validators.extend([RunRecords("learned")])
    assert not validators.validate(record)
    assert not pickle.loads(pickle.dumps(validators)).validate(record)
    assert validators.validate(make(7, "text", "other_progress"))
