"""Rounds of averaging over TCP and over QUIC, where packets get lost; ``internet.py --transports`` runs it.

How TCP takes lost packets is its congestion control's, of the system: each that may be chosen here is measured. That of
QUIC is the daemon's own.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import allreduce
from bench_peer import Work
from places import Line, congestion_controls, places
from swarm_bench import Peer, say, starting, table, write_json

PARAMETERS, CODEC = 1_000_000, "none"
#: Shares of the packets from one host to another that get lost.
LOST = (0.0, 0.001, 0.01)


@dataclass(frozen=True)
class Row:
    """Rounds of two peers.

    :param control: how TCP sends; ``None`` for QUIC
    :param lost: share of the packets
    :param rounds: seconds of each round, of the slower peer
    """

    control: str | None
    lost: float
    parameters: int
    rounds: list[float]

    @property
    def name(self) -> str:
        """Of the transport."""
        return "QUIC" if self.control is None else f"TCP, {self.control}"


def measure(control: str | None, lost: float, line: Line, parameters: int, repeat: int) -> Row:
    transport = "quic" if control is None else "tcp"
    work = Work(1, parameters=parameters, strategy={"codec": CODEC}, transport=transport)
    hosts = places([line | {"loss": lost / 2}] * 2, congestion_control=control)
    with hosts as (_, found), starting() as start:
        peers: list[Peer] = []
        for place in found:
            peers.append(start(work.at(place), peers, allreduce.averaging, len(found)))
        rounds, _, _ = allreduce.average(peers, repeat)
    return Row(control, lost, parameters, rounds)


def main(json: Path | None, quick: bool, line: Line) -> int:
    """Print a table of all transports and losses.

    :param line: of each host
    """
    parameters, repeat, shares = (PARAMETERS // 20, 1, LOST[:1]) if quick else (PARAMETERS, 7, LOST)
    rows: list[Row] = []
    broken: list[str] = []
    for lost in shares:
        for control in (None, *congestion_controls()):
            say(f"{control or 'QUIC'}, {100 * lost:.1f} % lost ... (load {os.getloadavg()[0]:.1f})")
            try:
                rows.append(measure(control, lost, line, parameters, repeat))
            except RuntimeError as e:  # a group that was not complete; the other rows are worth having
                broken.append(f"{control or 'QUIC'}, {100 * lost:.1f} % lost: {e}")
            write_json(json, rows, broken=broken, load_then=os.getloadavg()[0])
    cells = []
    for row in rows:
        median = statistics.median(row.rounds)
        of_quic = [statistics.median(one.rounds) for one in rows if (one.control, one.lost) == (None, row.lost)]
        ratio = f"{median / of_quic[0]:.2f}" if of_quic else "-"
        ends = f"{min(row.rounds):.2f} to {max(row.rounds):.2f}"
        cells.append([row.name, f"{100 * row.lost:.1f} %", row.parameters, f"{median:.2f}", ends, ratio])
    print(table(["transport", "lost", "parameters", "round, s", "from, to", "times QUIC"], cells))
    print(*broken, f"load at the end: {os.getloadavg()[0]:.1f}", sep="\n")
    return bool(broken)
