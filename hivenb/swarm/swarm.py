"""Swarm: the DHT of this process, where peers find each other."""

from __future__ import annotations

import html
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from hivenb._fresh_locks import free_in_children
from hivenb._signatures import OwnSignature, keywords_of, with_keywords
from hivenb.engine.network.access.tokens import Secret
from hivenb.engine.network.addresses import is_loopback
from hivenb.engine.network.dht import DHT, STARTUP_TIMEOUT, reachable_addresses
from hivenb.engine.progress.peer_reports import PeerInfo, read_peers
from hivenb.errors import LocalPeerError, SwarmError
from hivenb.options.options import DEFAULT_RUN_ID
from hivenb.peers.followed_run import FollowedRun
from hivenb.peers.local_peer import LocalPeer
from hivenb.peers.local_peers import LocalPeers
from hivenb.swarm.invite import read_addresses, read_invite
from hivenb.swarm.invites import Blocking, Invites
from hivenb.swarm.run_names import RunNames, Runs
from hivenb.swarm.start import ANOTHER_RUN, RunningDHT, Settings, check_name, read_settings, start_dht
from hivenb.system.environment import detect, require_linux
from hivenb.system.logs import collect_logs

# -- observers ---------------------------------------------------------------------------------------------------------
#
# Who looks at a swarm, and stops looking when it is closed.


class Observer(Protocol):
    """What shows a swarm, or something of it."""

    def close(self) -> None:
        """Look no more, and let go of what was looked at. May be called twice."""


class Observers:
    """Those who look at one swarm, for as long as somebody else holds them. Any thread may call."""

    def __init__(self) -> None:
        self._observers: weakref.WeakSet[Observer] = weakref.WeakSet()

    def add(self, observer: Observer) -> None:
        """Let somebody know when the swarm is closed."""
        self._observers.add(observer)

    def close(self) -> None:
        """The swarm is closed."""
        for observer in list(self._observers):
            observer.close()

    def forget(self) -> None:
        """Let nobody know: the process ends, and takes them along."""
        self._observers.clear()


# -- swarm -----------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_NOBODY_CAN_JOIN = (
    "Nobody can connect to a machine of Colab, Kaggle or Binder, so that nobody can join by the invite of this swarm. "
    "Run `hivenb relay` on a machine that others can reach, and let all, this one too, join by its invite: "
    "hivenb.Swarm.join(invite)"
)

_NO_ADDRESS = (
    "This machine has no address at which another one could reach it, so that nobody else can join by the invite of "
    "this swarm. Connect it to a network and open the swarm anew, or say with announce_maddrs= at which address others "
    "find it"
)


