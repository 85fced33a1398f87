"""Those who had an invite once: it has expired, or they were banned, and come back under another id."""

from __future__ import annotations

import time

from attacks.case import Attack, Outcome
from attacks.strangers import RUN_ID, TRIES, victim
from tiny import LOOPBACK

import hivenb
from hivenb.engine.network.access.guard import Guard
from hivenb.engine.network.dht import DHT
from hivenb.swarm.invite import read_invite


def without_a_second_look() -> None:
    """Whoever has a credential is let in, whatever has become of it."""
    Guard._why_excluded = lambda self, peer_id, known: None  # type: ignore[method-assign]


def _records_read(invite: str) -> int:
    """How many records of the run somebody reads who comes by an invite."""
    read = read_invite(invite)
    peers, end = list(read.addresses), time.monotonic() + TRIES
    own = DHT(initial_peers=peers, ensure_bootstrap_success=False, secret=read.key, start=True, **LOOPBACK)
    try:
        while time.monotonic() < end:
            if (found := own.get(f"{RUN_ID}_progress", latest=True)) is not None:
                return len(found.value)
    finally:
        own.shutdown()
    return 0


def come_by_an_expired_invite() -> Outcome:
    """Wait until it has expired, and read who trains."""
    with victim() as run:
        invite = run.swarm.invite_for(hours=0.5 / 3600)
        time.sleep(2.0)
        read = _records_read(invite)
    return Outcome(not read, f"{read} records read")


def come_back() -> Outcome:
    """Be banned, and read who trains, under a new id."""
    with victim() as run:
        invite = run.swarm.invite
        with hivenb.Swarm.join(invite, "banned") as banned:
            run.swarm.ban(banned.peer_id)
        read = _records_read(invite)
    return Outcome(not read, f"{read} records read")


ATTACKS = [
    Attack(
        "expired-invite-leads-in",
        "somebody whose invite has expired reads the records of a run",
        without_a_second_look,
        come_by_an_expired_invite,
    ),
    Attack(
        "banned-peer-comes-back",
        "somebody who was banned comes back by the same invite, under another id",
        without_a_second_look,
        come_back,
    ),
]
