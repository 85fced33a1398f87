"""What the server of local peers imports before it forks them; see :mod:`hivenb.peers.fork_server`."""

from __future__ import annotations

import gc

from hivenb._library_warnings import library_warnings_ignored

with library_warnings_ignored():
    import hivenb.app.local_peer  # noqa: F401 - for the peers, which share its memory

# A peer's collections of garbage write to all objects that they look at, and would make a copy of each for the peer.
gc.collect()
gc.freeze()
