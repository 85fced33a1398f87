"""Records in the DHT by which the peers of a run agree on swarm-wide options.

Each of the first few peers of a run declares since when it takes part, and what is agreed on, under a subkey with its
public key: hivemind's ``RSASignatureValidator`` lets nobody else write there. The word of the one that has been there
longest counts: it is the host. When it leaves, the next one's word counts, which was the same.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.errors import OptionsError, SwarmError
from hivenb.options.options import Options
from hivenb.options.swarm_wide import Shared, with_shared_part

#: Bytes in one record. A larger message into the DHT's pipe can mix with one of another process (POSIX, PIPE_BUF).
RECORD_BYTES = 2048

#: Seconds for which a declaration counts after its last renewal: one that leaves without a goodbye is host that long.
EXPIRATION = 30.0

#: Seconds that the DHT is given to answer.
_TIMEOUT = 10.0

_MAX_STEPS = 8
_OWNER = RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")


@dataclass(frozen=True)
class Plan:
    """What the peers of a run agree on, now and in the epochs to come.

    :param version: how often it was changed
    :param steps: what counts from which epoch of the swarm on; oldest first, and at least one
    """

    version: int
    steps: tuple[tuple[int, Shared], ...]

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
        return Plan(self.version + 1, steps[-_MAX_STEPS:])


@dataclass(frozen=True)
class Declaration:
    """What one peer declares.

    :param owner: the subkey, which holds its public key
    :param peer_id: its id in the DHT, by which people know it
    :param since: when it first took part in the run, as DHT time in seconds
    :param plan: what it believes to be agreed on
    """

    owner: bytes
    peer_id: str
    since: float
    plan: Plan

    @property
    def rank(self) -> tuple[float, bytes]:
        """The lowest is the host's."""
        return self.since, self.owner

    def pack(self) -> bytes:
        """As it travels."""
        fields = {"peer": self.peer_id, "since": self.since, "version": self.plan.version, "steps": self.plan.steps}
        return json.dumps(fields, separators=(",", ":")).encode()

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


def parse(owner: Any, value: Any) -> Declaration | None:
    """A declaration as it was found, or ``None`` if it is none: anybody may write to a DHT."""
    if not isinstance(owner, bytes) or not is_owned(owner) or not isinstance(value, bytes) or len(value) > RECORD_BYTES:
        return None
    try:
        fields = json.loads(value)
        peer_id, since, version = fields["peer"], float(fields["since"]), int(fields["version"])
        steps = tuple((int(epoch), dict(shared)) for epoch, shared in fields["steps"])
        for _, shared in steps:
            _check(shared)
    except (KeyError, TypeError, ValueError, RecursionError):  # OptionsError is a ValueError
        return None
    ascending = [epoch for epoch, _ in steps] == sorted({epoch for epoch, _ in steps})
    if not (isinstance(peer_id, str) and math.isfinite(since) and 0 < len(steps) <= _MAX_STEPS and ascending):
        return None
    return Declaration(owner, peer_id, since, Plan(version, steps))


def is_owned(subkey: bytes) -> bool:
    """Whether a subkey is a public key and nothing else, so that only its owner can write there."""
    start, end = _OWNER
    return subkey.startswith(start) and subkey.endswith(end) and subkey.count(start) == 1


def owner_of(key: RSAPrivateKey) -> bytes:
    """The subkey that only the holder of a private key can write to."""
    return RSASignatureValidator(key).local_public_key


def host_of(declarations: Iterable[Declaration]) -> Declaration | None:
    """The one whose word counts; ``None`` if nobody has declared anything."""
    return min(declarations, key=lambda one: one.rank, default=None)


class Records:
    """Declarations of a run, as read from and written to the DHT, from any thread.

    What was read once counts until it expires or is withdrawn, even if a later read does not find it.

    :param dht: a running DHT with the ``private_key`` that its validator signs with
    :param run_id: name of the run
    """

    def __init__(self, dht: hivemind.DHT, run_id: str):
        self._dht, self._key = dht, f"{run_id}_options"
        self.owner, self.peer_id = owner_of(dht.private_key), dht.peer_id.to_base58()
        self._known: dict[bytes, tuple[float, Declaration | None]] = {}
        self._lock = threading.Lock()

    def read(self) -> tuple[Declaration, ...]:
        """What all peers declare at the moment, this one's own included; first the host's.

        :raises SwarmError: if the DHT does not answer in time
        """
        try:
            found: Any = self._dht.get(self._key, latest=True, return_future=True).result(_TIMEOUT)
        except (TimeoutError, concurrent.futures.TimeoutError) as e:
            raise SwarmError(f"the DHT did not answer within {_TIMEOUT} s; is its process overloaded or gone?") from e
        entries = found.value if found is not None and isinstance(found.value, Mapping) else {}
        now = get_dht_time()
        for subkey, entry in entries.items():
            declaration = parse(subkey, entry.value)
            # one that would stand for ever is none of ours, or of a clock that is far ahead
            if (declaration is not None or entry.value is None) and entry.expiration_time < now + 2 * EXPIRATION:
                self._note(subkey, entry.expiration_time, declaration)
        with self._lock:
            self._known = {owner: known for owner, known in self._known.items() if known[0] > now}
            declarations = [one for _, one in self._known.values() if one is not None]
        return tuple(sorted(declarations, key=lambda one: one.rank))

    def write(self, declaration: Declaration) -> None:
        """Declare something for the next :data:`EXPIRATION` seconds, over what was declared before. Does not wait."""
        self._store(declaration.pack(), replace(declaration, owner=self.owner))

    def withdraw(self, timeout: float) -> None:
        """Declare nothing any more, so that the next peer is host at once.

        :param timeout: seconds that this may take; without an answer, the declaration expires
        """
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError, OSError):
            self._store(None, None).result(timeout)

    def _store(self, value: bytes | None, declaration: Declaration | None) -> Any:
        expires = get_dht_time() + EXPIRATION
        self._note(self.owner, expires, declaration)
        return self._dht.store(self._key, subkey=self.owner, value=value, expiration_time=expires, return_future=True)

    def _note(self, owner: bytes, expires: float, declaration: Declaration | None) -> None:
        with self._lock:
            if expires > self._known.get(owner, (0.0, None))[0]:
                self._known[owner] = (expires, declaration)


def _check(shared: Shared) -> None:
    """Refuse values that are wrong whatever else a peer has chosen."""
    known = {name: value for name, value in shared.items() if name != "grad_averager_factory"}
    json.dumps(known, allow_nan=False)
    with_shared_part(Options(target_batch_size=1), known)
