"""What a swarm is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hivenb.engine.dht.addresses import LOOPBACK, is_loopback, public_addresses, read_maddrs
from hivenb.engine.dht.dht import STARTUP_TIMEOUT
from hivenb.engine.dht.passes import InviteKey
from hivenb.engine.dht.secret import Secret, as_secret
from hivenb.errors import SwarmError
from hivenb.options.spelling import did_you_mean
from hivenb.swarm.invite import check_together, read_invite
from hivenb.system.environment import detect

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
