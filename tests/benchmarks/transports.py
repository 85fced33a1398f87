"""Rounds of averaging over TCP and over QUIC, where packets get lost; ``internet.py --transports`` runs it."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import allreduce
from bench_peer import Work
from places import Line, places
from swarm_bench import Peer, say, starting, table, write_json

PARAMETERS, CODEC = 1_000_000, "none"
TRANSPORTS = ("tcp", "quic")
#: Shares of the packets from one host to another that get lost.
LOST = (0.0, 0.001, 0.01)


@dataclass(frozen=True)
class Row:
    """Rounds of two peers.

    :param lost: share of the packets
    :param rounds: seconds of each round, of the slower peer
    """

    transport: str
    lost: float
    parameters: int
    rounds: list[float]


def measure(transport: str, lost: float, line: Line, parameters: int, repeat: int) -> Row:
    work = Work(1, parameters=parameters, strategy={"codec": CODEC}, transport=transport)
    with places([line | {"loss": lost / 2}] * 2) as (_, found), starting() as start:
        peers: list[Peer] = []
        for place in found:
            peers.append(start(work.at(place), peers, allreduce.averaging, len(found)))
        rounds, _, _ = allreduce.average(peers, repeat)
    return Row(transport, lost, parameters, rounds)


def main(json: Path | None, quick: bool, line: Line) -> int:
    """Print a table of all transports and losses.

    :param line: of each host
    """
    parameters, repeat, shares = (PARAMETERS // 20, 1, LOST[:1]) if quick else (PARAMETERS, 7, LOST)
    rows: list[Row] = []
    broken: list[str] = []
    for lost in shares:
        for transport in TRANSPORTS:
            say(f"{transport}, {100 * lost:.1f} % lost ... (load {os.getloadavg()[0]:.1f})")
            try:
                rows.append(measure(transport, lost, line, parameters, repeat))
            except RuntimeError as e:  # a group that was not complete; the other rows are worth having
                broken.append(f"{transport}, {100 * lost:.1f} % lost: {e}")
            write_json(json, rows, broken=broken, load_then=os.getloadavg()[0])
    cells = []
    for row in rows:
        median = statistics.median(row.rounds)
        of_tcp = [statistics.median(one.rounds) for one in rows if (one.transport, one.lost) == ("tcp", row.lost)]
        ratio = f"{median / of_tcp[0]:.2f}" if of_tcp else "-"
        ends = f"{min(row.rounds):.2f} to {max(row.rounds):.2f}"
        cells.append([row.transport, f"{100 * row.lost:.1f} %", row.parameters, f"{median:.2f}", ends, ratio])
    print(table(["transport", "lost", "parameters", "round, s", "from, to", "times TCP"], cells))
    print(*broken, f"load at the end: {os.getloadavg()[0]:.1f}", sep="\n")
    return bool(broken)
