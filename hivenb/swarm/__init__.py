"""The swarm: the DHT of this process, who is in it, and what its peers agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hivenb.engine  # noqa: F401 - before hivemind, whose import it keeps quiet
from hivenb._lazy import lazy_face

if TYPE_CHECKING:
    from hivenb.engine.network.addresses import LOOPBACK, PUBLIC
    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.swarm.swarm import Swarm

__all__ = [
    "LOOPBACK",
    "PUBLIC",
    "PeerInfo",
    "Swarm",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "LOOPBACK": "hivenb.engine.network.addresses",
        "PUBLIC": "hivenb.engine.network.addresses",
        "PeerInfo": "hivenb.engine.progress.peer_reports",
        "Swarm": "hivenb.swarm.swarm",
    },
)
