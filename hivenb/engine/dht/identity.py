"""Who a peer is to the others, so that it can be the same one when its daemon is started anew."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.proto import crypto_pb2


def new_identity() -> bytes:
    """A private key as libp2p's daemon reads it, of the kind that it would make itself."""
    key = Ed25519PrivateKey.generate()
    raw = serialization.Encoding.Raw
    private = key.private_bytes(raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    public = key.public_key().public_bytes(raw, serialization.PublicFormat.Raw)
    key_type = crypto_pb2.KeyType.Ed25519
    return bytes(crypto_pb2.PrivateKey(key_type=key_type, data=private + public).SerializeToString())


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
    return [_with_port(address, got) for address in asked_for]


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
