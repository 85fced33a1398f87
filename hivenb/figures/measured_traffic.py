"""Bytes that a peer's libp2p daemon exchanges with other peers, as the kernel has counted them.

All traffic of a peer, that of its DHT and of its averagers, goes through one daemon. The kernel keeps counters for
each TCP connection (``bytes_acked`` and ``bytes_received`` of ``tcp_info``), which any process may read by netlink:
exactly what a network carries above TCP, encryption and matchmaking included. QUIC goes over UDP, which has no such
counters. For a daemon that uses UDP, what counts is what the peer's processes hand to it and get from it, unless TCP
has carried more: a little less than what is on the wire, by 0.1 % in a large round, and a few kB of orders to the
daemon more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from hivenb.figures.history import Series
from hivenb.system.process_tree import still_runs

_DAEMON = "p2pd"

# from <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>; Python's socket module does not have them
_AF_NETLINK = 16
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _INET_DIAG_INFO = 4, 20, 0x301, 2
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, any socket
_COOKIE, _INODE, _ATTRIBUTES = 44, 68, 72  # places in struct inet_diag_msg
_ACKED = 120  # place in struct tcp_info; bytes_received follows
_COUNTERS = struct.Struct("=QQ")
_LISTENING, _TIME_WAIT = 10, 6
_STATES = 0xFFF & ~(1 << _LISTENING | 1 << _TIME_WAIT)  # neither has counters


@dataclass(frozen=True)
class Bytes:
    """Bytes sent to other peers and received from them."""

    sent: int
    received: int

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent - other.sent, self.received - other.received)


class Traffic:
    """Counts what a peer's daemon has exchanged with other peers since this was made.

    Look at least every few seconds: what a connection carries between the last look and its end is not counted.

    :param dht_pid: id of the process of the DHT, which has started the daemon
    """

    def __init__(self, dht_pid: int | None):
        self.dht_pid = dht_pid
        self._daemon = None if dht_pid is None else _daemon_of(dht_pid)
        self._connections: dict[int, Bytes] = {}
        self._closed = Bytes(0, 0)
        self._uses_udp = False
        self._begin = self._look()
        self._so_far = Bytes(0, 0)

    def read(self) -> Bytes | None:
        """Bytes so far; ``None`` where they cannot be known: no daemon of its own, or a kernel that does not tell."""
        now = self._look()
        if now is None or self._begin is None:
            return None
        over_tcp, handled = (after - before for after, before in zip(now, self._begin, strict=True))
        if not self._uses_udp:
            return over_tcp
        # The daemon reads by system calls what has come by TCP and what its peer's processes send, and writes likewise.
        # The two sources are not read at the same instant, so that a total could come out a little less than before.
        self._so_far = Bytes(
            max(over_tcp.sent, handled.received - over_tcp.received, self._so_far.sent),
            max(over_tcp.received, handled.sent - over_tcp.sent, self._so_far.received),
        )
        return self._so_far

    def _look(self) -> tuple[Bytes, Bytes] | None:
        """What the daemon has exchanged over TCP, and by system calls."""
        if self._daemon is None:
            return None
        try:
            handled = self._daemon.io_counters()  # first: what TCP carries meanwhile must not look like QUIC's
            return self._over_tcp(self._daemon.pid), Bytes(handled.write_chars, handled.read_chars)
        except (OSError, psutil.Error):
            return None

    def _over_tcp(self, pid: int) -> Bytes:
        own = _socket_inodes(pid)
        self._uses_udp = self._uses_udp or not own.isdisjoint(_udp_inodes(pid))
        seen = {
            cookie: count
            for cookie, inode, count in _connections()
            # one that is being closed has no inode any more
            if inode in own or cookie in self._connections
        }
        for cookie, last in self._connections.items():
            if cookie not in seen:
                self._closed += last
        self._connections = seen
        return sum(seen.values(), self._closed)


def per_epoch(series: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How much a growing total such as ``bytes_sent`` has grown from one epoch to the next.

    Where a point stands for several epochs, or epochs went by unseen, each gets the same share.

    :returns: time, epoch that began then, and growth since the one before began, as arrays of equal length
    """
    first = np.flatnonzero(np.diff(series.epochs)) + 1  # what is before may have begun at any time
    # the total grows, so that the highest of the values that a point stands for is the last one
    epochs, totals, times = series.epochs[first], series.highs[first], series.times[first]
    steps, growth = np.diff(epochs), np.diff(totals)
    known = (steps > 0) & (growth >= 0)  # else a new run has begun
    return times[1:][known], epochs[1:][known], growth[known] / steps[known]


def per_second(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """How much a growing total such as ``bytes_sent`` has grown in each second.

    :returns: time and growth per second between each point and the one before
    """
    seconds, growth = np.diff(series.times), np.diff(series.highs)
    known = (seconds > 0) & (growth >= 0)
    return series.times[1:][known], growth[known] / seconds[known]


def _daemon_of(dht_pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(dht_pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by now
                if process.name() == _DAEMON and still_runs(process):
                    return process
    return None


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                target = os.readlink(entry.path)
            except FileNotFoundError:  # closed by now
                continue
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def _udp_inodes(pid: int) -> set[int]:
    """Those of all UDP sockets that the process could have."""
    inodes = set()
    for name in ("udp", "udp6"):
        table = Path(f"/proc/{pid}/net/{name}")
        if table.exists():
            inodes |= {int(line.split()[9]) for line in table.read_text().splitlines()[1:]}
    return inodes


def _connections() -> Iterator[tuple[int, int, Bytes]]:
    """Cookie (which is never used again), inode and counters of each TCP connection of this machine."""
    with socket.socket(_AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            for message in _asked(kernel, family):
                (cookie,) = struct.unpack_from("=Q", message, _COOKIE)
                (inode,) = struct.unpack_from("=I", message, _INODE)
                counters = _counters(message)
                if counters is not None:
                    yield cookie, inode, counters


def _asked(kernel: socket.socket, family: int) -> Iterator[bytes]:
    """What the kernel tells of each TCP socket of a family."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _STATES)
    kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
    while True:
        data = kernel.recv(1 << 17)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind == _ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise OSError(code, os.strerror(code))
            if kind == _DONE:
                return
            if kind == _SOCK_DIAG_BY_FAMILY:
                yield data[_HEADER.size : length]
            data = data[(length + 3) & ~3 :]


def _counters(message: bytes) -> Bytes | None:
    at = _ATTRIBUTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and length >= 4 + _ACKED + _COUNTERS.size:
            return Bytes(*_COUNTERS.unpack_from(message, at + 4 + _ACKED))
        at += max(4, (length + 3) & ~3)
    return None  # of a connection that is nearly closed, little is left
