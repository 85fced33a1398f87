"""For how long peers wait for each other in a round, unless they are told otherwise."""

from __future__ import annotations

#: Seconds that a peer may take at least until its next piece of data arrives; it may still be in its last batch.
NEXT_CHUNK_TIMEOUT = 5.0

#: Share of ``next_chunk_timeout`` after which nobody waits for a peer that neither reports nor answers.
GONE_WITHIN = 0.75


def default_next_chunk_timeout(matchmaking_time: float) -> float:
    """Seconds for which a peer may be silent in a round unless it is chosen: what its last batch may take."""
    return max(matchmaking_time, NEXT_CHUNK_TIMEOUT)
