"""A network that falls into two halves for a minute, and is whole again: real ones, in network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random

from faults.case import BrokeError, Fault
from faults.field import SETTINGS, SIZE, Field
from namespaces import enter

#: Seconds for which the halves do not see each other.
CUT = 60.0

_NAME = f"hf{os.getpid() % 10000}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _address(number: int) -> str:
    return f"10.77.31.{number + 1}"


@contextmanager
def _network(count: int) -> Iterator[tuple[str, list[str]]]:
    """So many namespaces, the last on a bridge of its own; the link between both bridges, and their names."""
    spaces, bridges, link = [f"{_NAME}n{number}" for number in range(count)], (f"{_NAME}a", f"{_NAME}b"), f"{_NAME}x"
    try:
        for bridge in bridges:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
        _ip("link", "add", link, "type", "veth", "peer", "name", f"{_NAME}y")
        for end, bridge in ((link, bridges[0]), (f"{_NAME}y", bridges[1])):
            _ip("link", "set", end, "master", bridge, "up")
        for number, space in enumerate(spaces):
            outside, bridge = f"{_NAME}v{number}", bridges[number == count - 1]
            _ip("netns", "add", space)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
        yield link, spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        for device in (link, *bridges):
            subprocess.run(["ip", "link", "del", device], capture_output=True)


def _cut_in_halves(field: Field, chance: Random) -> str:
    field.doom(*(own := list(field.peers)))
    for one in own:
        one.tell("stop")
    for one in own:
        one.wait_for_end()
    with _network(SIZE) as (link, spaces):
        for number, space in enumerate(spaces):
            listens = {"host_maddrs": [f"/ip4/{_address(number)}/tcp/0"]}
            field.add(partial(enter, space), strategy={**SETTINGS["strategy"], **listens})
        field.forget_epoch(0)
        field.gather()
        field.note()
        _ip("link", "set", link, "down")
        at = {peer: peer.moments[-1].epoch for peer in field.peers}
        time.sleep(CUT)
        went_on = {peer: peer.moments[-1].epoch - epoch for peer, epoch in at.items()}
        _ip("link", "set", link, "up")
        if min(went_on.values()) < 1:
            raise BrokeError(f"epochs that the peers ended in {CUT:.0f} s on their own: {list(went_on.values())}")
        held = field.check()
        last = list(field.peers)
        field.doom(*last)
        for one in last:
            one.end()
    field.forget_epoch(0)  # whoever comes next begins anew
    return f"on their own for {CUT:.0f} s they ended {list(went_on.values())} epochs; {held}"


def _lacks() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    tried = subprocess.run(["ip", "netns", "add", _NAME], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", _NAME], check=True)
    return None


FAULTS = [
    Fault(
        "network-cut-in-halves",
        "The network falls into two halves for a minute, and is whole again.",
        _cut_in_halves,
        repeats=False,
        seconds=400.0,
        why_not=_lacks,
    )
]
