"""Records in the DHT by which the peers of a run agree on swarm-wide options.

Each of the first few peers of a run declares since when it takes part, and what is agreed on, under a subkey with its
public key: hivemind's ``RSASignatureValidator`` lets nobody else write there. The word of the one that has been there
longest counts: it is the host. When it leaves, the next one's word counts, which was the same.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import hivemind
from hivemind.utils import get_dht_time

from hivenb.engine.dht.record_board import RECORD_BYTES, RecordBoard, Subkey, is_owned
from hivenb.errors import OptionsError
from hivenb.options.options import Options
from hivenb.options.swarm_wide import Shared, with_shared_part

#: Seconds for which a declaration counts after its last renewal: one that leaves without a goodbye is host that long.
EXPIRATION = 30.0

_MAX_STEPS = 8


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
    if not is_owned(owner) or not isinstance(value, bytes) or len(value) > RECORD_BYTES:
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
        self._board = RecordBoard(dht, f"{run_id}_options", expiration=EXPIRATION)
        self.owner, self.peer_id = self._board.owner, dht.peer_id.to_base58()
        self._known: dict[Subkey, tuple[float, Declaration | None]] = {}
        self._lock = threading.Lock()

    def read(self) -> tuple[Declaration, ...]:
        """What all peers declare at the moment, this one's own included; first the host's.

        :raises SwarmError: if the DHT does not answer in time
        """
        records, now = self._board.read(), get_dht_time()
        for subkey, record in records.items():
            declaration = parse(subkey, record.value)
            # one that would stand for ever is none of ours, or of a clock that is far ahead
            if (declaration is not None or record.value is None) and record.expiration_time < now + 2 * EXPIRATION:
                self._note(subkey, record.expiration_time, declaration)
        with self._lock:
            self._known = {owner: known for owner, known in self._known.items() if known[0] > now}
            declarations = [one for _, one in self._known.values() if one is not None]
        return tuple(sorted(declarations, key=lambda one: one.rank))

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
