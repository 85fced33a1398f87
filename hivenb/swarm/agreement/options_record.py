"""Records in the DHT by which the peers of a run agree on swarm-wide options.

Each of the first few peers of a run declares since when it takes part, and what is agreed on, under a subkey with its
public key: hivemind's ``RSASignatureValidator`` lets nobody else write there. The word of the one that has been there
longest counts: it is the host. When it leaves, the next one's word counts, which was the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import hivemind
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.network.access.identity import is_proven
from hivenb.engine.network.record_board import RECORD_BYTES, RecordBoard, Subkey, is_owned
from hivenb.engine.network.untrusted_values import PEER_ID_LENGTH, finite, named, raw, sequence, text, whole
from hivenb.errors import OptionsError
from hivenb.options.options import Options
from hivenb.options.swarm_wide import Shared, with_shared_part

# -- agreed return ---------------------------------------------------------------------------------------------------
#
# What all peers of a run do together when its loss has exploded: they return to a state that was good.


#: Epochs beyond which a number is none of a swarm's.
_MOST_EPOCHS = 2**53


@dataclass(frozen=True)
class Return:
    """A return that the host has decided on.

    :param to: the swarm epoch whose state all peers return to
    :param at: the epoch at which they go on with it
    """

    to: int
    at: int

    def pack(self) -> list[int]:
        """As it travels."""
        return [self.to, self.at]

    @classmethod
    def parse(cls, value: Any) -> Return | None:
        """A return as it has travelled; ``None`` for none.

        :raises ValueError: if it is none at all
        """
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(type(epoch) is int for epoch in value)):
            raise ValueError(f"{value!r:.100} is no return to an earlier state")
        to, at = value
        if not 0 <= to <= at < _MOST_EPOCHS:
            raise ValueError(f"nobody can return from epoch {at} to the state of epoch {to}")
        return cls(to, at)


# -- options record --------------------------------------------------------------------------------------------------


#: Seconds for which a declaration counts after its last renewal: one that leaves without a goodbye is host that long.
EXPIRATION = 30.0

#: Seconds that all peers are given at least to learn of a change before it counts; each looks once a second.
NOTICE = 4.0

_MAX_STEPS = 8

_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError)  # OptionsError is a ValueError

#: Names in a declaration, and in what is agreed on, at most; a newer version may add some.
_MAX_FIELDS = 64

#: Labels in a declaration at most, characters of one, and of a proof in hexadecimal.
_MAX_ORDER, _LABEL, _PROOF = 8, 16, 128

#: Declarations that are read at most; those that are known already come first.
MAX_DECLARATIONS = 64


def epochs_ahead(seconds_left: float | None, seconds_per_epoch: float | None) -> int:
    """How many epochs ahead a change is announced, so that no peer learns of it too late.

    :param seconds_left: of the present epoch, as estimated; ``None`` if unknown
    :param seconds_per_epoch: of the last ones; ``None`` if unknown
    """
    if seconds_left is not None and seconds_left >= 2 * NOTICE:
        return 1
    return 2 if not seconds_per_epoch else 1 + max(1, math.ceil(NOTICE / seconds_per_epoch))


@dataclass(frozen=True)
class Plan:
    """What the peers of a run agree on, now and in the epochs to come.

    :param version: how often it was changed
    :param steps: what counts from which swarm epoch on; oldest first, and at least one
    :param returned: the last return to an earlier state, if there was any
    """

    version: int
    steps: tuple[tuple[int, Shared], ...]
    returned: Return | None = None

    @property
    def newest(self) -> Shared:
        """What is agreed on in the end."""
        return self.steps[-1][1]

    @property
    def newest_epoch(self) -> int:
        """The epoch from which :attr:`newest` counts."""
        return self.steps[-1][0]

    def at(self, epoch: int) -> Shared:
        """What counts in an epoch."""
        return next((shared for since, shared in reversed(self.steps) if since <= epoch), self.steps[0][1])

    def changed(self, shared: Shared, since: int, now: int) -> Plan:
        """With something else from an epoch on.

        :param shared: the new values
        :param since: the epoch from which they count
        :param now: the present one; what no longer counts in it is forgotten
        """
        before = [(epoch, one) for epoch, one in self.steps if now < epoch < since]
        steps = (*([(0, self.at(now))] if since > now else []), *before, (since, shared))
        return replace(self, version=self.version + 1, steps=steps[-_MAX_STEPS:])

    def with_return(self, returned: Return) -> Plan:
        """With another return to an earlier state."""
        return replace(self, version=self.version + 1, returned=returned)


@dataclass(frozen=True)
class Declaration:
    """What one peer declares.

    :param owner: the subkey, which holds its public key
    :param peer_id: its id in the DHT, by which people know it
    :param since: when it first took part in the run, as DHT time in seconds; it can claim anything
    :param plan: what it believes to be agreed on
    :param order: in which order it believes those who declare something, itself included, as :func:`label_of` names
      them
    :param proof: that the peer of that id is the owner
    """

    owner: bytes
    peer_id: str
    since: float
    plan: Plan
    order: tuple[str, ...] = ()
    proof: bytes = b""

    @property
    def rank(self) -> tuple[float, bytes]:
        """The lowest claims to have come first."""
        return self.since, self.owner

    @property
    def is_proven(self) -> bool:
        """Whether the peer of that id has declared it."""
        try:
            peer_id = PeerID.from_base58(self.peer_id).to_bytes()
        except ValueError:
            return False
        return is_proven(peer_id, self.owner, self.proof)

    def pack(self) -> bytes:
        """As it travels."""
        fields: dict[str, Any] = {
            "peer": self.peer_id,
            "since": self.since,
            "version": self.plan.version,
            "steps": self.plan.steps,
        }
        if self.plan.returned is not None:
            fields["returned"] = self.plan.returned.pack()
        if self.proof:
            fields["proof"] = self.proof.hex()
        packed = _packed(fields)
        with_order = _packed({**fields, "order": self.order[:_MAX_ORDER]}) if self.order else packed
        return with_order if len(with_order) <= RECORD_BYTES else packed  # a plan that just fits is told without it

    def require_short(self) -> None:
        """Refuse what is too long to travel.

        :raises OptionsError: with its length
        """
        length = len(self.pack())
        if length > RECORD_BYTES:
            raise OptionsError(
                f"what all peers have to agree on takes {length} bytes, and {RECORD_BYTES} can travel: give fewer "
                "settings to grad_averager_factory, or fewer average_opt_statistics"
            )


def _packed(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def label_of(owner: bytes) -> str:
    """A short name of a subkey, that nobody else's has."""
    return hashlib.sha256(owner).hexdigest()[:_LABEL]


