"""What the process of an averager does when it begins, done in a loop of a test instead."""

from __future__ import annotations

import asyncio
from typing import Any

from hivemind.averaging.matchmaking import Matchmaking


async def begin_serving(averager: Any) -> None:
    """Answer others from now on, as ``hivemind/averaging/averager.py:_run_internal`` begins."""
    averager._p2p = await averager.dht.replicate_p2p()
    if not averager.client_mode:
        await averager.add_p2p_handlers(averager._p2p, namespace=averager.prefix)
    averager._matchmaking = Matchmaking(
        averager._p2p,
        averager.schema_hash,
        averager.dht,
        client_mode=averager.client_mode,
        **averager.matchmaking_kwargs,
    )
    averager._state_updated, averager._pending_groups_registered = asyncio.Event(), asyncio.Event()
    averager._pending_groups_registered.set()
