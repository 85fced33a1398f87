"""Network namespaces, each with a link of limited bandwidth to the others: a slow network on one machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000


class NotAllowedError(Exception):
    """This machine lets nobody make namespaces or limit links; says why."""


@dataclass(frozen=True)
class Place:
    """Where one peer lives.

    :param namespace: its name
    :param address: IPv4, under which the other places reach it
    """

    namespace: str
    address: str

    def enter(self) -> None:
        """Move the calling thread there, and all threads and processes that it starts from now on."""
        with open(f"/run/netns/{self.namespace}") as opened:
            if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.namespace)


@contextmanager
def slow_links(count: int, megabits: int) -> Iterator[list[Place]]:
    """So many places around a switch, with so many megabits per second up and down for each. On Linux, for root.

    :raises NotAllowedError: with the reason, if it cannot be done here
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotAllowedError(f"'{tool}' of iproute2 is not installed")
    prefix = f"hivenb{os.getpid()}"
    switch, made = f"{prefix}-s", []
    places = [Place(f"{prefix}-{i}", f"10.77.0.{i + 1}") for i in range(count)]
    limit = f"root tbf rate {megabits}mbit burst 128kb latency 200ms"
    try:
        for name in [switch, *(place.namespace for place in places)]:
            _run(f"ip netns add {name}")
            made.append(name)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for i, place in enumerate(places):
            own = place.namespace
            _run(f"ip -n {own} link add up0 type veth peer name port{i} netns {switch}")
            _run(f"ip -n {own} addr add {place.address}/24 dev up0")
            for device in ("lo", "up0"):
                _run(f"ip -n {own} link set {device} up")
            _run(f"ip -n {switch} link set port{i} master bridge up")
            _run(f"tc -n {own} qdisc add dev up0 {limit}")
            _run(f"tc -n {switch} qdisc add dev port{i} {limit}")
        yield places
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAllowedError(f"'{command}' says: {done.stderr.strip()}")
