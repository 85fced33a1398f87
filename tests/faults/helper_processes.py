"""The helper processes of a peer, each killed alone: it has to go on by itself, with the same others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from random import Random

import psutil
from faults.case import BrokeError, Fault
from faults.field import Field
from faults.trapped_peer import LOCKED, trap
from strategy.peers import Peer

#: What a helper is known by in its command line; those without are forked, and look like their parent.
_COMMANDS = {"p2pd": "p2pd", "shm-manager": "torch_shm_manager"}

#: Seconds after which a helper that was killed has a successor.
_STARTED_ANEW_WITHIN = 60.0


def _helpers(peer: Peer) -> dict[str, list[psutil.Process]]:
    """The helper processes of a peer, by what they are; averagers in the order in which they were started."""
    found: dict[str, list[psutil.Process]] = {"averager": []}
    for child in psutil.Process(peer.process.pid).children():
        command, below = " ".join(child.cmdline()), child.children()
        known = next((name for name, part in _COMMANDS.items() if part in command), None)
        daemon = next((one for one in below if "p2pd" in " ".join(one.cmdline())), None)
        if daemon is not None:
            found |= {"dht": [child], "p2pd": [daemon]}
        else:
            found.setdefault(known or "averager", []).append(child)
    return found


def _kill(name: str, which: int = 0) -> Callable[[Field, Random], str]:
    def inject(field: Field, chance: Random) -> str:
        field.note()
        time.sleep(chance.uniform(0.0, 2.0))
        peer = chance.choice(field.peers)
        end = time.monotonic() + _STARTED_ANEW_WITHIN
        while len(found := _helpers(peer).get(name, [])) <= which:  # it is just being started anew, after another fault
            if time.monotonic() > end:
                raise BrokeError(f"peer {field.number(peer)} has no such process")
            time.sleep(0.1)
        os.kill(found[which].pid, signal.SIGKILL)
        return f"of peer {field.number(peer)}"

    return inject


def _kill_shm_manager(field: Field, chance: Random) -> str:
    killed = _kill("shm-manager")(field, chance)
    # torch ends a process that finds it gone (std::terminate), and nothing in Python can prevent that
    dead = field.number(field.wait_for_death())
    return f"{killed}, which torch has ended: peer {dead}"


def _kill_tracker(field: Field, chance: Random) -> str:
    field.note()
    time.sleep(chance.uniform(0.0, 2.0))
    pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    if pid is None:
        raise BrokeError("there is no such process")
    os.kill(pid, signal.SIGKILL)
    return "of all peers, which are forked from one server"


def _die_with_a_lock(field: Field, chance: Random) -> str:
    field.note()
    peer = chance.choice(field.peers)
    path = trap(field.folder, field.number(peer), LOCKED)
    path.touch()
    end = time.monotonic() + 60.0
    while path.exists():
        if time.monotonic() > end:
            raise BrokeError("no averager has come to that moment")
        time.sleep(0.02)
    return f"of peer {field.number(peer)}"


FAULTS = [
    Fault("dht-killed", "The process of a peer's DHT is killed.", _kill("dht")),
    Fault("p2pd-killed", "The daemon of a peer is killed, through which it talks to all others.", _kill("p2pd")),
    Fault("state-averager-killed", "A peer's averager of the state is killed.", _kill("averager", 0)),
    Fault("gradient-averager-killed", "A peer's averager of gradients is killed.", _kill("averager", 1)),
    Fault(
        "shm-manager-killed",
        "torch's manager of shared memory is killed, and torch ends that peer: the others go on.",
        _kill_shm_manager,
    ),
    Fault("resource-tracker-killed", "multiprocessing's tracker of resources is killed.", _kill_tracker),
    Fault(
        "killed-with-a-lock",
        "An averager is killed, as when memory runs out, with a lock that all processes of that peer share.",
        _die_with_a_lock,
    ),
]
