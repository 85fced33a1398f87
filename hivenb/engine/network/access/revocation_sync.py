"""In the DHT's process: keeps up with who was shown the door, passes it on, and shows a peer out.

The list is a record of the DHT, under its version: an older one takes the place of none, and every member renews the
newest, so that it stands for as long as anybody is there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time, get_logger

from hivenb.engine.network.access.guard import Guard
from hivenb.engine.network.access.revocations import Door, read_door_list
from hivenb.engine.network.access.tokens import Authority, Membership, Pass
from hivenb.engine.network.values import BoundedSerializer
from hivenb.errors import SwarmError

logger = get_logger(__name__)

#: Under which key the list stands, and as it travels.
DOOR_KEY = "hivenb_door"
DOOR_KEY_ID: bytes = DHTID.generate(DOOR_KEY).to_bytes()

#: Seconds from one look at the list to the next; for which it stands; and that are left when it is renewed.
LOOK_EVERY, STANDS_FOR, RENEWED_BEFORE = 3.0, 300.0, 120.0

#: Seconds that a peer is given to show its pass, and that a newcomer waits for the list before it talks to others.
ANSWERS_WITHIN, WAITS_AT_START = 5.0, 3.0


class DoorRecords(RecordValidatorBase):
    """Lets nothing stand under the key of the list but what the swarm's authority has signed.

    :param authority: its public key
    """

    def __init__(self, authority: bytes):
        self._authority = authority

    def validate(self, record: DHTRecord) -> bool:
        if record.key != DOOR_KEY_ID:
            return True
        try:
            version, signed = BoundedSerializer.loads(record.subkey), BoundedSerializer.loads(record.value)
        except (ValueError, TypeError, RecursionError):
            return False
        made = read_door_list(signed, self._authority)
        return made is not None and made.version == version

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, DoorRecords)


async def keep_door(door: Door, node: DHTNode) -> None:
    """Look for a newer list, and renew the newest one, for as long as the DHT runs."""
    while True:
        try:
            await look(door, node)
        except Exception as e:  # of several libraries; the next look may find it
            logger.debug(f"Who was shown the door could not be looked up: {e!r}")
        await asyncio.sleep(LOOK_EVERY)


async def look(door: Door, node: DHTNode) -> None:
    """Look for a newer list once, and renew the newest one if nobody else has."""
    found: Any = await node.get(DOOR_KEY, latest=True)
    records = found.value if found is not None and isinstance(found.value, dict) else {}
    for record in records.values():
        if isinstance(record, ValueWithExpiration):
            door.take(record.value)
    newest = records.get(door.list.version)
    if door.signed and (newest is None or newest.expiration_time < get_dht_time() + RENEWED_BEFORE):
        await _publish(door, node)


async def _publish(door: Door, node: DHTNode) -> None:
    expires = get_dht_time() + STANDS_FOR
    await node.store(DOOR_KEY, door.signed, expiration_time=expires, subkey=door.list.version)


async def show_out(peer_id: bytes, dht: hivemind.DHT, node: DHTNode) -> bytes:
    """Put a peer out for everybody, with its invite, but not those that came by the same one.

    :param peer_id: of it
    :param dht: of a peer that knows the swarm's secret
    :param node: its node
    :returns: the public key of its invite; empty if that is not known, as of a peer that has never answered
    :raises SwarmError: if this peer does not know the secret, or no more peers can be put out
    """
    membership: Membership | None = getattr(dht, "membership", None)
    guard: Guard | None = getattr(node.p2p, "guard", None)
    if membership is None or membership.secret is None or guard is None:
        raise SwarmError("only who knows the swarm's secret can show a peer the door")
    door: Door = dht.door
    await look(door, node)  # another who knows the secret may have shown one out
    shown = await _passes_of(peer_id, guard, node)
    own = shown.get(peer_id)
    staying = {one for one, other in shown.items() if own is not None and other.key == own.key}
    try:
        signed = door.list.with_out(peer_id, own, staying).sign(Authority(membership.secret))
    except ValueError as e:
        raise SwarmError(f"{e}; open the swarm anew, with another secret, to put out all but those you invite") from e
    door.take(signed)
    await _publish(door, node)
    return b"" if own is None else own.key


async def _passes_of(peer_id: bytes, guard: Guard, node: DHTNode) -> dict[bytes, Pass]:
    """The passes of all whom this node knows; those that it has not seen it asks for."""
    known = {PeerID(peer_id), *node.protocol.routing_table.peer_id_to_uid}
    unseen = [peer for peer in known if peer.to_bytes() not in guard.seen]
    pings = (asyncio.wait_for(node.protocol.call_ping(peer), ANSWERS_WITHIN) for peer in unseen)
    await asyncio.gather(*pings, return_exceptions=True)
    return dict(guard.seen)
