"""Hosts in network namespaces of their own, joined by a router: an internet of one machine, which nothing leaves."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
from namespaces import enter

from network.line import Line
from network.router import DEVICE, HOME, Router, route

#: Seconds within which the router answers.
_PATIENCE = 30.0

#: Bytes, as over a tunnel or a mobile line; what is larger is cut into pieces by whoever sends it.
LARGEST_PACKET = 1400

#: By which TCP sends, of the namespace of whoever reads or writes it.
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"

#: Where network namespaces have their names, and which of them are hosts of ours, with the process that made them.
_NAMES, _OF_A_PROCESS = "/run/netns", re.compile(r"hn(\d+)-")

_numbers = itertools.count(1)


class Internet:
    """So many hosts as lines are given. A context manager; root is needed.

    :param lines: of the hosts
    :param seed: of what gets lost and how late packets are
    :param largest_packet: in bytes; with large ones the router, which takes each by itself, carries several hundred
      megabits a second at less of a core
    :param congestion_control: by which TCP sends, one of :func:`congestion_controls`; else that of this machine
    """

    def __init__(
        self,
        lines: Sequence[Line],
        seed: int = 0,
        largest_packet: int = LARGEST_PACKET,
        congestion_control: str | None = None,
    ) -> None:
        self.lines = list(lines)
        self._seed, self._largest_packet, self._congestion_control = seed, largest_packet, congestion_control
        own = f"hn{os.getpid()}-{next(_numbers)}"
        self._spaces = [f"{own}-{number}" for number in range(len(self.lines))]
        self._router: BaseProcess | None = None

    def __enter__(self) -> Internet:
        _remove_left_behind()
        try:
            for space in self._spaces:
                _ip("netns", "add", space)
                if self._congestion_control is not None:
                    _ip("netns", "exec", space, "sh", "-c", f"echo {self._congestion_control} > {_CONTROL}")
            self._connection, theirs = mp.Pipe()
            router = Router([self.address(number) for number in range(len(self.lines))], self.lines, self._seed)
            self._router = forked.start(route, theirs, self._spaces, router)
            theirs.close()
            self._hear()
            for number, space in enumerate(self._spaces):
                own = f"{HOME}/24" if self.lines[number].is_translated else f"{self.address(number)}/16"
                _ip("-n", space, "addr", "add", own, "dev", DEVICE)
                _ip("-n", space, "link", "set", DEVICE, "mtu", str(self._largest_packet), "txqueuelen", "2000", "up")
                _ip("-n", space, "link", "set", "lo", "up")
                if self.lines[number].is_translated:
                    _ip("-n", space, "route", "add", "default", "dev", DEVICE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._router is not None:
            self._connection.close()
            self._router.join(_PATIENCE)
            self._router.kill()
            self._router.join()
        _remove(self._spaces)

    def address(self, host: int) -> str:
        """Where the others find a host, if they do: IPv4, as it is in the real internet, since libp2p looks at that."""
        return f"51.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def enter_as(self, host: int) -> partial[None]:
        """What moves the process that calls it to a host; it can be pickled."""
        return partial(enter, self._spaces[host])

    def popen(self, host: int, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start a program on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self._spaces[host], *command], **kwargs)

    def change(self, host: int, **changes: object) -> None:
        """Let a host's line be another one from now on.

        :param changes: fields of :class:`network.line.Line`
        """
        self.lines[host] |= changes
        self._connection.send((host, self.lines[host]))
        self._hear()

    def bytes_sent(self, host: int) -> int:
        """What a host has put on its line so far, with the headers of IP, whether it got through or not."""
        (device,) = json.loads(_ip("-n", self._spaces[host], "-j", "-s", "link", "show", "dev", DEVICE))
        return int(device["stats64"]["tx"]["bytes"])

    @property
    def packets(self) -> tuple[int, int]:
        """How many were forwarded, and how many dropped."""
        self._connection.send(None)
        return self._hear()

    def _hear(self) -> tuple[int, int]:
        if not self._connection.poll(_PATIENCE):
            raise TimeoutError("the router does not answer")
        told: tuple[int, int] = self._connection.recv()
        return told


def congestion_controls() -> list[str]:
    """By which TCP may send here."""
    return Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def why_not() -> str | None:
    """Why there can be no such internet on this machine; ``None`` if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "there are no TUN devices here"
    try:
        with Internet([Line(), Line()]):
            return None
    except (OSError, EOFError, subprocess.CalledProcessError) as e:
        return f"no hosts can be made here: {getattr(e, 'stderr', None) or e}"


def _remove_left_behind() -> None:
    """Remove the hosts of processes that were ended by a signal before they could."""
    if not os.path.isdir(_NAMES):
        return
    owners = {name: _OF_A_PROCESS.match(name) for name in os.listdir(_NAMES)}
    _remove(name for name, owner in owners.items() if owner and not os.path.exists(f"/proc/{owner[1]}"))


def _remove(spaces: Iterable[str]) -> None:
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
