"""Swarm: the DHT of this process, where peers find each other."""

from __future__ import annotations

import errno
import html
import logging
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from hivenb._fresh_locks import free_in_children
from hivenb._lazy import require_working_directory
from hivenb._signatures import OwnSignature, keywords_of, with_keywords
from hivenb.engine.network.access.tokens import InviteKey, Secret, as_secret
from hivenb.engine.network.addresses import LOOPBACK, is_loopback, public_addresses, read_maddrs
from hivenb.engine.network.dht import DHT, STARTUP_TIMEOUT, reachable_addresses
from hivenb.engine.progress.peer_reports import PeerInfo, read_peers
from hivenb.errors import NotInvitedError, PlatformError, SwarmError
from hivenb.options.options import DEFAULT_RUN_ID, Options, did_you_mean
from hivenb.peers.followed_run import FollowedRun
from hivenb.peers.local_peer import LocalPeer
from hivenb.peers.local_peers import LocalPeers
from hivenb.swarm.invite import check_together, read_addresses, read_invite
from hivenb.swarm.invites import BlocksPeers, Invites
from hivenb.swarm.run_names import RunNames
from hivenb.system.environment import detect, require_linux
from hivenb.system.logs import collect_logs

# -- onlookers -------------------------------------------------------------------------------------------------------
#
# Who looks at a swarm, and stops looking when it is closed.


class Onlooker(Protocol):
    """What shows a swarm, or something of it."""

    def close(self) -> None:
        """Look no more, and let go of what was looked at. May be called twice."""


class Onlookers:
    """Those who look at one swarm, for as long as somebody else holds them. Any thread may call."""

    def __init__(self) -> None:
        self._onlookers: weakref.WeakSet[Onlooker] = weakref.WeakSet()

    def add(self, onlooker: Onlooker) -> None:
        """Let somebody know when the swarm is closed."""
        self._onlookers.add(onlooker)

    def close(self) -> None:
        """The swarm is closed."""
        for onlooker in list(self._onlookers):
            onlooker.close()

    def forget(self) -> None:
        """Let nobody know: the process ends, and takes them along."""
        self._onlookers.clear()


# -- settings --------------------------------------------------------------------------------------------------------
#
# What a swarm is started with.


#: What says how one gets into a swarm.
_WAY_IN = frozenset({"secret", "invite_key", "initial_peers"})


