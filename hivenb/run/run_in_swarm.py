"""A run, as the modules see it that it is made of: they cannot import what imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hivenb.peers.followed_run import FollowedRun

if TYPE_CHECKING:
    from hivenb.figures.history import History
    from hivenb.swarm.swarm import Swarm


class RunInSwarm(FollowedRun, Protocol):
    """A run that trains in a swarm, and is recorded."""

    @property
    def swarm(self) -> Swarm:
        """Where it trains."""

    @property
    def experiment(self) -> str:
        """What a person calls it and the runs of other models before it, whose place it takes."""

    @property
    def history(self) -> History:
        """Where it is recorded."""
