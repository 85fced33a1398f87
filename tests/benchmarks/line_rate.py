"""Rounds of averaging against what slow lines allow; ``internet.py --line-rate`` runs it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import allreduce
from bench_peer import Work
from places import LARGE_PACKET, Line, places
from swarm_bench import Peer, say, starting, table, write_json

from hivenb import compression

PARAMETERS, CODEC, REPEAT = 10_000_000, "float16", 2
#: A quarter of 50 ms there and back.
DELAY = 0.0125


def _line(down: float, up: float) -> Line:
    # routers at home hold back a tenth of a second and more
    return Line(delay=DELAY, up=up * 1e6, down=down * 1e6, queue=0.15)


#: The lines of each host.
CASES = {
    **{f"{count} at {rate} Mbit/s": [_line(rate, rate)] * count for rate in (20, 100) for count in (2, 4)},
    "4 at 100 down, 10 up": [_line(100, 10)] * 4,
    "2 at 100, 2 at 100 down, 10 up": [_line(100, 100)] * 2 + [_line(100, 10)] * 2,
}


@dataclass(frozen=True)
class Row:
    """Rounds of one group.

    :param megabytes: that each peer sends if all get equal parts
    :param allowed: seconds that the lines would need, with the parts that suit them best and nothing but numbers sent
    :param rounds: seconds of each round, of the slowest peer
    :param tcp: seconds in which each peer hands those megabytes to the next one over one TCP connection
    """

    lines: str
    parameters: int
    codec: str
    megabytes: float
    allowed: float
    rounds: list[float]
    tcp: list[float]

    @property
    def share(self) -> float:
        """Of what the lines allow."""
        return self.allowed / statistics.median(self.rounds)


def seconds_allowed(lines: Sequence[Line], size: float) -> float:
    """What a round takes at least.

    Who averages a share f of the numbers sends its own numbers of the other shares, and the average to each of the
    others: 1 + (n - 2) f times all numbers, and it receives as many.

    :param size: of all numbers of one peer, in bytes
    """
    count = len(lines)
    pace = [min(line.up, line.down) / (8 * size) for line in lines]
    if count == 2:
        return 1 / min(pace)
    low, high = 1 / min(pace), count / min(pace)
    for _ in range(60):
        middle = (low + high) / 2
        shares = [min(1.0, (middle * one - 1) / (count - 2)) for one in pace]
        low, high = (low, middle) if sum(shares) >= 1 else (middle, high)
    return high


def measure(name: str, lines: Sequence[Line], parameters: int, repeat: int) -> Row:
    count, numbers = len(lines), parameters * compression.CODECS[CODEC].bytes_per_parameter
    work = Work(1, parameters=parameters, strategy={"codec": CODEC})
    with places(lines, LARGE_PACKET) as (_, found):
        with starting() as start:
            peers: list[Peer] = []
            for place in found:
                peers.append(start(work.at(place), peers, allreduce.averaging, count))
            rounds, _, _ = allreduce.average(peers, repeat)
        size = round(2 * (count - 1) / count * numbers)
        tcp = allreduce.move([Work(1, place=place) for place in found], size, 1, allreduce.moving, "address")
    return Row(name, parameters, CODEC, size / 1e6, seconds_allowed(lines, numbers), rounds, tcp)


def main(json: Path | None, quick: bool) -> int:
    cases = {"2 at 20 Mbit/s": CASES["2 at 20 Mbit/s"]} if quick else CASES
    rows: list[Row] = []
    broken: list[str] = []
    for name, lines in cases.items():
        say(f"{name} ... (load {os.getloadavg()[0]:.1f})")
        try:
            rows.append(measure(name, lines, PARAMETERS // 20 if quick else PARAMETERS, 1 if quick else REPEAT))
            say(f"    {rows[-1].share:.2f} of what the lines allow")
        except RuntimeError as e:  # a group that was not complete; the other rows are worth having
            broken.append(f"{name}: {e}")
            say(f"    {e}")
        besides = {"shares": {row.lines: row.share for row in rows}, "broken": broken, "load_then": os.getloadavg()[0]}
        write_json(json, rows, **besides)  # after each row: a run may be ended in the middle
    heads = ["lines", "parameters", "codec", "MB sent by each", "allowed, s", "round, s", "share of the line", "TCP, s"]
    cells = [
        [
            row.lines,
            row.parameters,
            row.codec,
            f"{row.megabytes:.1f}",
            f"{row.allowed:.2f}",
            f"{statistics.median(row.rounds):.2f}",
            f"{row.share:.2f}",
            f"{statistics.median(row.tcp):.2f}",
        ]
        for row in rows
    ]
    print(table(heads, cells))
    print(*broken, f"load at the end: {os.getloadavg()[0]:.1f}", sep="\n")
    return bool(broken)