@dataclass(frozen=True)
class Settings:
    """What a swarm is started with; two cells that ask for the same get the same swarm.

    The fields are the parameters of :class:`hivenb.Swarm`, and the key and the name of the run that an invite holds.
    """

    public: bool = False
    open: bool = False
    secret: Secret | None = None
    invite_key: InviteKey | None = None
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    identity_path: str | None = None
    client_mode: bool | None = None
    public_name: str | None = None
    relay_service: bool | None = None
    startup_timeout: float = STARTUP_TIMEOUT
    run_id: str | None = field(default=None, compare=False)

    def difference(self, other: Settings) -> str:
        """In which settings another one differs, in words; how one gets in is told without what is secret in it."""
        names = [name for name in self._differing(other) if name not in _WAY_IN]
        told = [f"{name}={getattr(other, name)!r} instead of {getattr(self, name)!r}" for name in names]
        ways = [] if self._leads_to(other) else [self._other_way(other)]
        return "; ".join([*ways, *(["with " + ", ".join(told)] if told else [])])

    def is_same_swarm(self, other: Settings) -> bool:
        """Whether another one leads into the same swarm, be it by another invite, with all else as here."""
        return self._leads_to(other) and not set(self._differing(other)) - _WAY_IN

    def _differing(self, other: Settings) -> list[str]:
        return [f.name for f in fields(self) if f.compare and getattr(self, f.name) != getattr(other, f.name)]

    def _leads_to(self, other: Settings) -> bool:
        mine, theirs = ({name: getattr(one, name) for name in _WAY_IN} for one in (self, other))
        if mine == theirs:
            return True
        if not (self.initial_peers and other.initial_peers) or self.secret != other.secret:
            return False
        if self.invite_key is not None and other.invite_key is not None:
            return self.invite_key.authority == other.invite_key.authority
        # addresses alone: those of one peer at least are the same
        ids = [{one.rpartition("/p2p/")[2] for one in settings.initial_peers} for settings in (self, other)]
        return self.invite_key is other.invite_key and bool(ids[0] & ids[1])

    def _other_way(self, other: Settings) -> str:
        """How another one came into a swarm that is not this one's, in words."""
        if not (self.initial_peers or other.initial_peers):
            return "opened here with another secret"
        if self.initial_peers and other.initial_peers:
            return f"{other._way_in}, which leads into another swarm than the one that is given now"
        return f"{other._way_in}, and not {self._way_in}"

    @property
    def _way_in(self) -> str:
        """How one came into a swarm, in words."""
        if not self.initial_peers:
            return "opened here"
        return f"joined by {'an invite' if self.invite_key is not None else 'addresses'}"

    @property
    def is_on_network(self) -> bool:
        """Whether others than this machine can reach this peer: those of a swarm that is joined there have to."""
        return self.public or not all(map(is_loopback, self.initial_peers))

    def credential(self) -> Secret | InviteKey | None:
        """What lets this peer into its swarm: a new secret, unless something was given or the swarm is open to all."""
        given = self.secret or self.invite_key
        return given if given is not None or self.open or self.initial_peers else Secret.random()

    def dht_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the DHT, but for what lets it in."""
        kwargs: dict[str, Any] = {
            "host_maddrs": list(self.host_maddrs or (public_addresses() if self.is_on_network else LOOPBACK)),
            "initial_peers": list(self.initial_peers) or None,
            "client_mode": self.client_mode,
            "is_walled": not detect().reachable,
            "relay_service": self.relay_service,
            "startup_timeout": self.startup_timeout,
        }
        if self.announce_maddrs:
            kwargs["announce_maddrs"] = list(self.announce_maddrs)
        if self.identity_path is not None:
            kwargs["identity_path"] = self.identity_path
        if not self.is_on_network:
            kwargs |= {"nat_port_map": False, "auto_nat": False}  # nothing on this machine alone to be found out
        return kwargs


def read_settings(settings: Mapping[str, Any]) -> Settings:
    """Settings out of the keyword arguments of a swarm.

    :raises TypeError: if there is no such setting
    :raises InviteError: if an invite or address cannot be read
    :raises SwarmError: if they do not go together, or an address of this peer cannot be read
    """
    given = dict(settings)
    names = [f.name for f in fields(Settings) if f.name not in ("invite_key", "run_id")]
    if unknown := sorted(set(given) - set(names)):
        raise TypeError(
            f"Swarm has no setting {', '.join(unknown)}. {did_you_mean(unknown, names)}There are name, "
            f"{', '.join(names)}"
        )
    for name in ("host_maddrs", "announce_maddrs"):
        given[name] = read_maddrs(name, given.get(name))
    if given.get("identity_path") is not None:
        given["identity_path"] = os.fspath(given["identity_path"])
    invite = read_invite(given.get("initial_peers"))
    secret = as_secret(given.get("secret"))
    check_together(secret, invite)
    if given.get("open") and (secret or invite.key) is not None:
        where = "the invite is to a private swarm" if invite.key else "a swarm with a secret is private"
        raise SwarmError(f"{where}, which open=True does not make open; leave one of them out")
    found = {"initial_peers": invite.addresses, "secret": secret, "invite_key": invite.key, "run_id": invite.run_id}
    return Settings(**given | found)


# -- starting --------------------------------------------------------------------------------------------------------
#
# Starts a DHT, and says what went wrong in the words of somebody who wants to join a swarm.


#: Seconds for which a DHT is waited for beyond those that its daemon is given.
_GRACE = 30.0


def start_dht(settings: Mapping[str, Any]) -> DHT:
    """A DHT that runs.

    :param settings: keyword arguments of :class:`hivenb.engine.network.dht.DHT`
    :raises NotInvitedError: if the initial peers do not let it in
    :raises PlatformError: if this machine lacks what it needs
    :raises SwarmError: if it cannot be started, or none of the initial peers answers
    """
    require_working_directory()
    dht = None
    try:
        dht = DHT(start=False, **settings)
        dht.run_in_background(await_ready=True, timeout=settings.get("startup_timeout", STARTUP_TIMEOUT) + _GRACE)
    except BaseException as e:
        if dht is not None and dht.pid is not None:
            dht.terminate()
        if isinstance(e, Exception):
            if isinstance(e, (NotInvitedError, PlatformError)):
                raise
            if isinstance(e, OSError) and e.errno == errno.ENOSPC:
                raise PlatformError(_no_room()) from e
            peers, listens_at = settings.get("initial_peers") or (), settings.get("host_maddrs") or ()
            raise SwarmError(_start_failed(e, peers, listens_at)) from e
        raise
    return dht


def _no_room() -> str:
    folder = tempfile.gettempdir()
    return (
        f"the disk is full at {folder}, where a peer keeps its key while it starts. Make room there, or name another "
        "folder for temporary files before Python starts: export TMPDIR=/some/folder"
    )


def _start_failed(error: Exception, initial_peers: Sequence[str], host_maddrs: Sequence[str]) -> str:
    what = str(error) or type(error).__name__
    if "address already in use" in what:
        return (
            f"the port is in use: {what}. Leave the port to the system with .../tcp/0, or end what listens at "
            f"{', '.join(host_maddrs)}"
        )
    if initial_peers and ("bootstrap" in what or "initial_peers" in what):
        return (
            f"none of the peers answers: {', '.join(initial_peers)} ({what}). Is the swarm still open there, "
            "and can this machine reach it? A swarm that was not opened with public=True is reachable from its own "
            "machine only"
        )
    return f"the DHT could not be started: {what}"


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


class Trains(Protocol):
    """What trains in a swarm."""

    @property
    def options(self) -> Options:
        """The options in force, with its name."""

    @property
    def is_active(self) -> bool:
        """Whether it is at work, or about to be."""

    @property
    def exception(self) -> BaseException | None:
        """What has ended it, if that was an error."""

    def stop(self) -> None:
        """End training; returns when it has ended."""


class Swarm(BlocksPeers, Invites):
    """The DHT of this process, where peers find each other. Starts at once, and runs until :meth:`close`.

    There is one swarm of a name in each process: running the same cell twice gives the same swarm.

    It is private: joining, reading or writing anything takes its invite, even if it listens on this machine only, which
    others may use too.

    :param name: name of the swarm in this process
    :param public: listen on the network instead of on this machine alone; a swarm that is joined elsewhere always does
    :param open: let everybody in who can reach an address, peers of plain hivemind among them. Nothing is secret then
    :param secret: from which the keys of its invites follow, instead of one at random; at least 32 characters. Invites
      stay good when the swarm is opened anew with the same secret, ``identity_path`` and port, as ``host_maddrs`` says
      it, at the same address. Whoever is given addresses with it can invite others, and put them out
    :param host_maddrs: multiaddresses to listen at, instead of those that ``public`` stands for
    :param announce_maddrs: multiaddresses under which others can reach this machine, if it cannot see them itself
    :param initial_peers: an invite, or addresses of peers of a swarm to join, which is open to all unless ``secret`` is
      given
    :param identity_path: file with the key that makes this peer's id the same each time; made if it is not there
    :param client_mode: only connect to others, as behind a firewall that lets nobody in. By default the peers that it
      joins are asked whether they reach it; if not, it is reached through a relay, if they are one, or is a client
    :param public_name: what the others see beside this peer's id; up to 40 characters of it. Nothing proves a name
    :param relay_service: whether to relay between peers that cannot reach each other; in a private swarm between its
      members alone. Others have to reach this machine themselves. By default in open swarms, within the limits of plain
      hivemind; ``hivenb relay`` opens a swarm that does
    :param startup_timeout: seconds that the libp2p daemon is given to start
    :raises InviteError: if an invite or address cannot be read
    :raises NotInvitedError: if the swarm to join is private, and does not let this peer in
    :raises SwarmError: if the DHT cannot be started, or a swarm of this name is open with other settings
    :raises PlatformError: if this is not Linux
    """

    _open: dict[str, Swarm] = {}  # noqa: RUF012 - the registry of the process
    _registry_lock = threading.RLock()
    free_in_children(_registry_lock)
    __signature__ = OwnSignature(lambda: with_keywords(Swarm.__init__, (), is_method=True))

    def __new__(cls, name: str = "default", **settings: Any) -> Swarm:
        wanted = read_settings(settings)
        with cls._registry_lock:
            existing = cls._open.get(name)
            if existing is not None and existing.is_open and existing._owner_pid == os.getpid():
                is_in = existing._settings == wanted or existing._is_let_in
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
        open: bool = False,
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
        with cls._registry_lock:
            swarm = cls._open.get(name)
            if swarm is None or not swarm.is_open:
                known = ", ".join(map(repr, sorted(n for n, s in cls._open.items() if s.is_open))) or "none"
                raise SwarmError(f"no swarm named {name!r} is open; open ones: {known}")
            return swarm

    def _start(self, name: str, settings: Settings) -> None:
        require_linux()
        self.name = name
        self._settings = settings
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._adopting = threading.Lock()  # not the one that is held while runs are stopped
        self._runs: tuple[weakref.ref[Trains], ...] = ()
        self._local_peers: LocalPeers | None = None
        self._dht: DHT | None = None
        self._known_run_id = settings.run_id or DEFAULT_RUN_ID
        self.logs, self.onlookers = collect_logs(), Onlookers()
        #: under which names models train here; of a swarm that was joined, the names are those of the others
        self.run_names = RunNames()
        if settings.public and not settings.initial_peers and not detect().reachable:
            warnings.warn(_NOBODY_CAN_JOIN, stacklevel=3)  # of the cell: a log is looked at when it is too late
        self._dht = start_dht(settings.dht_kwargs() | {"secret": settings.credential()})
        try:
            is_first = settings.public and not settings.initial_peers and detect().reachable
            if is_first and all(map(is_loopback, reachable_addresses(self._dht))):
                warnings.warn(_NO_ADDRESS, stacklevel=3)
            self.peer_id = self._dht.peer_id.to_base58()
            self._become_member(self._dht.membership)
            self._open[name] = self
        except BaseException:  # interrupted: nobody else knows of it, and a traceback would keep it alive
            self._dht.shutdown()
            raise

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the DHT runs."""
        dht = self._dht
        return dht is not None and dht.is_usable

    @property
    def dht(self) -> DHT:
        """The running DHT.

        :raises SwarmError: after :meth:`close`, or if its process has died
        """
        dht = self._dht  # once: another thread may be closing the swarm
        if dht is None:
            raise SwarmError(f"the swarm {self.name!r} is closed; open one with hivenb.Swarm({self.name!r})")
        if not dht.is_usable:
            raise SwarmError(f"the DHT process of the swarm {self.name!r} has ended; close it and open it anew")
        return dht

    @property
    def is_joined(self) -> bool:
        """Whether others have opened it, so that its runs are theirs, too."""
        return bool(self._settings.initial_peers)

    def revive(self) -> None:
        """Start the DHT anew, as the same peer, if that has been given up; a run that is started does so."""
        if self._dht is not None:
            self._dht.revive()

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

    @property
    def _is_let_in(self) -> bool:
        """Whether the others let this peer in, as far as it knows."""
        membership = self._membership
        return membership is None or not (membership.key.has_expired or self.peer_id in self.shown_the_door)

    def _follow_invite(self, wanted: Settings) -> None:
        """Be in the run that the newest invite names; what trains already goes on in its own."""
        before, now = self._settings.run_id or DEFAULT_RUN_ID, wanted.run_id or DEFAULT_RUN_ID
        self._settings = replace(self._settings, run_id=wanted.run_id)
        if wanted.initial_peers and now != before:
            self._known_run_id = now
            logger.info(f"The invite leads to the run {now!r} of this swarm, which the next TrainingRun joins")

    @property
    def newest_run_id(self) -> str:
        """The name of the newest run here that trains; or else of the newest that is about to, or has ended without
        an error; before the first, of that to which the invite leads."""
        runs = [run for run in (known() for known in reversed(self._runs)) if run is not None]
        usable = [run for run in runs if run.is_active] or [run for run in runs if run.exception is None]
        return usable[0].options.run_id if usable else self._known_run_id

    def peers(self, run_id: str | None = None) -> tuple[PeerInfo, ...]:
        """Peers that have put samples into a run within the last seconds; this one first, then by id.

        :param run_id: name of the run; by default that of the newest run of this swarm, see :attr:`newest_run_id`
        :returns: one :class:`PeerInfo` for each
        :raises SwarmError: if the swarm is closed, or the DHT does not answer
        """
        return read_peers(self.dht, self.newest_run_id if run_id is None else run_id)

    # -- peers on this machine ----------------------------------------------------------------------------------

    def add_local_peers(self, count: int, run: FollowedRun, *, restart: bool = False) -> tuple[LocalPeer, ...]:
        """Start further peers of a run as processes on this machine; they end with this process.

        :param count: how many
        :param run: whose model, data and options they take, each with its own shuffle of the data. It need not have
          been started
        :param restart: whether one that dies is started again, three times a minute at most
        :returns: the new peers
        :raises LocalPeerError: if one cannot be started, or the swarm is closed before they all have
        :raises SwarmError: if the swarm is closed
        """
        with self._lock:
            self._way_in()  # refused once the swarm is closed
            local_peers = self._local_peers = self._local_peers or LocalPeers()
        # without the lock: it takes its time, and close() may end it
        run.take_name()
        return local_peers.add(count, run, self._way_in, restart=restart)

    def restart_local_peers(self, run: FollowedRun, restart: bool = True) -> None:
        """Start the peers of a run on this machine again when they die, three times a minute at most; or no longer."""
        if self._local_peers is not None:
            self._local_peers.start_again_if_dead(restart, run, self._way_in)

    def remove_local_peers(self, count: int | None = None, run: FollowedRun | None = None) -> None:
        """Let peers on this machine leave, the newest first. An interrupt ends those at once that have not left.

        :param count: how many; by default all that have been added
        :param run: of this run alone
        :raises LocalPeerError: if that is no number of peers
        """
        if self._local_peers is not None:
            there = [peer for peer in self.local_peers if run is None or peer in run.followers]
            self._local_peers.remove(count, None if run is None else run.followers)
            self._local_peers.forget_those_to_come(run, None if count is None else max(0, count - len(there)))

    def local_peers_leave_with(self, run: FollowedRun) -> None:
        """Let the local peers of a run leave that trains no more; they come back with its next start."""
        if self._local_peers is not None:
            self._local_peers.leave_with(run)

    def local_peers_come_back_with(self, run: FollowedRun) -> None:
        """Let those local peers come back that have left with a run that begins to train. Returns at once."""
        if self._local_peers is not None:
            self._local_peers.come_back_with(run, self._way_in)

    def local_peers_to_come(self, run: FollowedRun) -> int:
        """How many local peers come with a run when it starts, or are on their way."""
        return 0 if self._local_peers is None else self._local_peers.to_come_to(run)

    def forget_local_peers_to_come(self, run: FollowedRun) -> None:
        """Let no local peers come by themselves to a run."""
        if self._local_peers is not None:
            self._local_peers.forget_those_to_come(run)

    def rename_local_peers(self, run: FollowedRun, experiment: str) -> None:
        """Let the local peers of a run be those of another experiment, as the run is of one."""
        if self._local_peers is not None:
            self._local_peers.rename(run, experiment)
        run.followers.experiment = experiment

    def remove_left_behind(self, run: FollowedRun) -> None:
        """Let peers on this machine leave that an earlier run of the same experiment has added, be it gone or not."""
        if self._local_peers is not None:
            self._local_peers.leave_behind(run)

    @property
    def local_peers(self) -> tuple[LocalPeer, ...]:
        """The peers on this machine that were added and not removed, whether they still run or not."""
        return () if self._local_peers is None else self._local_peers.all

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the runs of this swarm, end the peers on this machine and the DHT. May be called twice.

        Peers that another thread is adding end too, and that thread hears of it by an error.
        """
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            for known in self._runs:
                if (run := known()) is not None:
                    run.stop()
            if self._local_peers is not None:
                self._local_peers.close()
            if self._dht is not None:
                dht, self._dht = self._dht, None
                try:
                    dht.shutdown()
                except BaseException:  # interrupted: nobody else knows of it
                    dht.terminate()
                    raise
        with self._registry_lock:
            if self._open.get(self.name) is self:
                del self._open[self.name]
        self.onlookers.close()

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


def adopt(swarm: Swarm, run: Trains) -> None:
    """Let a swarm stop a run before it closes, unless nobody holds the run by then. For :class:`hivenb.TrainingRun`.

    :param swarm: an open one
    :param run: the newest one of the swarm from now on
    """
    with swarm._adopting:
        known = tuple(one for one in swarm._runs if one() is not None and one() is not run)
        swarm._runs = (*known, weakref.ref(run))
        swarm._known_run_id = run.options.run_id


def _close_all() -> None:
    for swarm in list(Swarm._open.values()):
        swarm.onlookers.forget()
        swarm.close()


# Not atexit: before its handlers run, Python waits for the threads of all executors, and those of hivemind's progress
# tracker end only when the run does.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
