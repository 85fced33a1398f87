"""Who is banned from a private swarm: a list that its admin has signed, and what all processes see of it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from typing import Any

from hivenb.engine.network.access.tokens import KEY_BYTES, SIGNATURE_BYTES, Admin, Credential, is_signed
from hivenb.engine.network.untrusted_values import BoundedSerializer

#: Bytes of a signed list at most: some 800 ids of peers.
MOST_BAN_LIST_BYTES = 32768

#: What the signature of a list begins with, so that it is good for nothing else.
_BAN_LIST = b"hivenb ban list 1:"

_VERSION, _LENGTH, _LONGEST_ID = 8, 4, 42
_HEAD = _VERSION + _LENGTH


@dataclass(frozen=True)
class BanList:
    """Who is banned.

    :param version: larger than that of any list before; 0 while nobody is banned
    :param banned: ids of peers
    :param revoked: public keys of invites that let nobody in any more, each with the ids of the peers that may stay
    """

    version: int = 0
    banned: frozenset[bytes] = frozenset()
    revoked: Mapping[bytes, frozenset[bytes]] = field(default_factory=dict)

    def bans(self, peer_id: bytes, shown: Credential | None) -> bool:
        """Whether a peer is banned.

        :param peer_id: of it
        :param shown: its credential; ``None`` if that is not known
        """
        if peer_id in self.banned:
            return True
        return shown is not None and shown.key in self.revoked and peer_id not in self.revoked[shown.key]

    def with_banned(self, peer_id: bytes, shown: Credential | None, staying: Iterable[bytes]) -> BanList:
        """The next list, on which one more is banned.

        :param peer_id: of it
        :param shown: its credential, by whose invite nobody comes in any more; ``None`` if that is not known
        :param staying: ids of the others that came by the same invite
        """
        revoked = dict(self.revoked)
        if shown is not None and shown.key not in revoked:
            revoked[shown.key] = frozenset(staying)
        stay = {key: ids - {peer_id} for key, ids in revoked.items()}
        # by the time, so that one who has lost the list, and begins anew, is not taken for an older one
        return BanList(max(self.version + 1, int(time.time() * 1000)), self.banned | {peer_id}, stay)

    def sign(self, admin: Admin) -> bytes:
        """The list as it travels.

        :raises ValueError: if it is too long
        """
        revoked = [[key, sorted(ids)] for key, ids in sorted(self.revoked.items())]
        packed = bytes(BoundedSerializer.dumps([self.version, sorted(self.banned), revoked]))
        if len(packed) + SIGNATURE_BYTES > MOST_BAN_LIST_BYTES:
            raise ValueError(
                f"the list of those who are banned, and who may stay, has more than {MOST_BAN_LIST_BYTES} bytes"
            )
        return admin.sign(_BAN_LIST + packed) + packed


def read_ban_list(signed: object, admin: bytes) -> BanList | None:
    """A list out of what has travelled; ``None`` for anything that the admin has not signed.

    :param signed: anything
    :param admin: its public key
    """
    if not isinstance(signed, bytes) or not SIGNATURE_BYTES < len(signed) <= MOST_BAN_LIST_BYTES:
        return None
    packed = signed[SIGNATURE_BYTES:]
    if not is_signed(admin, _BAN_LIST + packed, signed[:SIGNATURE_BYTES]):
        return None
    try:
        version, banned, revoked = BoundedSerializer.loads(packed)
        made = BanList(version, _ids(banned), {_key(key): _ids(ids) for key, ids in revoked})
    except (ValueError, TypeError, RecursionError):  # an admin of another version of hivenb
        return None
    return made if isinstance(version, int) and 0 < version < 2 ** (8 * _VERSION) else None


def _ids(given: Any) -> frozenset[bytes]:
    ids = frozenset(given)
    if not all(isinstance(one, bytes) and len(one) <= _LONGEST_ID for one in ids):
        raise ValueError("no ids of peers")
    return ids


def _key(given: Any) -> bytes:
    if not (isinstance(given, bytes) and len(given) == KEY_BYTES):
        raise ValueError("no key")
    return given


class SharedBanList:
    """The newest list that a peer knows, which all its processes see that are forked later. The DHT's writes.

    :param admin: public key of whoever may sign a list
    """

    def __init__(self, admin: bytes):
        self.admin = admin
        self._shared = memoryview(RawArray(ctypes.c_ubyte, _HEAD + MOST_BAN_LIST_BYTES)).cast("B")
        self._head, self._list, self._signed = bytes(_HEAD), BanList(), b""

    @property
    def list(self) -> BanList:
        """The newest list; an empty one if there is none."""
        self._look()
        return self._list

    @property
    def signed(self) -> bytes:
        """The newest list as it travels; empty if there is none."""
        self._look()
        return self._signed

    def take(self, signed: object) -> bool:
        """Believe a list from now on, if the admin has signed it and it is newer than the one that is known.

        :param signed: anything
        :returns: whether it is believed
        """
        made = read_ban_list(signed, self.admin)
        if made is None or not isinstance(signed, bytes) or made.version <= self.list.version:
            return False
        # the head last, by which others notice; who reads in between finds a signature that does not fit, and waits
        self._shared[_HEAD : _HEAD + len(signed)] = signed
        self._shared[:_HEAD] = made.version.to_bytes(_VERSION, "big") + len(signed).to_bytes(_LENGTH, "big")
        return True

    def _look(self) -> None:
        head = bytes(self._shared[:_HEAD])
        if head == self._head:
            return
        signed = bytes(self._shared[_HEAD : _HEAD + int.from_bytes(head[_VERSION:], "big")])
        made = read_ban_list(signed, self.admin)
        if made is not None and made.version > self._list.version:
            self._head, self._list, self._signed = head, made, signed
