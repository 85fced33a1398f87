"""Who a peer is to the others, so that it can be the same one when its daemon is started anew."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.proto import crypto_pb2

from hivenb.engine.network.addresses import CIRCUIT

#: Before what a peer's identity signs, which libp2p signs other things with.
_PURPOSE = b"hivenb:"

#: What the file of such a key begins with: the type, and the length of the private and the public key.
_ED25519_KEY = bytes.fromhex("08011240")

_LARGEST_FILE = 65536

#: What the id of a peer with a key of that kind begins with (libp2p's specification of peer ids): it is not hashed.
_ED25519_ID = bytes.fromhex("002408011220")


def new_identity() -> bytes:
    """A private key as libp2p's daemon reads it, of the kind that it would make itself."""
    key = Ed25519PrivateKey.generate()
    raw = serialization.Encoding.Raw
    private = key.private_bytes(raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    public = key.public_key().public_bytes(raw, serialization.PublicFormat.Raw)
    key_type = crypto_pb2.KeyType.Ed25519
    return bytes(crypto_pb2.PrivateKey(key_type=key_type, data=private + public).SerializeToString())


def identity_in(path: str | os.PathLike[str]) -> bytes | None:
    """The private key in a file, if it is there and can prove something."""
    try:
        with open(path, "rb") as file:
            identity = file.read(_LARGEST_FILE)
    except OSError:
        return None
    return identity if identity.startswith(_ED25519_KEY) and len(identity) == len(_ED25519_KEY) + 64 else None


def id_of(identity: bytes) -> bytes:
    """The id of the peer that has an identity of ours."""
    return _ED25519_ID + bytes(crypto_pb2.PrivateKey.FromString(identity).data[32:])


def prove(identity: bytes, statement: bytes) -> bytes:
    """A proof that the peer of an identity of ours has said something; see :func:`is_proven`."""
    key = crypto_pb2.PrivateKey.FromString(identity)
    return Ed25519PrivateKey.from_private_bytes(key.data[:32]).sign(_PURPOSE + statement)


def can_prove(peer_id: bytes) -> bool:
    """Whether the id of a peer holds its key, as those do that the daemon or hivenb makes; not that of an RSA key."""
    return len(peer_id) == len(_ED25519_ID) + 32 and peer_id.startswith(_ED25519_ID)


def is_proven(peer_id: bytes, statement: bytes, proof: bytes) -> bool:
    """Whether a peer has said something, whoever has passed it on.

    :param peer_id: its id, which holds its public key; that of a peer with a key of another kind does not
    :param proof: what :func:`prove` gave
    """
    if not can_prove(peer_id):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(peer_id[len(_ED25519_ID) :]).verify(proof, _PURPOSE + statement)
    except (InvalidSignature, ValueError):
        return False
    return True


@contextlib.contextmanager
def identity_file(identity: bytes) -> Iterator[str]:
    """The path of a file with a private key, which nobody else can read and which is there for as long as needed."""
    descriptor, path = tempfile.mkstemp(prefix="hivenb-identity-")  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity)
        yield path
    finally:
        os.unlink(path)


def same_ports(asked_for: Sequence[str], got: Sequence[str]) -> list[str]:
    """Where to listen, with the ports that the system has chosen before in place of those left to it.

    :param asked_for: multiaddresses, in which a port 0 is left to the system
    :param got: those at which the daemon could be reached then
    """
    own = [address for address in got if CIRCUIT not in address]  # the ports of relays are theirs
    return [_with_port(address, own) for address in asked_for]


def _with_port(address: str, got: Sequence[str]) -> str:
    wanted = address.strip("/").split("/")
    for other in got:
        found = other.strip("/").split("/")
        # the host may be a name for all networks, and what comes after is the peer
        if len(found) >= len(wanted) > 3 and (found[0], found[2], found[4 : len(wanted)]) == (
            wanted[0],
            wanted[2],
            wanted[4:],
        ):
            return "/" + "/".join([*wanted[:3], found[3] if wanted[3] == "0" else wanted[3], *wanted[4:]])
    return address
