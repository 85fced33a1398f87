"""What may stand in the DHT: rules for all keys, and stricter ones for those of a run.

Under the keys of a run there are only dictionaries, whose records are their owners': those of matchmaking and of state
sharing stand under ids of peers, as hivemind's averagers write them, the others under public keys that sign them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import product
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.access.ban_list import MOST_BAN_LIST_BYTES
from hivenb.engine.network.access.identity import can_prove, id_of, is_proven, prove
from hivenb.engine.network.record_board import is_owned
from hivenb.engine.network.untrusted_values import BoundedSerializer, finite, named, raw, sequence, truth

#: Seconds for which a record may stand at most, unless its kind may stand for less.
LONGEST = 600.0

#: Bytes of a record at most: one of a board with its signature, and twice that to spare.
LARGEST = 8192

#: Bytes of a value that is no dictionary; nothing of hivenb's is one.
LARGEST_PLAIN = 65536

#: Groups of averagers of which the keys are known, in binary digits: more than four thousand peers fill.
_GROUP_BITS = 6

#: What the id of a peer begins with, and its length: that of an Ed25519 key, and of the SHA-256 of a longer one.
_PEER_IDS = ((bytes.fromhex("002408011220"), 38), (bytes.fromhex("1220"), 34))

_PART = re.compile(r"[0-9a-f]{64}/[0-9]{1,4}")


#: Under which key the names of a swarm's runs stand, and characters of one at most.
RUNS_KEY, LONGEST_NAME = "hivenb_runs", 256


class Kind(Enum):
    """What a key of a run is for."""

    PROGRESS = "progress"
    OPTIONS = "options"
    NAMES = "names"
    MODEL = "model"
    REST = "rest"
    RUNS = "runs"
    MATCHMAKING = "matchmaking"
    SHARING = "all_averagers"
    BAN_LIST = "ban list"


@dataclass(frozen=True)
class Rule:
    """What records of a kind are.

    :param is_owner: whether a subkey says whose record it is
    :param check: raises a ValueError for a value that is none of that kind; one that was withdrawn is ``None``
    :param longest: seconds for which a record may stand
    :param from_one: records that one peer may bring
    :param largest: bytes of a record
    """

    is_owner: Callable[[Any], bool]
    check: Callable[[Any], Any]
    longest: float = LONGEST
    from_one: int = 4
    largest: int = LARGEST


def is_peer_id(subkey: object) -> bool:
    """Whether a subkey is the id of a peer."""
    return isinstance(subkey, bytes) and any(
        len(subkey) == length and subkey.startswith(start) for start, length in _PEER_IDS
    )


def is_part(subkey: object) -> bool:
    """Whether a subkey names a part of something by its SHA-256."""
    return isinstance(subkey, str) and _PART.fullmatch(subkey) is not None


def is_name(subkey: object) -> bool:
    """Whether a subkey can be the name of a run."""
    return isinstance(subkey, str) and 0 < len(subkey) <= LONGEST_NAME


def is_version(subkey: object) -> bool:
    """Whether a subkey is the version of a list: milliseconds since 1970."""
    return type(subkey) is int and 2**40 < subkey < 2**64


RULES: Mapping[Kind, Rule] = {
    Kind.PROGRESS: Rule(is_owned, lambda value: named(value, 32), longest=150.0),
    Kind.OPTIONS: Rule(is_owned, lambda value: raw(value, LARGEST)),
    Kind.NAMES: Rule(is_owned, lambda value: named(value, 8)),
    Kind.MODEL: Rule(lambda key: is_owned(key) or is_part(key), lambda value: sequence(value, 4), from_one=600),
    Kind.REST: Rule(lambda key: is_owned(key) or is_part(key), lambda value: sequence(value, 4), from_one=600),
    Kind.RUNS: Rule(is_name, truth, from_one=16),
    Kind.MATCHMAKING: Rule(is_peer_id, truth),
    Kind.SHARING: Rule(is_peer_id, lambda value: finite(value, -1e9, 1e9)),
    Kind.BAN_LIST: Rule(
        # whose it is says the signature of the admin, which is looked at in ban_list_sync.py
        is_version,
        lambda value: raw(value, MOST_BAN_LIST_BYTES),
        from_one=64,
        largest=MOST_BAN_LIST_BYTES + 64,
    ),
}

_BOARDS = (Kind.PROGRESS, Kind.OPTIONS, Kind.NAMES, Kind.MODEL, Kind.REST)

#: Records that one peer may bring under a key of which nothing is known.
FROM_ONE = 256

#: Keys of which nothing is known under which one peer may bring records. Another run of the swarm has about ten.
KEYS_FROM_ONE = 128


class RunRecords(RecordValidatorBase):
    """The keys of a run, for the validator of a node, :class:`hivenb.engine.network.records.SignatureValidator`.

    :param run_id: name of the run
    """

    def __init__(self, run_id: str):
        boards = {f"{run_id}_{kind.value}": kind for kind in _BOARDS}
        boards[RUNS_KEY] = Kind.RUNS
        for prefix in (f"{run_id}_grad_averager", f"{run_id}_state_averager"):
            boards[f"{prefix}.{Kind.SHARING.value}"] = Kind.SHARING
            for length in range(_GROUP_BITS + 1):
                groups = ("".join(bits) for bits in product("01", repeat=length))
                boards |= {f"{prefix}.0b{group}": Kind.MATCHMAKING for group in groups}
        self.kinds = {DHTID.generate(key).to_bytes(): kind for key, kind in boards.items()}

    def validate(self, record: DHTRecord) -> bool:
        return True


def _largest(rule: Rule | None, is_plain: bool) -> int:
    if is_plain:
        return LARGEST_PLAIN
    return LARGEST if rule is None else rule.largest


def why_refused(record: DHTRecord, value: bytes, kind: Kind | None) -> str | None:
    """Why a record may not stand in the DHT, in words; ``None`` if it may.

    :param record: with its signatures, if it has any
    :param value: without
    :param kind: of its key; ``None`` if nothing is known of that
    """
    is_plain = record.subkey == DHTProtocol.IS_REGULAR_VALUE
    rule = None if kind is None else RULES[kind]
    if len(record.value) > _largest(rule, is_plain) or len(record.subkey) > LARGEST:
        return "it is too long"
    expires = record.expiration_time
    longest = LONGEST if rule is None else rule.longest
    if not isinstance(expires, (int, float)) or not math.isfinite(expires) or expires > get_dht_time() + longest:
        return f"it is to stand for more than {longest:.0f} s"
    try:
        content = BoundedSerializer.loads(value)
        subkey = None if is_plain else BoundedSerializer.loads(record.subkey)
        hash(subkey)
        if rule is not None:
            if is_plain:
                return "it would take the place of a dictionary"
            if not rule.is_owner(subkey):
                return "its subkey names no owner"
            if content is not None:
                rule.check(content)
    except (ValueError, TypeError, RecursionError) as e:
        return str(e) or repr(e)
    return None


# -- checked once ----------------------------------------------------------------------------------------------------
#
# Records that a node has checked: it gets each of them again from every other node that holds it.


#: Records that a node remembers, of those that are no longer than nearly all of hivenb's: 32 MB at most.
REMEMBERED = 4096


class CheckedOnce(CompositeValidator):
    """``hivemind``'s ``CompositeValidator``, which comes to one answer for a record, and gives it again.

    The signature of a report takes it 0.07 ms, and its types 0.03 ms. Of a record that is too long to be remembered, it
    comes to it anew.
    """

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()):
        self._remembered = lru_cache(REMEMBERED)(super().validate)
        super().__init__(validators)

    def validate(self, record: DHTRecord) -> bool:
        length = len(record.key) + len(record.subkey) + len(record.value)
        return self._remembered(record) if length <= LARGEST else bool(super().validate(record))

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        super().extend(validators)
        self._remembered.cache_clear()  # what was right may be wrong by now


# -- signatures ------------------------------------------------------------------------------------------------------
#
# Who has written a record.


logger = get_logger(__name__)

#: Before the signature of a peer, which ends a record; 64 bytes follow.
_SIGNED = b"[peer:]"


class SignatureValidator(RSASignatureValidator):
    """``hivemind``'s validator of signatures, which refuses as well what no record of a run is.

    hivemind's node raises at what cannot be read: whoever has asked for its key would never get an answer.

    :param private_key: with which this peer signs what stands under its public key
    :param identity: the peer's own, if it signs what stands under its id
    :param all_sign: whether all peers do so whose ids hold their keys; plain hivemind's do not
    """

    def __init__(self, private_key: RSAPrivateKey | None = None, identity: bytes | None = None, all_sign: bool = False):
        super().__init__(private_key)
        self._identity, self._all_sign = identity, all_sign
        self._own_id = None if identity is None else BoundedSerializer.dumps(id_of(identity))
        self.kinds: dict[bytes, Kind] = {}

    def validate(self, record: DHTRecord) -> bool:
        try:
            reason = why_refused(record, self.strip_value(record), self.kinds.get(record.key))
            if reason is None and not (self._is_of_its_peer(record) and super().validate(record)):
                reason = "its signature is missing or wrong"
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:  # no public key
            reason = repr(e)
        if reason is not None:
            logger.debug(f"A record was refused: {reason}")
        return reason is None

    def sign_value(self, record: DHTRecord) -> bytes:
        if self._identity is not None and record.subkey == self._own_id:
            return record.value + _SIGNED + prove(self._identity, self._serialize_record(record))
        return super().sign_value(record)

    def strip_value(self, record: DHTRecord) -> bytes:
        value = super().strip_value(record)
        return value[: -len(_SIGNED) - 64] if self._is_signed_by_peer(value) else value

    def merge_with(self, other: RecordValidatorBase) -> bool:
        if isinstance(other, RunRecords):
            self.kinds |= other.kinds
            return True
        return super().merge_with(other)

    def _is_of_its_peer(self, record: DHTRecord) -> bool:
        """Whether what stands under a peer's id is signed by it, where all peers do so."""
        if not self._all_sign:
            return True
        subkey: Any = BoundedSerializer.loads(record.subkey) if record.subkey else None
        if not is_peer_id(subkey) or not can_prove(subkey):
            return True
        unsigned = DHTRecord(record.key, record.subkey, self.strip_value(record), record.expiration_time)
        return self._is_signed_by_peer(record.value) and is_proven(
            subkey, self._serialize_record(unsigned), record.value[-64:]
        )

    @staticmethod
    def _is_signed_by_peer(value: bytes) -> bool:
        return value[-len(_SIGNED) - 64 : -64] == _SIGNED
