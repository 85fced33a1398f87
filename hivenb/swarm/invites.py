"""Who is let into a swarm: its invites, how long they are good, who is banned, and whom this peer blocks."""

from __future__ import annotations

import math
import threading
import time
from functools import partial

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.network.access.ban_list_sync import ban_peer
from hivenb.engine.network.access.tokens import Admin, InviteKey, Membership
from hivenb.engine.network.daemon import greet
from hivenb.engine.network.dht import reachable_addresses
from hivenb.engine.network.records import is_peer_id
from hivenb.errors import SwarmError
from hivenb.options.options import DEFAULT_RUN_ID
from hivenb.swarm.invite import encode_invite
from hivenb.swarm.run_names import Runs
from hivenb.swarm.start import RunningDHT

# -- blocking --------------------------------------------------------------------------------------------------------
#
# Peers that a person does not want to hear of any more: blocked in this process, and nowhere else.


class Blocking:
    """Whom one peer has blocked. Any thread may call.

    :param running: the DHT of the peer
    """

    def __init__(self, running: RunningDHT):
        self._running = running
        self._changing = threading.Lock()

    @property
    def blocked(self) -> tuple[str, ...]:
        """See :attr:`hivenb.Swarm.blocked`."""
        dht = self._running.unless_closed
        return () if dht is None else tuple(sorted(PeerID(peer).to_base58() for peer in dht.blocked_peers.all))

    def block(self, peer_id: str) -> None:
        """See :meth:`hivenb.Swarm.block`."""
        self._change(peer_id, is_blocked=True)

    def unblock(self, peer_id: str) -> None:
        """See :meth:`hivenb.Swarm.unblock`."""
        self._change(peer_id, is_blocked=False)
        self._running.require().run_coroutine(partial(greet, PeerID.from_base58(peer_id)), return_future=True)

    def _change(self, peer_id: str, is_blocked: bool) -> None:
        dht = self._running.require()
        if peer_id == dht.peer_id.to_base58():
            raise SwarmError("this peer cannot block itself")
        peer = read_peer_id(peer_id)
        table = dht.blocked_peers
        with self._changing:
            try:
                table.replace(table.all | {peer} if is_blocked else table.all - {peer})
            except ValueError as e:
                raise SwarmError(f"{e}; see swarm.blocked, and swarm.unblock(peer_id)") from e


def read_peer_id(peer_id: str) -> bytes:
    """The id of a peer out of its text.

    :raises SwarmError: if it is none
    """
    try:
        peer = PeerID.from_base58(peer_id).to_bytes()
        is_one = is_peer_id(peer) and PeerID(peer).to_base58() == peer_id
    except Exception:  # hivemind raises errors of several libraries
        is_one = False
    if not is_one:
        raise SwarmError(f"{str(peer_id)[:60]!r} is no peer's id; swarm.peers() tells those of a run")
    return peer


# -- inviting --------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: Hours for which an invite can be good: a hundred years.
MOST_HOURS = 876_600.0

#: Seconds that all it takes to ban a peer may take.
_BANNED_WITHIN = 60.0


class Invites:
    """How others come into the swarm of one peer, and out of it. Any thread may call.

    :param running: the DHT of the peer
    :param runs: of the swarm, of which the newest is the one that others are to join
    """

    def __init__(self, running: RunningDHT, runs: Runs):
        self._running, self._runs = running, runs
        dht = running.require()
        self._peer_id = dht.peer_id.to_base58()
        #: why this peer is let in; ``None`` in a swarm that is open to all
        self.membership: Membership | None = dht.membership
        self._changing = threading.Lock()
        # peers of this machine come by another one than those who were sent the invite, and with which it is revoked
        self._invite_key, self._local_key = self._new_key(), self._new_key()

    def _new_key(self) -> InviteKey | None:
        membership = self.membership
        if membership is None or membership.secret is None:
            return None if membership is None else membership.key  # a guest passes on what it was given
        return Admin(membership.secret).new_invite()

    @property
    def can_ban(self) -> bool:
        """See :attr:`hivenb.Swarm.can_ban`."""
        return self.membership is not None and self.membership.secret is not None

    @property
    def is_let_in(self) -> bool:
        """Whether the others let this peer in, as far as it knows."""
        membership = self.membership
        return membership is None or not (membership.key.has_expired or self._peer_id in self.banned)

    @property
    def invite(self) -> str:
        """See :attr:`hivenb.Swarm.invite`."""
        return self._encode(self._invite_key)

    def invite_for(self, hours: float) -> str:
        """See :meth:`hivenb.Swarm.invite_for`."""
        admin = self._admin("an invite that expires")
        if isinstance(hours, bool) or not isinstance(hours, (int, float)) or not 0 < hours <= MOST_HOURS:
            raise SwarmError(
                f"an invite is good for more than 0 and up to {MOST_HOURS:.0f} hours, and not for {hours!r}"
            )
        return self._encode(admin.new_invite(math.ceil(time.time() + 3600 * hours)))

    def check_ban(self, peer_id: str) -> None:
        """Refuse what :meth:`ban` would.

        :raises SwarmError: if that is no peer's id, or this one's own; if this peer does not know the secret
        """
        self._admin("who is banned")
        if peer_id == self._peer_id:
            raise SwarmError("this peer cannot ban itself; close the swarm instead")
        read_peer_id(peer_id)

    def ban(self, peer_id: str) -> None:
        """See :meth:`hivenb.Swarm.ban`; local peers are left to whoever has them."""
        self.check_ban(peer_id)
        show = partial(ban_peer, read_peer_id(peer_id))
        revoked = self._running.require().run_coroutine(show, return_future=True).result(_BANNED_WITHIN)
        with self._changing:
            self._invite_key = self._new_key()
            if self._local_key is not None and revoked == self._local_key.public:
                self._local_key = self._new_key()
        if not revoked:
            logger.warning(
                f"{peer_id} is banned, but not its invite, which is not known: it has never answered this peer"
            )

    @property
    def banned(self) -> tuple[str, ...]:
        """See :attr:`hivenb.Swarm.banned`."""
        dht = self._running.unless_closed
        ban_list = None if dht is None else dht.ban_list
        return () if ban_list is None else tuple(sorted(PeerID(peer).to_base58() for peer in ban_list.list.banned))

    def way_in(self) -> tuple[str, ...]:
        """What a peer on this machine joins with; it knows the name of its run.

        :raises SwarmError: if the swarm is closed
        """
        return (encode_invite(reachable_addresses(self._running.require()), self._local_key),)

    def _encode(self, key: InviteKey | None) -> str:
        run_id = self._runs.newest_run_id
        addresses = reachable_addresses(self._running.require())
        return encode_invite(addresses, key, None if run_id == DEFAULT_RUN_ID else run_id)

    def _admin(self, what: str) -> Admin:
        membership = self.membership
        if membership is None:
            raise SwarmError(f"this swarm is open to all, and nobody decides {what}; open a private one with Swarm()")
        if membership.secret is None:
            raise SwarmError(f"only the peer that opened the swarm, or knows its secret, decides {what}; ask it to")
        return Admin(membership.secret)
