"""The middle of the network: takes what hosts send, holds it back for as long as the lines would, and hands it over."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from random import Random

from namespaces import enter, move_to

from network.firewall import Firewall
from network.line import Direction, Line
from network.packet import flow_of
from network.translation import Translation

#: The device by which a host reaches the others.
DEVICE = "wan0"

#: Address of a host behind a router that translates.
HOME = "192.168.7.2"

#: From linux/if_tun.h: TUNSETIFF, and IFF_TUN without a header before each packet.
_SET_DEVICE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001

#: Packets of one host that are taken in a row.
_BURST = 64

#: Seconds between two looks at what the test wants.
_LOOK_EVERY = 0.1

_LARGEST = 2**16

#: The priority of a process that comes before the others.
_FIRST = -20


class Router:
    """Where each packet goes, and when. It reads no clock.

    :param addresses: of the hosts
    :param lines: of the hosts
    :param seed: of what is left to chance
    """

    def __init__(self, addresses: Sequence[str], lines: Sequence[Line], seed: int = 0) -> None:
        self.lines = list(lines)
        self._numbers = {address: number for number, address in enumerate(addresses)}
        chance = Random(seed)
        self._sent, self._received = ([Direction(chance) for _ in lines] for _ in range(2))
        self._walls = [Firewall() for _ in lines]
        self._translations = [
            Translation(HOME, address, line.is_symmetric) if line.is_translated else None
            for address, line in zip(addresses, lines, strict=True)
        ]
        self._count = 0
        #: when something happens to a packet, whether that is its arrival in the middle, and whose it is
        self._to_come: list[tuple[float, int, bool, int, bytes]] = []
        #: packets that were handed over, and that were not
        self.forwarded, self.dropped = 0, 0

    def take(self, sender: int, packet: bytes, now: float) -> None:
        """A packet comes from a host."""
        translation = self._translations[sender]
        sent = packet if translation is None else translation.outward(packet)
        flow = None if sent is None else flow_of(sent)
        receiver = None if flow is None else self._numbers.get(flow.target[0])
        if sent is None or flow is None or receiver is None or receiver == sender:
            return  # of the system's own, to all
        line = self.lines[sender]
        self._walls[sender].note_sent(flow, now)
        self._expect(self._sent[sender].arrival(now, len(sent), line, line.up), True, receiver, sent)

    def hand_over(self, now: float, deliver: Callable[[int, bytes], None]) -> None:
        """Deliver what has arrived by now.

        :param deliver: called with the number of a host and a packet for it
        """
        while self._to_come and self._to_come[0][0] <= now:
            at, _, is_in_the_middle, receiver, packet = heapq.heappop(self._to_come)
            if is_in_the_middle:
                self._pass_on(receiver, packet, at)
            else:
                deliver(receiver, packet)
                self.forwarded += 1

    def _pass_on(self, receiver: int, packet: bytes, now: float) -> None:
        line, flow, translation = self.lines[receiver], flow_of(packet), self._translations[receiver]
        is_let_in = not line.lets_nobody_in or (flow is not None and self._walls[receiver].lets_in(flow, now))
        inner = packet if translation is None else translation.inward(packet)
        if not is_let_in or inner is None:
            self.dropped += 1
            return
        self._expect(self._received[receiver].arrival(now, len(inner), line, line.down), False, receiver, inner)

    def _expect(self, at: float | None, is_in_the_middle: bool, receiver: int, packet: bytes) -> None:
        if at is None:
            self.dropped += 1
            return
        self._count += 1
        heapq.heappush(self._to_come, (at, self._count, is_in_the_middle, receiver, packet))

    def seconds_until_next(self, now: float) -> float | None:
        """Until something happens to a packet; ``None`` if none is under way."""
        return max(0.0, self._to_come[0][0] - now) if self._to_come else None


def route(connection: Connection, spaces: Sequence[str], router: Router) -> None:
    """Let hosts reach each other until the other end of the connection is closed; in a process of its own.

    :param connection: gives a host's number and its line from now on; each is answered with the packets that were
      forwarded and dropped, and so is ``None``
    :param spaces: names of the hosts' network namespaces
    """
    _be_in_time()
    devices = [_open_device(space) for space in spaces]
    numbers = {device: number for number, device in enumerate(devices)}
    waiting = select.epoll()
    for device in devices:
        waiting.register(device, select.EPOLLIN)
    waiting.register(connection.fileno(), select.EPOLLIN)
    connection.send((0, 0))

    def deliver(receiver: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its buffer is full, as one in the real internet may be
            os.write(devices[receiver], packet)

    with contextlib.suppress(EOFError):
        while True:
            until_next = router.seconds_until_next(time.monotonic())
            for ready, _ in waiting.poll(_LOOK_EVERY if until_next is None else min(until_next, _LOOK_EVERY)):
                if ready in numbers:
                    _take_burst(router, numbers[ready], ready)
                else:
                    if (change := connection.recv()) is not None:
                        router.lines[change[0]] = change[1]
                    connection.send((router.forwarded, router.dropped))
            router.hand_over(time.monotonic(), deliver)


def _be_in_time() -> None:
    """Does what it can for lines to be as fast as they were asked for while hosts keep all cores busy."""
    gc.disable()  # which would stop them, and nothing here is in cycles
    with contextlib.suppress(PermissionError):  # root of a container may not
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)


def _take_burst(router: Router, number: int, device: int) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_BURST):
            router.take(number, os.read(device, _LARGEST), time.monotonic())


def _open_device(space: str) -> int:
    with open("/proc/self/ns/net") as home:
        enter(space)
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22s", DEVICE.encode(), _TUN_WITHOUT_HEADER, b""))
        finally:
            move_to(home.fileno())
    return device
