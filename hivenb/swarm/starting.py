"""Starts a DHT, and says what went wrong in the words of somebody who wants to join a swarm."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from hivenb._lazy import require_working_directory
from hivenb.engine.dht.dht import DHT, STARTUP_TIMEOUT
from hivenb.errors import NotInvitedError, PlatformError, SwarmError

#: Seconds for which a DHT is waited for beyond those that its daemon is given.
_GRACE = 30.0


def start_dht(settings: Mapping[str, Any]) -> DHT:
    """A DHT that runs.

    :param settings: keyword arguments of :class:`hivenb.engine.dht.dht.DHT`
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
