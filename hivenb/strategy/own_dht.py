"""What the DHT that a strategy starts by itself is set to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.engine.dht.addresses import PUBLIC
from hivenb.errors import InviteError
from hivenb.swarm.invite import addresses_from_environment, read_addresses

#: Where the strategy's own DHT listens when ``host_maddrs`` is not given, as documented for Lightning.
DEFAULT_HOST_MADDRS = PUBLIC


def dht_settings(
    initial_peers: str | Iterable[str] | None,
    host_maddrs: list[str] | None,
    further: Mapping[str, Any],
    *,
    borrows: bool,
    client_mode: bool,
) -> dict[str, Any]:
    """Keyword arguments of the DHT.

    :param initial_peers: addresses of peers to join; by default those in the environment
    :param host_maddrs: where to listen
    :param further: other keyword arguments that were given for the DHT
    :param borrows: whether the strategy was given a DHT that runs, for which none of this can be set any more
    :param client_mode: whether nobody can connect to this peer
    :raises MisconfigurationException: if an address cannot be read, or something was given for a DHT that runs
    """
    try:
        peers = read_addresses(initial_peers) or (() if borrows else addresses_from_environment())
    except InviteError as e:
        raise MisconfigurationException(str(e)) from e
    own = sorted({"host_maddrs"} & {"host_maddrs" if host_maddrs else ""} | set(further))
    if borrows and (peers or own):
        raise MisconfigurationException(
            f"HivemindStrategy borrows a running DHT (dht=), so {', '.join(own or ['initial_peers'])} would have "
            "no effect; give it to that DHT when you start it, or leave out dht="
        )
    return {
        "initial_peers": list(peers) or None,
        "host_maddrs": list(host_maddrs or DEFAULT_HOST_MADDRS),
        "client_mode": client_mode,
        **further,
    }
