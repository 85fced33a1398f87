"""Whom a peer of a private swarm talks to: those who show a good credential, and are not banned.

Each request and each stream begins with the caller's credential (:mod:`hivenb.engine.network.access.tokens`), and what
comes back with that of the callee.
"""

from __future__ import annotations

import ctypes
import time
from multiprocessing.sharedctypes import RawArray

from hivemind.p2p import PeerID

from hivenb.engine.network.access.ban_list import SharedBanList
from hivenb.engine.network.access.tokens import Credential, Membership, read_credential

#: Credentials of others that a peer keeps, so that each is verified once.
_KEPT_CREDENTIALS = 4096

#: All that those get who are not let in, and plain hivemind logs.
STRANGER = "this swarm is private: only peers of hivenb can join it, with its invite"
EXPIRED = "the invite that this peer came by has expired"
BANNED = "this peer was banned from the swarm, or the one who passed its invite on was"

#: Why a peer is not let in, the most telling first.
REFUSALS = (BANNED, EXPIRED, STRANGER)


class Guard:
    """Shows a peer's credential, and looks at those of others.

    :param membership: of this peer
    :param own_id: its id
    :param ban_list: who is banned; by default nobody is
    """

    def __init__(self, membership: Membership, own_id: PeerID, ban_list: SharedBanList | None = None):
        self._admin = membership.key.admin
        self._ban_list = SharedBanList(self._admin) if ban_list is None else ban_list
        #: what this peer puts before what it sends
        self.own_credential = membership.key.credential_of(own_id.to_bytes())
        #: good credentials by the ids of their peers, expired ones among them
        self.seen: dict[bytes, Credential] = {}
        self._verified: dict[tuple[bytes, bytes], Credential] = {}

    def why_not(self, shown: bytes, peer: PeerID) -> str | None:
        """Why a peer is not let in, in words; ``None`` if it is.

        :param shown: what it has sent for a credential, any bytes
        :param peer: its id, as libp2p has authenticated it
        """
        peer_id = peer.to_bytes()
        known = self._verified.get((peer_id, shown)) or self._verify(peer_id, shown)
        return STRANGER if known is None else self._why_excluded(peer_id, known)

    def why_no_more(self, peer: PeerID) -> str | None:
        """Why a peer, which may have been let in before, is not talked to any more; ``None`` if nothing is known."""
        peer_id = peer.to_bytes()
        return self._why_excluded(peer_id, self.seen.get(peer_id))

    def _verify(self, peer_id: bytes, shown: bytes) -> Credential | None:
        known = read_credential(shown, peer_id, self._admin)
        if known is not None:  # what strangers show takes no room from members
            if len(self._verified) >= _KEPT_CREDENTIALS:
                self._verified.clear()
                self.seen.clear()
            self._verified[peer_id, shown] = self.seen[peer_id] = known
        return known

    def _why_excluded(self, peer_id: bytes, known: Credential | None) -> str | None:
        if self._ban_list.list.bans(peer_id, known):
            return BANNED
        return EXPIRED if known is not None and known.expires <= time.time() else None


# -- admission status ------------------------------------------------------------------------------------------------
#
# Whether the others let this peer in, as all its processes see it: one to whom nobody talks has to know why.


#: Seconds for which nobody has answered this peer, and refusals meanwhile, until it is known to be out: a member that
#: says so falsely is not believed while any other one answers.
UNANSWERED_FOR, REFUSALS_UNTIL = 5.0, 2

_REASONS = (BANNED, EXPIRED)


class AdmissionStatus:
    """What the others have said to the requests of this peer. The DHT's process writes, all read."""

    def __init__(self) -> None:
        self._answered_at = RawArray(ctypes.c_double, [time.monotonic()])
        self._refusals = RawArray(ctypes.c_int, [0, 0])

    def note_answer(self) -> None:
        """Another peer has answered."""
        self._refusals[0], self._answered_at[0] = 0, time.monotonic()

    def note_refusal(self, reason: str) -> None:
        """Another peer has not, and has said why."""
        if reason in _REASONS:
            self._refusals[1] = _REASONS.index(reason)
            self._refusals[0] += 1

    @property
    def why_excluded(self) -> str | None:
        """Why nobody lets this peer in any more; ``None`` as long as somebody does."""
        is_out = self._refusals[0] >= REFUSALS_UNTIL and time.monotonic() - self._answered_at[0] > UNANSWERED_FOR
        return _REASONS[self._refusals[1]] if is_out else None
