"""Who is let into a swarm: its invites, how long they are good, and whom its door was shown."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from hivenb.engine.network.access.revocation_sync import show_out
from hivenb.engine.network.access.tokens import Authority, InviteKey, Membership
from hivenb.engine.network.daemon import greet
from hivenb.engine.network.records import is_peer_id
from hivenb.errors import SwarmError
from hivenb.options.options import DEFAULT_RUN_ID
from hivenb.swarm.invite import encode_invite

if TYPE_CHECKING:
    from hivenb.engine.network.dht import DHT
    from hivenb.peers.local_peers import LocalPeers


# -- blocking --------------------------------------------------------------------------------------------------------
#
# Peers that a person does not want to hear of any more: blocked in this process, and nowhere else.


class BlocksPeers:
    """Base of a swarm."""

    peer_id: str
    _lock: threading.RLock
    _dht: DHT | None

    if TYPE_CHECKING:

        @property
        def dht(self) -> DHT:
            """The running DHT."""

    @property
    def blocked(self) -> tuple[str, ...]:
        """Ids of the peers that this one has blocked; none after the swarm is closed."""
        dht = self._dht
        return () if dht is None else tuple(sorted(PeerID(peer).to_base58() for peer in dht.blocked_peers.all))

    def block(self, peer_id: str) -> None:
        """Answer nothing to a peer any more, ask it for nothing, and wait for it in no round.

        For this peer alone: the others, those on this machine too, go on as before. It holds until :meth:`unblock`, or
        the swarm is closed.

        :param peer_id: as ``swarm.peers()`` tells it
        :raises SwarmError: if that is no peer's id, or this one's own; if too many are blocked; if the swarm is closed
        """
        self._change_blocked(peer_id, is_blocked=True)

    def unblock(self, peer_id: str) -> None:
        """Talk to a peer again; without effect if it is not blocked.

        :param peer_id: as :attr:`blocked` tells it
        :raises SwarmError: if that is no peer's id; if the swarm is closed
        """
        self._change_blocked(peer_id, is_blocked=False)
        self.dht.run_coroutine(partial(greet, PeerID.from_base58(peer_id)), return_future=True)

    def _change_blocked(self, peer_id: str, is_blocked: bool) -> None:
        if peer_id == self.peer_id:
            raise SwarmError("this peer cannot block itself")
        peer = read_peer_id(peer_id)
        table = self.dht.blocked_peers
        with self._lock:
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

#: Seconds that all it takes to show a peer the door may take.
_SHOWN_WITHIN = 60.0


class Invites:
    """Base of a swarm."""

    peer_id: str
    _lock: threading.RLock
    _dht: DHT | None
    _local_peers: LocalPeers | None

    if TYPE_CHECKING:

        @property
        def dht(self) -> DHT:
            """The running DHT."""

        @property
        def newest_run_id(self) -> str:
            """The name of the run that others are to join."""

        @property
        def addresses(self) -> tuple[str, ...]:
            """At which others can reach this peer."""

    def _become_member(self, membership: Membership | None) -> None:
        """Note why this peer is let in; called once."""
        self._membership = membership
        # peers of this machine come by another one than those who were sent the invite, and with which it is revoked
        self._invite_key, self._local_key = self._new_key(), self._new_key()

    def _new_key(self) -> InviteKey | None:
        membership = self._membership
        if membership is None or membership.secret is None:
            return None if membership is None else membership.key  # a guest passes on what it was given
        return Authority(membership.secret).new_invite()

    @property
    def is_private(self) -> bool:
        """Whether only those can join who have the invite, or the secret."""
        return self._membership is not None

    @property
    def who_can_join(self) -> str:
        """The same in words: ``"invited only"`` or ``"anybody can join"``."""
        return "invited only" if self.is_private else "anybody can join"

    @property
    def can_show_the_door(self) -> bool:
        """Whether this peer knows the secret, as who opened a private swarm does, and can put others out."""
        return self._membership is not None and self._membership.secret is not None

    @property
    def invite(self) -> str:
        """One word to give to others, for :meth:`join` or ``hivenb join``. Whoever reads it can join, too.

        It holds the addresses, the name of the newest run that trains, or will, and, of a private swarm, a key that its
        authority has signed.
        It is good until the swarm is closed; that of a peer that was invited itself, for as long as the one it came by.
        After :meth:`show_the_door` it is another one, and for the peer that was put out the old one is good no more.
        """
        return self._encode(self._invite_key)

    def invite_for(self, hours: float) -> str:
        """An invite that expires: all who came by it are out then.

        :param hours: for how long it is good, from now on
        :raises SwarmError: if that is no such time, if the swarm is open to all, or if this peer does not know its
          secret, as one that was invited itself
        """
        authority = self._authority("an invite that expires")
        if isinstance(hours, bool) or not isinstance(hours, (int, float)) or not 0 < hours <= MOST_HOURS:
            raise SwarmError(
                f"an invite is good for more than 0 and up to {MOST_HOURS:.0f} hours, and not for {hours!r}"
            )
        return self._encode(authority.new_invite(math.ceil(time.time() + 3600 * hours)))

    def show_the_door(self, peer_id: str) -> None:
        """Put a peer out of the swarm, for everybody and for good. Takes some seconds until all know.

        Nobody comes in by its invite any more, under whatever id, and :attr:`invite` is another one from now on. Those
        of whom this peer has heard that came by the same invite stay. A peer on this machine is not started again.

        :param peer_id: as ``swarm.peers()`` tells it
        :raises SwarmError: if that is no peer's id, or this one's own; if this peer does not know the secret of the
          swarm, as one that was invited itself; if too many are out; if the swarm is closed
        """
        self._authority("who is out")
        if peer_id == self.peer_id:
            raise SwarmError("this peer cannot show itself the door; close the swarm instead")
        peer = read_peer_id(peer_id)
        if self._local_peers is not None:
            self._local_peers.leave_dead(peer_id)  # before it has died of it
        future = self.dht.run_coroutine(partial(show_out, peer), return_future=True)
        revoked = future.result(_SHOWN_WITHIN)
        with self._lock:
            self._invite_key = self._new_key()
            if self._local_key is not None and revoked == self._local_key.public:
                self._local_key = self._new_key()
        self.end_local_peers_put_out()
        if not revoked:
            logger.warning(f"{peer_id} is out, but not its invite, which is not known: it has never answered this peer")

    def end_local_peers_put_out(self) -> None:
        """Let peers on this machine end that were shown the door, here or by another authority. Returns at once."""
        if self._local_peers is not None and (out := self.shown_the_door):
            self._local_peers.put_out(out)

    @property
    def shown_the_door(self) -> tuple[str, ...]:
        """Ids of the peers that are out; none after the swarm is closed."""
        dht = self._dht
        door = None if dht is None else dht.door
        return () if door is None else tuple(sorted(PeerID(peer).to_base58() for peer in door.list.out))

    def _way_in(self) -> tuple[str, ...]:
        """What a peer on this machine joins with; it knows the name of its run."""
        return (encode_invite(self.addresses, self._local_key),)

    def _encode(self, key: InviteKey | None) -> str:
        run_id = self.newest_run_id
        return encode_invite(self.addresses, key, None if run_id == DEFAULT_RUN_ID else run_id)

    def _authority(self, what: str) -> Authority:
        membership = self._membership
        if membership is None:
            raise SwarmError(f"this swarm is open to all, and nobody decides {what}; open a private one with Swarm()")
        if membership.secret is None:
            raise SwarmError(f"only the peer that opened the swarm, or knows its secret, decides {what}; ask it to")
        return Authority(membership.secret)
