"""A peer with libp2p's daemon and nothing else: it calls what it likes, and sends what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import forked
from hivemind.p2p import P2P, PeerID

#: Of a daemon that nobody but this machine can reach.
_LOOPBACK: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}

Deed = Callable[..., Awaitable[None]]


def start(deed: Deed, addresses: Sequence[str], *args: Any) -> BaseProcess:
    """Do something to a peer, in a process of its own.

    :param deed: a coroutine function of a module, called with a ``P2P``, the victim's id and the arguments
    :param addresses: of the victim
    """
    return forked.start(_run, deed, list(addresses), args)


def _run(deed: Deed, addresses: list[str], args: tuple[Any, ...]) -> None:
    asyncio.run(_attack(deed, addresses, args))


async def _attack(deed: Deed, addresses: list[str], args: tuple[Any, ...]) -> None:
    p2p = await P2P.create(initial_peers=addresses, **_LOOPBACK)
    try:
        await deed(p2p, PeerID.from_base58(addresses[0].rpartition("/")[2]), *args)
    finally:
        await p2p.shutdown()
