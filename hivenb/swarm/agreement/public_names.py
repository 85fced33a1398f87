"""Names that peers give themselves, told through the DHT.

Only a peer itself can tell its name: the record stands under its public key, with a proof that this is the key of the
peer. Nothing proves the name: anybody may take any, and it is a word for a person to read.
"""

from __future__ import annotations

import time
import unicodedata
from itertools import islice
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from hivenb.engine.network.access.identity import can_prove, is_proven
from hivenb.engine.network.record_board import RECORD_BYTES, RecordBoard
from hivenb.engine.network.untrusted_values import PEER_ID_LENGTH, named, raw, text

if TYPE_CHECKING:
    from hivenb.engine.network.dht import DHT

#: Characters of a name that are kept.
MAX_LENGTH = 40

#: Names that are read at most; peers beyond that are shown by their ids.
MAX_NAMES = 1000

_MAX_FIELDS, _PROOF_BYTES = 16, 128

#: Seconds for which a name counts after it was told last, and between two tellings.
EXPIRATION, RENEWAL = 180.0, 60.0

#: Seconds between two looks for the names of others.
READ_INTERVAL = 5.0


def clean(name: object) -> str:
    """A name as one short line: no control or direction characters, no runs of spaces; empty if it is no text."""
    if not isinstance(name, str):
        return ""
    text = "".join(c if unicodedata.category(c)[0] not in "CZ" else " " for c in name[: 8 * MAX_LENGTH])
    return " ".join(text.split())[:MAX_LENGTH].strip()


class PublicNames:
    """The names of a run's peers, and this peer's own. For one thread.

    :param dht: a running DHT
    :param run_id: name of the run
    :param own: what this peer calls itself; nothing is told when empty
    """

    def __init__(self, dht: DHT, run_id: str, own: str):
        self._board = RecordBoard(dht, f"{run_id}_names", expiration=EXPIRATION)
        self._peer_id, self._own = dht.peer_id.to_base58(), clean(own)
        self._proof = dht.prove(self._board.owner)
        self._tell_at = self._read_at = 0.0
        self._names: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """Names by the ids of their peers, as of a few seconds ago. Tells this peer's own now and then.

        :raises SwarmError: if the DHT does not answer in time
        :raises OSError: if the DHT was closed
        """
        now = time.monotonic()
        if self._own and now >= self._tell_at:
            record = {"peer": self._peer_id, "name": self._own, "proof": self._proof}
            self._board.write(self._board.owner, record)
            self._tell_at = now + RENEWAL
        if now >= self._read_at:
            self._names = self._read()
            self._read_at = now + READ_INTERVAL
        return self._names

    def _read(self) -> dict[str, str]:
        names = {self._peer_id: self._own} if self._own else {}
        for owner, record in islice(self._board.read().items(), MAX_NAMES):
            if (told := parse_name(owner, record.value)) is not None:
                names.setdefault(*told)
        return names


def parse_name(owner: Any, value: Any) -> tuple[str, str] | None:
    """The id of a peer and its name, as it was found, or ``None`` if it is none: anybody may write to a DHT."""
    try:
        fields = named(value, _MAX_FIELDS)
        peer_id, proof = text(fields["peer"], PEER_ID_LENGTH), raw(fields["proof"], _PROOF_BYTES)
        name, raw_id = clean(fields["name"]), PeerID.from_base58(peer_id).to_bytes()
        is_its_own = is_proven(raw_id, raw(owner, RECORD_BYTES), proof) or not can_prove(raw_id)
    except (KeyError, ValueError):
        return None
    return (peer_id, name) if name and is_its_own else None
