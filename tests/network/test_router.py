"""Packets go to whom they are for, over both lines, and not through a wall; without a network."""

from __future__ import annotations

import struct

from network.line import Line
from network.packet import UDP
from network.router import Router

ADDRESSES = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
SIZE = 1250  # 10,000 bits


def packet(sender: int, receiver: int, size: int = SIZE) -> bytes:
    header = struct.pack("!BBHHHBBH", 0x45, 0, size, 0, 0, 64, UDP, 0)
    addresses = bytes([10, 77, 0, sender + 1, 10, 77, 0, receiver + 1])
    return (header + addresses + struct.pack("!HH", 4000, 80)).ljust(size, b"\x00")


class Hosts:
    """What arrives, and when."""

    def __init__(self, *lines: Line) -> None:
        self.router = Router(ADDRESSES, lines)

    def send(self, sender: int, receiver: int, now: float = 0.0) -> float | None:
        """When a packet arrives; ``None`` if it does not."""
        self.router.take(sender, packet(sender, receiver), now)
        arrived: list[tuple[int, bytes]] = []
        while (seconds := self.router.seconds_until_next(now)) is not None:
            now += seconds
            self.router.hand_over(now, lambda number, content: arrived.append((number, content)))
        assert arrived in ([], [(receiver, packet(sender, receiver))])
        return now if arrived else None


def test_a_packet_goes_over_the_line_of_the_sender_and_that_of_the_receiver() -> None:
    hosts = Hosts(Line(delay=0.03, up=1e6), Line(delay=0.02, down=2e6), Line())
    at = hosts.send(0, 1)
    assert at is not None
    assert abs(at - (0.01 + 0.03 + 0.005 + 0.02)) < 1e-9


def test_a_line_may_be_another_one_later() -> None:
    hosts = Hosts(Line(), Line(), Line())
    assert hosts.send(0, 1, 0.0) is not None
    hosts.router.lines[1] |= {"is_cut": True}
    assert hosts.send(0, 1, 1.0) is None
    assert hosts.send(0, 2, 2.0) is not None
    hosts.router.lines[1] |= {"is_cut": False}
    assert hosts.send(0, 1, 3.0) is not None
    assert (hosts.router.forwarded, hosts.router.dropped) == (3, 1)


def test_whoever_is_behind_a_wall_is_reached_by_those_to_whom_it_has_sent_something() -> None:
    hosts = Hosts(Line(is_walled=True), Line(), Line())
    assert hosts.send(1, 0) is None
    router = hosts.router
    router.take(0, packet(0, 1), 1.0)
    back = packet(1, 0)[:20] + struct.pack("!HH", 80, 4000) + packet(1, 0)[24:]
    router.take(1, back, 2.0)
    router.take(2, packet(2, 0), 2.0)
    arrived: list[int] = []
    router.hand_over(10.0, lambda number, content: arrived.append(number))
    assert arrived == [1, 0]


def test_nobody_waits_for_what_comes_from_far_away() -> None:
    router = Router(ADDRESSES, [Line(delay=5.0), Line(), Line()])
    router.take(0, packet(0, 1), 0.0)
    router.take(2, packet(2, 1), 1.0)
    arrived: list[int] = []
    router.hand_over(2.0, lambda number, content: arrived.append(content[15]))
    assert arrived == [3]
    router.hand_over(10.0, lambda number, content: arrived.append(content[15]))
    assert arrived == [3, 1]


def test_what_is_for_nobody_goes_nowhere() -> None:
    router = Router(ADDRESSES, [Line()] * 3)
    for content in (b"", packet(0, 0), packet(0, 250)):
        router.take(0, content, 0.0)
    assert router.seconds_until_next(0.0) is None
    assert router.dropped == 0, "that is no loss of a line"