def parse(owner: Any, value: Any) -> Declaration | None:
    """A declaration as it was found, or ``None`` if it is none: anybody may write to a DHT."""
    try:
        fields = named(json.loads(raw(value, RECORD_BYTES)), _MAX_FIELDS)
        peer_id = text(fields["peer"], PEER_ID_LENGTH)
        since, version = finite(fields["since"]), whole(fields["version"])
        steps = tuple(_parse_step(*sequence(one, 2, least=2)) for one in sequence(fields["steps"], _MAX_STEPS, least=1))
        order = tuple(text(label, _LABEL) for label in sequence(fields.get("order", []), _MAX_ORDER))
        proof = bytes.fromhex(text(fields.get("proof", ""), _PROOF))
        returned = Return.parse(fields.get("returned"))
        for _, shared in steps:
            _check(shared)
    except _UNREADABLE:
        return None
    ascending = [epoch for epoch, _ in steps] == sorted({epoch for epoch, _ in steps})
    declared = Declaration(owner, peer_id, since, Plan(version, steps, returned), order, proof)
    return declared if is_owned(owner) and ascending else None


def _parse_step(epoch: Any, shared: Any) -> tuple[int, Shared]:
    return whole(epoch), named(shared, _MAX_FIELDS)


class Records:
    """Declarations of a run, as read from and written to the DHT, from any thread.

    What was read once counts until it expires or is withdrawn, even if a later read does not find it.

    :param dht: a running DHT with the ``private_key`` that its validator signs with
    :param run_id: name of the run
    """

    def __init__(self, dht: hivemind.DHT, run_id: str):
        self._board = RecordBoard(dht, f"{run_id}_options", expiration=EXPIRATION)
        self.owner, self.peer_id = self._board.owner, dht.peer_id.to_base58()
        self._known: dict[Subkey, tuple[float, Declaration | None]] = {}
        self._lock = threading.Lock()

    def read(self) -> tuple[Declaration, ...]:
        """What all peers declare at the moment, this one's own included.

        :raises SwarmError: if the DHT does not answer in time
        """
        records, now = self._board.read(), get_dht_time()
        known = [subkey for subkey in self._known if subkey in records]
        unknown = (subkey for subkey in records if subkey not in self._known)
        for subkey in (*known, *islice(unknown, max(0, MAX_DECLARATIONS - len(known)))):
            record = records[subkey]
            declaration = parse(subkey, record.value)
            # one that would stand for ever is none of ours, or of a clock that is far ahead
            if (declaration is not None or record.value is None) and record.expiration_time < now + 2 * EXPIRATION:
                self._note(subkey, record.expiration_time, declaration)
        with self._lock:
            self._known = {owner: known for owner, known in self._known.items() if known[0] > now}
            declarations = [one for _, one in self._known.values() if one is not None]
        return tuple(declarations)

    def write(self, declaration: Declaration) -> None:
        """Declare something for the next :data:`EXPIRATION` seconds, over what was declared before. Does not wait."""
        self._note(self.owner, get_dht_time() + EXPIRATION, replace(declaration, owner=self.owner))
        self._board.write(self.owner, declaration.pack())

    def withdraw(self, timeout: float) -> None:
        """Declare nothing any more, so that the next peer is host at once.

        :param timeout: seconds that this may take; without an answer, the declaration expires
        """
        self._note(self.owner, get_dht_time() + EXPIRATION, None)
        self._board.withdraw(self.owner, timeout)

    def _note(self, owner: Subkey, expires: float, declaration: Declaration | None) -> None:
        with self._lock:
            if expires > self._known.get(owner, (0.0, None))[0]:
                self._known[owner] = (expires, declaration)


def _check(shared: Shared) -> None:
    """Refuse values that are wrong whatever else a peer has chosen."""
    known = {name: value for name, value in shared.items() if name != "grad_averager_factory"}
    json.dumps(known, allow_nan=False)
    with_shared_part(Options(target_batch_size=1), known)
