"""In the DHT's process: keeps up with who is banned, passes it on, and bans a peer.

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

from hivenb.engine.network.access.ban_list import SharedBanList, read_ban_list
from hivenb.engine.network.access.guard import Guard
from hivenb.engine.network.access.tokens import Admin, Credential, Membership
from hivenb.engine.network.untrusted_values import BoundedSerializer
from hivenb.errors import SwarmError

logger = get_logger(__name__)

#: Under which key the list stands, and as it travels.
BAN_LIST_KEY = "hivenb_ban_list"
BAN_LIST_KEY_ID: bytes = DHTID.generate(BAN_LIST_KEY).to_bytes()

#: Seconds from one look at the list to the next; for which it stands; and that are left when it is renewed.
LOOK_EVERY, STANDS_FOR, RENEWED_BEFORE = 3.0, 300.0, 120.0

#: Seconds that a peer is given to show its credential, and that a newcomer waits for the list before it talks to
#: others.
ANSWERS_WITHIN, WAITS_AT_START = 5.0, 3.0


class BanListRecords(RecordValidatorBase):
    """Lets nothing stand under the key of the list but what the swarm's admin has signed.

    :param admin: its public key
    """

    def __init__(self, admin: bytes):
        self._admin = admin

    def validate(self, record: DHTRecord) -> bool:
        if record.key != BAN_LIST_KEY_ID:
            return True
        try:
            version, signed = BoundedSerializer.loads(record.subkey), BoundedSerializer.loads(record.value)
        except (ValueError, TypeError, RecursionError):
            return False
        made = read_ban_list(signed, self._admin)
        return made is not None and made.version == version

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, BanListRecords)


async def keep_ban_list(ban_list: SharedBanList, node: DHTNode) -> None:
    """Look for a newer list, and renew the newest one, for as long as the DHT runs."""
    while True:
        try:
            await look(ban_list, node)
        except Exception as e:  # of several libraries; the next look may find it
            logger.debug(f"Who is banned could not be looked up: {e!r}")
        await asyncio.sleep(LOOK_EVERY)


async def look(ban_list: SharedBanList, node: DHTNode) -> None:
    """Look for a newer list once, and renew the newest one if nobody else has."""
    found: Any = await node.get(BAN_LIST_KEY, latest=True)
    records = found.value if found is not None and isinstance(found.value, dict) else {}
    for record in records.values():
        if isinstance(record, ValueWithExpiration):
            ban_list.take(record.value)
    newest = records.get(ban_list.list.version)
    if ban_list.signed and (newest is None or newest.expiration_time < get_dht_time() + RENEWED_BEFORE):
        await _publish(ban_list, node)


async def _publish(ban_list: SharedBanList, node: DHTNode) -> None:
    expires = get_dht_time() + STANDS_FOR
    await node.store(BAN_LIST_KEY, ban_list.signed, expiration_time=expires, subkey=ban_list.list.version)


async def ban_peer(peer_id: bytes, dht: hivemind.DHT, node: DHTNode) -> bytes:
    """Ban a peer for everybody, with its invite, but not those that came by the same one.

    :param peer_id: of it
    :param dht: of a peer that knows the swarm's secret
    :param node: its node
    :returns: the public key of its invite; empty if that is not known, as of a peer that has never answered
    :raises SwarmError: if this peer does not know the secret, or no more peers can be banned
    """
    membership: Membership | None = getattr(dht, "membership", None)
    guard: Guard | None = getattr(node.p2p, "guard", None)
    if membership is None or membership.secret is None or guard is None:
        raise SwarmError("only who knows the swarm's secret can ban a peer")
    ban_list: SharedBanList = dht.ban_list
    await look(ban_list, node)  # another who knows the secret may have banned one
    shown = await _credentials_of(peer_id, guard, node)
    own = shown.get(peer_id)
    staying = {one for one, other in shown.items() if own is not None and other.key == own.key}
    try:
        signed = ban_list.list.with_banned(peer_id, own, staying).sign(Admin(membership.secret))
    except ValueError as e:
        raise SwarmError(f"{e}; open the swarm anew, with another secret, to ban all but those you invite") from e
    ban_list.take(signed)
    await _publish(ban_list, node)
    return b"" if own is None else own.key


async def _credentials_of(peer_id: bytes, guard: Guard, node: DHTNode) -> dict[bytes, Credential]:
    """The credentials of all whom this node knows; those that it has not seen it asks for."""
    known = {PeerID(peer_id), *node.protocol.routing_table.peer_id_to_uid}
    unseen = [peer for peer in known if peer.to_bytes() not in guard.seen]
    pings = (asyncio.wait_for(node.protocol.call_ping(peer), ANSWERS_WITHIN) for peer in unseen)
    await asyncio.gather(*pings, return_exceptions=True)
    return dict(guard.seen)
