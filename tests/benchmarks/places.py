"""Hosts of the simulated internet of ``tests/network``, as places of benchmark peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench_peer import Place

sys.path.insert(0, str(Path(__file__).parents[1]))

from network.internet import LARGEST_PACKET, Internet, congestion_controls, why_not
from network.line import Line

__all__ = ["LARGE_PACKET", "Internet", "Line", "congestion_controls", "places", "why_not"]

#: Bytes of a packet where lines are so fast that the router would be the slowest of all with packets as at home.
LARGE_PACKET = 9000


@contextmanager
def places(
    lines: Sequence[Line], largest_packet: int = LARGEST_PACKET, congestion_control: str | None = None
) -> Iterator[tuple[Internet, list[Place]]]:
    """An internet of so many hosts, and each of them as a place. On Linux, for root; :func:`why_not` tells.

    :param lines: of the hosts
    :param largest_packet: in bytes
    :param congestion_control: by which TCP sends; else that of this machine
    """
    with Internet(lines, largest_packet=largest_packet, congestion_control=congestion_control) as internet:
        yield internet, [Place(internet.enter_as(host), internet.address(host)) for host in range(len(lines))]
