"""What a swarm is started with, how its DHT is started, and for how long that is there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hivenb._lazy import require_working_directory
from hivenb.engine.network.access.tokens import InviteKey, Secret, as_secret
from hivenb.engine.network.addresses import LOOPBACK, is_loopback, public_addresses, read_maddrs
from hivenb.engine.network.dht import DHT, STARTUP_TIMEOUT
from hivenb.errors import NotInvitedError, PlatformError, SwarmError
from hivenb.options.options import did_you_mean
from hivenb.swarm.invite import INVITE_PREFIX, check_together, read_invite
from hivenb.system.environment import detect

# -- settings --------------------------------------------------------------------------------------------------------
#
# What a swarm is started with.


#: What says how one gets into a swarm.
_WAY_IN = frozenset({"secret", "invite_key", "initial_peers"})

#: How multiaddresses begin.
_ADDRESS_BEGINS = ("/ip", "/dns")


@dataclass(frozen=True)
class Settings:
    """What a swarm is started with; two cells that ask for the same get the same swarm.

    The fields are the parameters of :class:`hivenb.Swarm`, and the key and the name of the run that an invite holds.
    """

    public: bool = False
    private: bool = True
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
            return self.invite_key.admin == other.invite_key.admin
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

    def key_or_secret(self) -> Secret | InviteKey | None:
        """What lets this peer into its swarm: a new secret, unless something was given or the swarm is open to all."""
        given = self.secret or self.invite_key
        return given if given is not None or not self.private or self.initial_peers else Secret.random()

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


def check_name(name: str) -> None:
    """Refuse what leads into a swarm as the name of one.

    :raises SwarmError: if it is an invite or an address; it is not shown, as an invite holds a key
    """
    text = str(name).strip()
    is_invite = INVITE_PREFIX in text
    if is_invite or text.startswith(_ADDRESS_BEGINS):
        what = "an invite" if is_invite else "an address"
        raise SwarmError(
            f"what is given as the name of a swarm is {what}, which leads into a swarm of others: join that with "
            "hivenb.Swarm.join(...)"
        )


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
    if not isinstance(given.get("private", True), bool):
        raise SwarmError(
            f"private={given['private']!r}: give True, or False to let everybody in who can reach an address"
        )
    for name in ("host_maddrs", "announce_maddrs"):
        given[name] = read_maddrs(name, given.get(name))
    if given.get("identity_path") is not None:
        given["identity_path"] = os.fspath(given["identity_path"])
    invite = read_invite(given.get("initial_peers"))
    secret = as_secret(given.get("secret"))
    check_together(secret, invite)
    if not given.get("private", True) and (secret or invite.key) is not None:
        where = "the invite is to a private swarm" if invite.key else "a swarm with a secret is private"
        raise SwarmError(f"{where}, which private=False does not open; leave one of them out")
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


#: What to do with the model of a run whose swarm is closed, or another one.
ANOTHER_RUN = (
    "make another run with hivenb.TrainingRun(run.model, ..., swarm=swarm): the model has its weights, and the "
    "optimizer begins anew"
)


# -- running ---------------------------------------------------------------------------------------------------------


class RunningDHT:
    """The DHT of a swarm, until the swarm is closed; all parts of a swarm have the same one. Any thread may call.

    :param name: of the swarm in this process
    :param dht: that has been started
    """

    def __init__(self, name: str, dht: DHT):
        self._name = name
        self._dht: DHT | None = dht

    @property
    def unless_closed(self) -> DHT | None:
        """The DHT, whether it works or not; ``None`` once the swarm is closed."""
        return self._dht

    def require(self) -> DHT:
        """The DHT, which works.

        :raises SwarmError: once the swarm is closed, or if the process has died
        """
        dht = self._dht  # once: another thread may be closing the swarm
        if dht is None:
            raise SwarmError(f"the swarm {self._name!r} is closed; open one with hivenb.Swarm({self._name!r})")
        if not dht.is_usable:
            raise SwarmError(f"the DHT process of the swarm {self._name!r} has ended; close it and open it anew")
        return dht

    def close(self) -> None:
        """End it. May be called twice, by one thread at a time."""
        if (dht := self._dht) is None:
            return
        self._dht = None
        try:
            dht.shutdown()
        except BaseException:  # interrupted: nobody else knows of it
            dht.terminate()
            raise
