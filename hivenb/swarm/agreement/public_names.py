"""Names that peers give themselves, told through the DHT.

Nothing proves a name: whoever reaches the DHT can write one for any peer. It is a word for a person to read, and
nothing else hangs on it.
"""

from __future__ import annotations

import time
import unicodedata
from itertools import islice

import hivemind

from hivenb.engine.dht.record_board import RecordBoard

#: Characters of a name that are kept.
MAX_LENGTH = 40

#: Names that are read at most; peers beyond that are shown by their ids.
MAX_NAMES = 1000

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

    def __init__(self, dht: hivemind.DHT, run_id: str, own: str):
        self._board = RecordBoard(dht, f"{run_id}_names", expiration=EXPIRATION)
        self._peer_id, self._own = dht.peer_id.to_base58(), clean(own)
        self._tell_at = self._read_at = 0.0
        self._names: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """Names by the ids of their peers, as of a few seconds ago. Tells this peer's own now and then.

        :raises SwarmError: if the DHT does not answer in time
        :raises OSError: if the DHT was closed
        """
        now = time.monotonic()
        if self._own and now >= self._tell_at:
            self._board.write(self._peer_id, self._own)
            self._tell_at = now + RENEWAL
        if now >= self._read_at:
            self._names = self._read()
            self._read_at = now + READ_INTERVAL
        return self._names

    def _read(self) -> dict[str, str]:
        names = {self._peer_id: self._own} if self._own else {}
        for peer_id, record in islice(self._board.read().items(), MAX_NAMES):
            if isinstance(peer_id, str) and peer_id not in names and (name := clean(record.value)):
                names[peer_id] = name
        return names
