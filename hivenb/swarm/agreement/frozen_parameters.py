"""What of a module stays out of the optimizer, such as frozen layers: equal at all peers of a run, or named.

Each peer signs digests of it. A newcomer that has something else takes over what is small, and is refused, by the name
of the first tensor that differs, where it is large and was not asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hivemind

from hivenb.engine.averaging.module_rest import DIGITS, MOST_COPIED, ModuleRest, RestEntry, dtype_of
from hivenb.engine.network.record_board import ANSWER_TIMEOUT, RECORD_BYTES
from hivenb.engine.network.untrusted_values import named, sequence, text, whole
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.model_record import (
    MAX_PARAMETERS,
    RENEWAL,
    bare_parts,
    declarations,
    declare,
    described_by,
    inviting_peers,
    lasting_difference,
    reported_by,
    whose_model,
    without_wrappers,
)

logger = logging.getLogger(__name__)

#: Bytes at most that a newcomer takes over without having asked for it: 32 MB.
MOST_SENT = MOST_COPIED

#: Seconds, and epochs, after which a peer is sure that nobody has begun at the same time: reports take a while.
UNSURE_FOR, UNSURE_EPOCHS = 30.0, 3

#: Seconds between two looks for that, and for which one may last.
_LOOK_EVERY, _LOOK_WITHIN = 2.0, 2.0

_FLOATS = {"float64", "float32", "bfloat16", "float16"}

_MAX_DIMENSIONS, _MAX_TYPE, _MAX_DIGESTS = 64, 32, 4


@dataclass(frozen=True)
class Difference:
    """In what the rest of a module differs from what others have.

    :param others: by its numbers here, what they have instead, or what training changes
    :param only_here: names of what they do not have
    :param only_there: names of what this peer does not have
    """

    others: Mapping[int, RestEntry]
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()


def difference(ours: Sequence[RestEntry], theirs: Sequence[RestEntry]) -> Difference | None:
    """In what two modules differ; ``None`` if peers can train with both as they are."""
    names = [[one.name for one in side] for side in (ours, theirs)]
    here, there = ([".".join(bare_parts(name)) for name in side] for side in names)
    if not set(here) & set(there):  # one has it as self.model, the other one as self.net
        here, there = (without_wrappers(side) for side in names)
    known = dict(zip(there, theirs, strict=True))
    numbers = dict(zip(here, range(len(ours)), strict=True))
    others = {
        number: known[name]
        for name, number in numbers.items()
        if name in known and (known[name].is_moving or not ours[number].is_same(known[name]))
    }
    only_here = tuple(ours[number].name for name, number in numbers.items() if name not in known)
    only_there = tuple(one.name for name, one in known.items() if name not in numbers)
    return Difference(others, only_here, only_there) if others or only_here or only_there else None


def digest_of_rest(entries: Sequence[RestEntry]) -> str:
    """Equal where two descriptions are."""
    return hashlib.sha256(pack_rest(entries)).hexdigest()


def pack_rest(entries: Sequence[RestEntry]) -> bytes:
    """A description as it travels."""
    packed = [[one.name, one.shape, one.dtype, dict(one.digests)] for one in entries]
    return json.dumps(packed, separators=(",", ":")).encode()


def parse_rest(digest: str, records: Mapping[Any, Any]) -> tuple[RestEntry, ...] | None:
    """A description as it was found.

    :param digest: of it
    :param records: what stands on the board
    :returns: ``None`` if it is none, or not whole: anybody may write to a DHT
    """
    try:
        entries = sequence(json.loads(described_by(digest, records)), MAX_PARAMETERS)
        return tuple(_parse_entry(*sequence(one, 4, least=4)) for one in entries)
    except (KeyError, ValueError, RecursionError):
        return None


def _parse_entry(name: Any, shape: Any, dtype: Any, digests: Any) -> RestEntry:
    sizes = tuple(whole(size, 1) for size in sequence(shape, _MAX_DIMENSIONS))
    dtype_of(text(dtype, _MAX_TYPE))
    known = {text(one, _MAX_TYPE): text(digest, DIGITS) for one, digest in named(digests, _MAX_DIGESTS).items()}
    return RestEntry(text(name, RECORD_BYTES), sizes, dtype, known)


def to_download(found: Difference, rest: ModuleRest, run_id: str, downloads: bool) -> Mapping[int, RestEntry]:
    """What to take over from the others.

    :param rest: of this peer's module
    :param downloads: whether it takes over what is large, too
    :raises SwarmError: if it is large and was not asked for, or cannot travel; the message names the first tensor
    """
    frozen = {number: one for number, one in found.others.items() if not one.is_moving}
    unfit = [number for number, one in found.others.items() if not _fits(rest, number, one)]
    size = sum(one.nbytes for number, one in frozen.items() if number not in unfit)
    if not unfit and (size <= MOST_SENT or downloads):
        return found.others
    first = unfit[0] if unfit else next(iter(frozen))
    own, other = rest.entries[first], found.others[first]
    more = f", and {len(found.others) - 1} more differ" if len(found.others) > 1 else ""
    remedy = "Load the same weights at all peers (one checkpoint in one revision, or one seed)"
    if not unfit:
        remedy += f", or let this peer take over the {size / 2**20:.0f} MB with frozen_parameters='download'"
    raise SwarmError(
        f"what the optimizer was not given differs from the swarm's in the run {run_id!r}: {own.name} "
        f"({_in_words(own)} here, {_in_words(other)} there) has other values{more}. It is not averaged, so this peer "
        f"would train the same layers on top of others. {remedy}; frozen_parameters='own' lets it have its own, such "
        "as the same base in fewer bits"
    )


def _fits(rest: ModuleRest, number: int, other: RestEntry) -> bool:
    own = rest.entries[number]
    can_be_converted = own.dtype == other.dtype or {own.dtype, other.dtype} <= _FLOATS
    return own.shape == other.shape and can_be_converted and rest.travels(number)


def _in_words(one: RestEntry) -> str:
    return f"{one.dtype} of shape {one.shape}"


class RestDeclaration:
    """What a peer tells the others about the rest of its module, and has in common with them.

    :param dht: a running DHT
    :param run_id: name of the run
    :param rest: of the module
    :param downloads: whether it takes over from the others what is large, too
    :raises SwarmError: if it differs from the others', and cannot be taken over from them
    """

    def __init__(self, dht: hivemind.DHT, run_id: str, rest: ModuleRest, downloads: bool):
        self._dht, self._run_id, self._rest, self._downloads = dht, run_id, rest, downloads
        self._has_joined, self._taken = False, set[str]()
        self._epochs, self._declared_at, self._looked_at = 0, 0.0, 0.0
        #: what to take over from the others before the next batch, by its numbers here
        self.wanted: Mapping[int, RestEntry] = {}
        #: names of what only some of the peers have
        self.one_sided: tuple[str, ...] = ()
        found = lasting_difference(dht, run_id, partial(self._difference_to, timeout=ANSWER_TIMEOUT))
        self._note(found)
        self._began_at = time.monotonic()

    def _note(self, found: Difference | None) -> None:
        self.one_sided = () if found is None else (*found.only_here, *found.only_there)
        self.wanted = {} if found is None else to_download(found, self._rest, self._run_id, self._downloads)
        self._taken |= {self._rest.entries[number].name for number in self.wanted}

    def _difference_to(self, owners: Collection[Any], timeout: float, begun_at_once: bool = False) -> Difference | None:
        if not owners:
            return None
        declared, records = declarations(self._dht, self._key, owners, timeout)
        if begun_at_once and not self._has_joined:  # all look at the same, and one of them yields
            own = digest_of_rest(self._rest.entries)
            votes = Counter([own, *(record.digest for record in declared)])
            digest: str | None = max(votes, key=lambda one: (votes[one], one))
            if digest == own:
                return None
        else:
            digest = whose_model(declared, inviting_peers(self._dht))
        theirs = None if digest is None else parse_rest(digest, records)
        if theirs is None:
            return None
        ours = self._rest.entries
        found = difference(ours, theirs)
        if begun_at_once:  # of what training changes, each goes on with its own, but for who has come too early to know
            others = {} if found is None else found.others
            others = {n: one for n, one in others.items() if self._is_still_to_come(ours[n], one)}
            return Difference(others) if others else None
        self._has_joined = True
        return found

    def _is_still_to_come(self, own: RestEntry, other: RestEntry) -> bool:
        if other.is_moving:
            return self._has_joined and own.name not in self._taken
        return not own.is_moving

    def declare(self) -> None:
        """Tell what this peer has, when it has all that it wanted. Does not wait."""
        declare(self._dht, self._key, pack_rest(self._rest.entries))
        self._declared_at = time.monotonic()

    def on_epoch(self) -> None:
        """Look what training changes, and whether somebody else has begun at the same time; sets :attr:`wanted`.

        :raises SwarmError: if somebody has, with something else that cannot be taken over
        """
        self._epochs += 1
        now = time.monotonic()
        is_due = now - self._declared_at > RENEWAL
        is_unsure = self._epochs <= UNSURE_EPOCHS or now - self._began_at < UNSURE_FOR
        is_to_look = is_unsure and (self._epochs <= UNSURE_EPOCHS or now - self._looked_at > _LOOK_EVERY)
        if (is_due or is_to_look) and (self._rest.look_for_changes() or is_due):
            self.declare()
        if is_to_look:
            self._looked_at = now
            try:
                owners = reported_by(self._dht, self._run_id, _LOOK_WITHIN)
                found = self._difference_to(owners, _LOOK_WITHIN, begun_at_once=True)
            except SwarmError as e:  # the DHT is busy, and will be asked again
                logger.debug(f"Nobody could be compared with: {e}")
                return
            self._note(found)

    @property
    def _key(self) -> str:
        return f"{self._run_id}_rest"
