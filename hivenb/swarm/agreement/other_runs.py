"""Which other runs are trained in a swarm, and by how many: who is in the wrong one would else just be alone.

Whoever trains tells the name of its run on a board of the whole swarm. Who takes part in it stands in the run itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import hivemind

from hivenb.engine.network.dht import DHT
from hivenb.engine.network.record_board import RecordBoard
from hivenb.engine.network.records import LONGEST_NAME, RUNS_KEY
from hivenb.engine.network.untrusted_values import text
from hivenb.engine.progress.peer_reports import read_peers

#: Seconds for which a name counts after it was told last.
EXPIRATION = 300.0

#: Seconds between two looks, and runs that are looked at in one.
LOOK_EVERY, MOST_RUNS = 5.0, 8


def tell_of_run(dht: hivemind.DHT, run_id: str) -> None:
    """Let the swarm know that a run is trained, for the next :data:`EXPIRATION` seconds. Does not wait.

    :param dht: of ours; without effect for one of plain hivemind's
    """
    if isinstance(dht, DHT) and len(run_id) <= LONGEST_NAME:
        RecordBoard(dht, RUNS_KEY, expiration=EXPIRATION).write(run_id, True)


def names_of_runs(records: Mapping[Any, Any], own: str) -> list[str]:
    """Names of other runs out of what stands on the board: anybody may write to a DHT.

    :param records: values by their subkeys
    :param own: name of the run that is known
    """
    found = []
    for subkey, value in records.items():
        try:
            name = text(subkey, LONGEST_NAME)
        except ValueError:
            continue
        if value is True and name not in ("", own):
            found.append(name)
    return sorted(found)


class OtherRuns:
    """The other runs of a swarm, as this peer has seen them last. For one thread that looks, and any that read.

    :param dht: a running DHT
    :param run_id: name of the run in which this peer trains
    """

    def __init__(self, dht: hivemind.DHT, run_id: str):
        self._dht, self._run_id = dht, run_id
        self._looked_at = 0.0
        #: how many peers train in each of them, by its name
        self.peers: Mapping[str, int] = MappingProxyType({})

    def look(self, ours: Collection[str]) -> bool:
        """See who trains there, now and then. Waits for the DHT.

        :param ours: ids of the peers that do not count: those of this machine
        :returns: whether anything is another than before
        :raises SwarmError: if the DHT does not answer in time
        """
        if time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        self._looked_at, before = time.monotonic(), self.peers
        board = RecordBoard(self._dht, RUNS_KEY).read()
        names = names_of_runs({subkey: record.value for subkey, record in board.items()}, self._run_id)
        counts = {name: self._count(name, ours) for name in islice(names, MOST_RUNS)}
        self.peers = MappingProxyType({name: count for name, count in counts.items() if count})
        return self.peers != before

    def _count(self, name: str, ours: Collection[str]) -> int:
        return sum(not peer.is_self and peer.peer_id not in ours for peer in read_peers(self._dht, name))