class Swarm:
    """The DHT of this process, where peers find each other. Starts at once, and runs until :meth:`close`.

    There is one swarm of a name in each process: running the same cell twice gives the same swarm.

    It is private: joining, reading or writing anything takes its invite, even if it listens on this machine only, which
    others may use too.

    :param name: name of the swarm in this process
    :param public: listen on the network instead of on this machine alone; a swarm that is joined elsewhere always does
    :param private: let only those in who have an invite, or the secret. With ``False`` everybody comes in who can
      reach an address, peers of plain hivemind among them, and nothing is secret; so does everybody in a swarm that is
      joined by addresses without a secret, whatever this says
    :param secret: from which the keys of its invites follow, instead of one at random; at least 32 characters. Invites
      stay good when the swarm is opened anew with the same secret, ``identity_path`` and port, as ``host_maddrs`` says
      it, at the same address. Whoever is given addresses with it can invite others, and ban them
    :param host_maddrs: multiaddresses to listen at, instead of those that ``public`` stands for
    :param announce_maddrs: multiaddresses under which others can reach this machine, if it cannot see them itself
    :param initial_peers: an invite, or addresses of peers of a swarm to join, which is open to all unless ``secret`` is
      given
    :param identity_path: file with the key that makes this peer's id the same each time; made if it is not there
    :param client_mode: only connect to others, as behind a firewall that lets nobody in. By default the peers that it
      joins are asked whether they reach it; if not, it is reached through a relay, if they are one, or is a client
    :param public_name: what the others see beside this peer's id; up to 40 characters of it. Nothing proves a name
    :param relay_service: whether to relay between peers that cannot reach each other; in a private swarm between its
      members alone. Others have to reach this machine themselves. By default in those that are not private, within the
      limits of plain hivemind; ``hivenb relay`` opens a swarm that does
    :param startup_timeout: seconds that the libp2p daemon is given to start
    :raises InviteError: if an invite or address cannot be read
    :raises NotInvitedError: if the swarm to join is private, and does not let this peer in
    :raises SwarmError: if the DHT cannot be started, a swarm of this name is open with other settings, or the name is
      an invite or an address
    :raises PlatformError: if this is not Linux
    """

    _open: dict[str, Swarm] = {}  # noqa: RUF012 - the registry of the process
    _registry_lock = threading.RLock()
    free_in_children(_registry_lock)
    __signature__ = OwnSignature(lambda: with_keywords(Swarm.__init__, (), is_method=True))

    def __new__(cls, name: str = "default", **settings: Any) -> Swarm:
        check_name(name)
        wanted = read_settings(settings)
        with cls._registry_lock:
            existing = cls._open.get(name)
            if existing is not None and existing.is_open and existing._owner_pid == os.getpid():
                is_in = existing._settings == wanted or existing._invites.is_let_in
                if is_in and existing._settings.is_same_swarm(wanted):
                    existing._follow_invite(wanted)
                    return existing
                if not existing._settings.is_same_swarm(wanted):
                    raise SwarmError(
                        f"a swarm named {name!r} is open already, {wanted.difference(existing._settings)}; "
                        f"close it first (hivenb.Swarm.get({name!r}).close()), or give another name"
                    )
                logger.info("The invite by which this swarm was joined is good no more: it is joined by the new one")
                existing.close()
            swarm = super().__new__(cls)
            swarm._start(name, wanted)
            return swarm

    def __init__(
        self,
        name: str = "default",
        *,
        public: bool = False,
        private: bool = True,
        secret: str | Secret | None = None,
        host_maddrs: Iterable[str] = (),
        announce_maddrs: Iterable[str] = (),
        initial_peers: str | Iterable[str] | None = None,
        identity_path: str | None = None,
        client_mode: bool | None = None,
        public_name: str | None = None,
        relay_service: bool | None = None,
        startup_timeout: float = STARTUP_TIMEOUT,
    ):
        """Does nothing: the same object is returned, and initialized, each time a cell is run."""

    @classmethod
    def join(cls, invite: str | Iterable[str], name: str = "default", **settings: Any) -> Swarm:
        """Join the swarm that an invite or a list of addresses leads to.

        :param invite: what ``Swarm.invite`` gave on another machine, or addresses of peers
        :param name: name of the swarm in this process
        :param settings: as in the constructor
        :raises InviteError: if the invite cannot be read
        :raises NotInvitedError: if the swarm is private, and does not let this peer in
        :raises SwarmError: if none of the peers can be reached
        """
        given = (invite,) if isinstance(invite, str) else tuple(invite)
        if not read_invite(given).addresses:
            read_addresses("(empty)")  # says what an address looks like
        return cls(name, initial_peers=given, **settings)

    @classmethod
    def get(cls, name: str = "default") -> Swarm:
        """The open swarm of a name.

        :raises SwarmError: if there is none
        """
        check_name(name)
        with cls._registry_lock:
            swarm = cls._open.get(name)
            if swarm is None or not swarm.is_open:
                known = ", ".join(map(repr, sorted(n for n, s in cls._open.items() if s.is_open))) or "none"
                raise SwarmError(f"no swarm named {name!r} is open; open ones: {known}")
            return swarm

    def _start(self, name: str, settings: Settings) -> None:
        require_linux()
        _close_all_at_exit()
        self.name = name
        self._settings = settings
        self._owner_pid = os.getpid()
        self._closing = threading.RLock()
        self.logs, self.observers = collect_logs(), Observers()
        #: what trains here
        self.runs = Runs(settings.run_id or DEFAULT_RUN_ID)
        #: under which names models train here; of a swarm that was joined, the names are those of the others
        self.run_names = RunNames()
        if settings.public and not settings.initial_peers and not detect().reachable:
            warnings.warn(_NOBODY_CAN_JOIN, stacklevel=3)  # of the cell: a log is looked at when it is too late
        dht = start_dht(settings.dht_kwargs() | {"secret": settings.key_or_secret()})
        try:
            is_first = settings.public and not settings.initial_peers and detect().reachable
            if is_first and all(map(is_loopback, reachable_addresses(dht))):
                warnings.warn(_NO_ADDRESS, stacklevel=3)
            self.peer_id = dht.peer_id.to_base58()
            self._running = RunningDHT(name, dht)
            self._blocking, self._invites = Blocking(self._running), Invites(self._running, self.runs)
            #: the peers on this machine, as those deal with them whose run they follow
            self.local = LocalPeers(self._invites.way_in)
            self._open[name] = self
        except BaseException:  # interrupted: nobody else knows of it, and a traceback would keep it alive
            dht.shutdown()
            raise

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the DHT runs."""
        dht = self._running.unless_closed
        return dht is not None and dht.is_usable

    @property
    def dht(self) -> DHT:
        """The running DHT.

        :raises SwarmError: after :meth:`close`, or if its process has died
        """
        return self._running.require()

    @property
    def is_joined(self) -> bool:
        """Whether others have opened it, so that its runs are theirs, too."""
        return bool(self._settings.initial_peers)

    def restart_if_ended(self) -> None:
        """Start the DHT anew, as the same peer, if that has been given up; a run that is started does so."""
        if (dht := self._running.unless_closed) is not None:
            dht.restart_if_ended()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses at which others can reach this peer; of this machine alone unless others can join there."""
        return reachable_addresses(self.dht)

    @property
    def public_name(self) -> str | None:
        """What this peer calls itself; ``None`` if it does not."""
        return self._settings.public_name

    @property
    def invited_to(self) -> str | None:
        """The name of a run, if the newest invite has said one with which this swarm was joined."""
        return self._settings.run_id

    def _follow_invite(self, wanted: Settings) -> None:
        """Be in the run that the newest invite names; what trains already goes on in its own.

        Whoever has given it may be somewhere else by now, such as a notebook at home with another address.
        """
        before, now = self._settings.run_id or DEFAULT_RUN_ID, wanted.run_id or DEFAULT_RUN_ID
        addresses = wanted.initial_peers or self._settings.initial_peers
        if set(addresses) - set(self._settings.initial_peers):
            self.dht.join_also(addresses)
        self._settings = replace(self._settings, run_id=wanted.run_id, initial_peers=addresses)
        if wanted.initial_peers and now != before:
            self.runs.lead_to(now)
            logger.info(f"The invite leads to the run {now!r} of this swarm, which the next TrainingRun joins")

    @property
    def newest_run_id(self) -> str:
        """The name of the newest run here that trains; or else of the newest that is about to, or has ended without
        an error; before the first, of that to which the invite leads."""
        return self.runs.newest_run_id

    def peers(self, run_id: str | None = None) -> tuple[PeerInfo, ...]:
        """Peers that have put samples into a run within the last seconds; this one first, then by id.

        :param run_id: name of the run; by default that of the newest run of this swarm, see :attr:`newest_run_id`
        :returns: one :class:`PeerInfo` for each
        :raises SwarmError: if the swarm is closed, or the DHT does not answer
        """
        return read_peers(self.dht, self.newest_run_id if run_id is None else run_id)

    # -- who is let in ------------------------------------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        """Whether only those can join who have the invite, or the secret."""
        return self._invites.membership is not None

    @property
    def who_can_join(self) -> str:
        """The same in words: ``"invited only"`` or ``"anybody can join"``."""
        return "invited only" if self.is_private else "anybody can join"

    @property
    def can_ban(self) -> bool:
        """Whether this peer knows the secret, as who opened a private swarm does, and can ban others."""
        return self._invites.can_ban

    @property
    def invite(self) -> str:
        """One word to give to others, for :meth:`join` or ``hivenb join``. Whoever reads it can join, too.

        It holds the addresses, the name of the newest run that trains, or will, and, of a private swarm, a key that its
        admin has signed.
        It is good until the swarm is closed; that of a peer that was invited itself, for as long as the one it came by.
        After :meth:`ban` it is another one, and for the peer that was banned the old one is good no more.
        """
        return self._invites.invite

    def invite_for(self, hours: float) -> str:
        """An invite that expires: all who came by it are out then.

        :param hours: for how long it is good, from now on
        :raises SwarmError: if that is no such time, if the swarm is open to all, or if this peer does not know its
          secret, as one that was invited itself
        """
        return self._invites.invite_for(hours)

    def ban(self, peer_id: str) -> None:
        """Ban a peer from the swarm, for everybody and for good. Takes some seconds until all know.

        Nobody comes in by its invite any more, under whatever id, and :attr:`invite` is another one from now on. Those
        of whom this peer has heard that came by the same invite stay. A peer on this machine is not started again.

        :param peer_id: as ``swarm.peers()`` tells it
        :raises SwarmError: if that is no peer's id, or this one's own; if this peer does not know the secret of the
          swarm, as one that was invited itself; if too many are banned; if the swarm is closed
        """
        self._invites.check_ban(peer_id)
        self.local.leave_dead(peer_id)  # before it has died of it
        self._invites.ban(peer_id)
        self.local.end_banned(self.banned)

    @property
    def banned(self) -> tuple[str, ...]:
        """Ids of the banned peers; none after the swarm is closed."""
        return self._invites.banned

    @property
    def blocked(self) -> tuple[str, ...]:
        """Ids of the peers that this one has blocked; none after the swarm is closed."""
        return self._blocking.blocked

    def block(self, peer_id: str) -> None:
        """Answer nothing to a peer any more, ask it for nothing, and wait for it in no round.

        For this peer alone: the others, those on this machine too, go on as before. It holds until :meth:`unblock`, or
        the swarm is closed.

        :param peer_id: as ``swarm.peers()`` tells it
        :raises SwarmError: if that is no peer's id, or this one's own; if too many are blocked; if the swarm is closed
        """
        self._blocking.block(peer_id)

    def unblock(self, peer_id: str) -> None:
        """Talk to a peer again; without effect if it is not blocked.

        :param peer_id: as :attr:`blocked` tells it
        :raises SwarmError: if that is no peer's id; if the swarm is closed
        """
        self._blocking.unblock(peer_id)

    # -- peers on this machine ----------------------------------------------------------------------------------

    def add_local_peers(self, count: int, run: FollowedRun, *, restart: bool = False) -> tuple[LocalPeer, ...]:
        """Start further peers of a run as processes on this machine; they end with this process.

        :param count: how many
        :param run: whose model, data and options they take, each with its own shuffle of the data. It need not have
          been started
        :param restart: whether one that dies is started again, three times a minute at most
        :returns: the new peers
        :raises LocalPeerError: if one cannot be started, the swarm is closed before they all have, or the run is of
          another swarm
        :raises SwarmError: if the swarm is closed
        """
        self._running.require()
        if run.swarm is not self:
            where = run.swarm.name
            which = f"a swarm {where!r} that is closed; " if not run.swarm.is_open else f"another swarm, {where!r}; "
            what_to_do = "" if not run.swarm.is_open else "add them there, with run.swarm.add_local_peers(...), or "
            raise LocalPeerError(
                f"peers of the swarm {self.name!r} cannot train in the run {run.options.run_id!r}: it belongs to "
                f"{which}{what_to_do}{ANOTHER_RUN}"
            )
        return self.local.add(count, run, restart=restart)

    def remove_local_peers(self, count: int | None = None, run: FollowedRun | None = None) -> None:
        """Let peers on this machine leave, the newest first. An interrupt ends those at once that have not left.

        :param count: how many; by default all that have been added
        :param run: of this run alone
        :raises LocalPeerError: if that is no number of peers
        """
        self.local.remove(count, run)

    @property
    def local_peers(self) -> tuple[LocalPeer, ...]:
        """The peers on this machine that were added and not removed, whether they still run or not."""
        return self.local.all

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the runs of this swarm, end the peers on this machine and the DHT. May be called twice.

        Peers that another thread is adding end too, and that thread hears of it by an error.
        """
        if self._owner_pid != os.getpid():
            return
        with self._closing:
            self.runs.stop()
            self.local.close()
            self._running.close()
        with self._registry_lock:
            if self._open.get(self.name) is self:
                del self._open[self.name]
        self.observers.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Without ids and addresses, so that it reads the same each time a notebook is run."""
        if not self.is_open:
            return f"Swarm({self.name!r}, closed)"
        where = "public" if self._settings.is_on_network else "this machine only"
        local = f", {len(self.local_peers)} local peers" if self.local_peers else ""
        return f"Swarm({self.name!r}, open, {where}, {self.who_can_join}{local})"

    def _repr_html_(self) -> str:
        """For a notebook: also this peer's id, its addresses and the invite, which differ each time."""
        title = f"<b>{html.escape(repr(self))}</b>"
        if not self.is_open:
            return title
        rows = {
            "peer id": f"<code>{html.escape(self.peer_id)}</code>",
            "addresses": "<br>".join(f"<code>{html.escape(address)}</code>" for address in self.addresses),
            "who can join": "those who have the invite" if self.is_private else "anybody who can reach an address",
            "run": f"<code>{html.escape(self.newest_run_id)}</code>",
            "invite": f'<input readonly size="60" onclick="this.select()" value="{html.escape(self.invite)}">',
        }
        left = 'style="text-align:left"'
        cells = "".join(f"<tr><td {left}>{k}</td><td {left}>{v}</td></tr>" for k, v in rows.items())
        return f"{title}<table>{cells}</table>"


_settings_to_join = keywords_of(Swarm.__init__, but=("name", "initial_peers"))
_join: Any = vars(Swarm)["join"].__func__
_join.__signature__ = with_keywords(_join, _settings_to_join)


def _close_all() -> None:
    for swarm in list(Swarm._open.values()):
        swarm.observers.forget()
        swarm.close()


@cache
def _close_all_at_exit() -> None:
    # Not atexit: before its handlers run, Python waits for the threads of all executors, and those of hivemind's
    # progress tracker end only when the run does.
    threading._register_atexit(_close_all)  # type: ignore[attr-defined]
