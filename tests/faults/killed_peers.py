"""Peers that are killed in the middle of their work, stopped for a while, or interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from random import Random

from faults.case import Fault
from faults.field import Field
from faults.trapped_peer import ANYBODY, MOMENTS
from strategy.peers import kill, processes


def _kill_while(moment: str) -> Callable[[Field, Random], str]:
    def inject(field: Field, chance: Random) -> str:
        field.note()
        time.sleep(chance.uniform(0.0, 1.0))
        if moment == "downloading":
            field.trap(field.next_number, moment)
        elif moment == "serving":
            field.trap(ANYBODY, moment)
        else:
            field.trap(field.number(chance.choice(field.peers)), moment)
        if moment in ("downloading", "serving"):
            field.add()
        return f"peer {field.number(field.wait_for_death())} has died"

    return inject


def _power_cut(field: Field, chance: Random) -> str:
    field.note()
    time.sleep(chance.uniform(0.0, 2.0))
    peer = chance.choice(field.peers)
    field.doom(peer)
    kill(peer, whole_tree=True)
    return f"peer {field.number(peer)} and all its processes"


def _stop_and_go_on(field: Field, chance: Random) -> str:
    field.note()
    time.sleep(chance.uniform(0.0, 2.0))
    peer, seconds = chance.choice(field.peers), chance.uniform(0.5, 8.0)
    stopped = processes(peer)
    for one in stopped:
        os.kill(one.pid, signal.SIGSTOP)
    time.sleep(seconds)
    for one in stopped:
        os.kill(one.pid, signal.SIGCONT)
    return f"peer {field.number(peer)} for {seconds:.1f} s"


def _interrupt(field: Field, chance: Random) -> str:
    field.note()
    time.sleep(chance.uniform(0.0, 2.0))
    peer = chance.choice(field.peers)
    group = os.getpgid(peer.process.pid)
    for one in processes(peer):  # as a terminal or a kernel does: all of the group
        if os.getpgid(one.pid) == group:
            os.kill(one.pid, signal.SIGINT)
    peer = field.wait_for_death()
    return f"peer {field.number(peer)} has ended with {peer.process.exitcode}"


FAULTS = [
    *(Fault(f"killed-{moment}", f"A peer is killed while {moment}.", _kill_while(moment)) for moment in MOMENTS),
    Fault("power-cut", "A peer and all its processes are killed at once, at any moment.", _power_cut),
    Fault("stopped", "All processes of a peer are stopped for seconds, and go on.", _stop_and_go_on),
    Fault("interrupted", "A peer is interrupted, as with Ctrl-C, at any moment.", _interrupt),
]
