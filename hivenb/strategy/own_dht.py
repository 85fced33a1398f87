"""What the DHT that a strategy starts by itself is set to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import hivemind
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.engine.dht.addresses import PUBLIC, read_maddrs, with_ipv6
from hivenb.engine.dht.dht import reachable_addresses
from hivenb.engine.dht.passes import InviteKey
from hivenb.engine.dht.secret import Secret, as_secret
from hivenb.errors import SwarmError
from hivenb.options.options import DEFAULT_RUN_ID
from hivenb.swarm.invite import Invite, check_together, invite_from_environment, read_invite
from hivenb.system.environment import detect

#: Where the strategy's own DHT listens when ``host_maddrs`` is not given, as documented for Lightning; with the same
#: for IPv6 where this machine has that.
DEFAULT_HOST_MADDRS = PUBLIC

#: Where the secret of a private swarm is looked for when none is given.
SECRET_VARIABLE = "HIVENB_SECRET"


def dht_settings(
    initial_peers: str | Iterable[str] | None,
    host_maddrs: list[str] | str | None,
    further: Mapping[str, Any],
    *,
    borrows: bool,
    client_mode: bool | None,
) -> dict[str, Any]:
    """Keyword arguments of the DHT.

    :param initial_peers: addresses of peers to join; by default those in the environment
    :param host_maddrs: where to listen
    :param further: other keyword arguments that were given for the DHT
    :param borrows: whether the strategy was given a DHT that runs, for which none of this can be set any more
    :param client_mode: whether nobody can connect to this peer; ``None`` to find out
    :raises MisconfigurationException: if an address cannot be read, or something was given for a DHT that runs
    """
    try:
        invite = _invite(initial_peers, borrows)
        secret = None if borrows else _credential(further.get("secret"), invite)
        listens_at = read_maddrs("host_maddrs", host_maddrs)
        further = dict(further)
        if announced := read_maddrs("announce_maddrs", further.get("announce_maddrs")):
            further["announce_maddrs"] = list(announced)
    except SwarmError as e:
        raise MisconfigurationException(str(e)) from e
    peers = invite.addresses
    own = sorted({"host_maddrs"} & {"host_maddrs" if host_maddrs else ""} | set(further))
    if borrows and (peers or own):
        raise MisconfigurationException(
            f"HivemindStrategy borrows a running DHT (dht=), so {', '.join(own or ['initial_peers'])} would have "
            "no effect; give it to that DHT when you start it, or leave out dht="
        )
    return {
        "initial_peers": list(peers) or None,
        "host_maddrs": list(listens_at or with_ipv6(DEFAULT_HOST_MADDRS)),
        "client_mode": client_mode,
        "is_walled": not detect().reachable,
        **further,
        "secret": secret,
    }


def invited_run(run_id: str, initial_peers: str | Iterable[str] | None, borrows: bool) -> str:
    """The name of the run that an invite has named, unless another one was given.

    :param run_id: that was given
    :param initial_peers: an invite, or addresses; by default those in the environment
    :param borrows: whether the strategy was given a DHT that runs
    :raises InviteError: if an invite or address cannot be read
    """
    return (_invite(initial_peers, borrows).run_id if run_id == DEFAULT_RUN_ID else None) or run_id


def how_to_join(dht: hivemind.DHT, secret: Secret | InviteKey | None) -> str:
    """What to tell those who are to join; nothing secret.

    :param dht: the strategy's own
    :param secret: which they need, or an invite's key, if there is one
    """
    addresses = ",".join(reachable_addresses(dht))
    if isinstance(secret, InviteKey):
        return f"Other machines can join this run with the same command and invite; this peer is at\n{addresses}"
    beside = "" if secret is None else f" and the same {SECRET_VARIABLE}"
    return f"Other machines can join this run with the same command{beside} and\nINITIAL_PEERS={addresses}"


def _invite(initial_peers: str | Iterable[str] | None, borrows: bool) -> Invite:
    given = read_invite(initial_peers)
    return given if given.addresses or borrows else invite_from_environment()


def _credential(given: Any, invite: Invite) -> Secret | InviteKey | None:
    secret = as_secret(given)
    check_together(secret, invite)
    if secret is None and invite.key is None and (value := os.environ.get(SECRET_VARIABLE, "").strip()):
        try:
            return Secret(value)
        except SwarmError as e:
            raise SwarmError(f"the environment variable {SECRET_VARIABLE}: {e}") from e
    return secret or invite.key
