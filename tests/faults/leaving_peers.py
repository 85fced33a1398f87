"""Peers that leave, until one is alone, or nobody is there."""

from __future__ import annotations

import time
from random import Random

from faults.case import BrokeError, Fault
from faults.field import Field, check_checkpoint
from strategy.peers import Peer


def _leave(field: Field, *peers: Peer) -> None:
    field.doom(*peers)
    for one in peers:
        one.tell("stop")
    for one in peers:
        one.wait_for_end()


def _founder_leaves(field: Field, chance: Random) -> str:
    field.note()
    time.sleep(chance.uniform(0.0, 2.0))
    peer = field.peers[0]
    _leave(field, peer)
    return f"peer {field.number(peer)} has left"


def _all_but_one(field: Field, chance: Random) -> str:
    field.note()
    stays = chance.choice(field.peers)
    _leave(field, *(peer for peer in field.peers if peer is not stays))
    at = stays.moments[-1].epoch
    stays.wait_for_epoch(at + 2, group_size=1)
    return f"peer {field.number(stays)} went on alone"


def _all_leave(field: Field, chance: Random) -> str:
    field.note()
    returning = chance.choice(field.peers)
    path = f"{field.folder}/{field.number(returning)}.ckpt"
    _leave(field, *field.peers)
    check_checkpoint(path)
    saved = returning.ends[-1][0]
    peer = field.add(resume=path)
    first = peer.begun().epoch  # it has the checkpoint by then
    if first < saved - FRESH:
        raise BrokeError(f"it returned at epoch {first}, and the swarm had ended {saved}")
    field.forget_epoch(first)
    peer.wait_for_epoch(first + 2)
    return f"one returned at epoch {first} of {saved}"


#: Epochs that a checkpoint may be old: one is saved after each pass over the data, of 32 batches.
FRESH = 12

FAULTS = [
    Fault("founder-leaves", "The peer that began the swarm leaves.", _founder_leaves),
    Fault("all-but-one-leave", "One peer is left alone, and others come later.", _all_but_one),
    Fault("all-leave", "All leave, and one returns from its checkpoint.", _all_leave),
]
