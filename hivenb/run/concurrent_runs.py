"""Runs of one kernel beside each other: one of the same experiment gives way to a new one, no two train one model.

hivemind allows one run of a name for each DHT, and two Trainers would compute gradients of one module at a time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from hivenb._fresh_locks import free_in_children
from hivenb.errors import TrainingError
from hivenb.peers.followed_run import FollowedRun
from hivenb.peers.local_peers import left_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hivenb.figures.history import History
    from hivenb.peers.local_peer import LocalPeer
    from hivenb.run.checkpoints import RunFolder
    from hivenb.swarm.swarm import Swarm


# -- run in swarm ----------------------------------------------------------------------------------------------------
#
# A run, as the modules see it that it is made of: they cannot import what imports them.


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


# -- succession ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: To be held by whoever starts a run, from before it asks for its place until it is active: one at a time.
one_starts = threading.RLock()
free_in_children(one_starts)


class Neighbour(RunInSwarm, Protocol):
    """A run, as others of this process see it."""

    @property
    def is_active(self) -> bool:
        """Whether it is at work, or about to be."""

    @property
    def local_peers(self) -> tuple[LocalPeer, ...]:
        """Its peers on this machine."""

    @property
    def started_at(self) -> float:
        """When it was started last, by ``time.monotonic()``."""

    @property
    def kept_folder(self) -> RunFolder:
        """Where it keeps what another start needs."""

    def stop(self) -> None:
        """End training; returns when it has ended."""


_runs: weakref.WeakSet[Neighbour] = weakref.WeakSet()


def claim_place(run: Neighbour) -> tuple[Neighbour, ...]:
    """Find out whose place a run takes that is about to start.

    :returns: active runs of the same experiment in the same swarm, which :func:`give_way` ends
    :raises TrainingError: if another run trains the same parameters at the moment
    """
    others = [other for other in _runs if other is not run and other.is_active]
    older = tuple(other for other in others if _is_same_place(other, run))
    for other in others:
        if other not in older and _share_parameters(other, run):
            raise TrainingError(
                f"the run {other.options.run_id!r} of the swarm {other.swarm.name!r} trains this very "
                f"{type(run.model).__name__} at the moment, and two runs cannot train one model. Stop that run first, "
                "or give this one a model of its own, such as copy.deepcopy(model)"
            )
    _runs.add(run)
    return older


def give_way(older: Sequence[Neighbour], newer: Neighbour) -> None:
    """End runs whose place another one takes, and their local peers; returns when they have ended."""
    for run in older:
        count = len(run.local_peers)
        leaving = f" with its {_peers_here(count)}" if count else ""
        logger.info(
            f"the run {run.options.run_id!r} stops{leaving}, and a newer one takes its place{_as_what(newer, run)}. "
            "Two runs train side by side if each has a name: Options(run_id=...)"
        )
        run.history.mark("run", "replaced by a newer one")
        run.stop()
        newer.history.mark("run", "took the place of an older one", breaks_trend=True)
    if left := left_behind(newer.swarm.local_peers, newer):  # such as those that were kept when their run stopped
        logger.info(f"{_peers_here(len(left))} of an older run of {newer.experiment!r} give way to a newer one")
        newer.swarm.local.remove_of_earlier_runs(newer)


def before(run: Neighbour) -> Neighbour | None:
    """The run of this process that has trained last under the very name of another one; ``None`` if none has."""
    name = run.options.run_id
    same = (other for other in _runs if other is not run and other.swarm is run.swarm and other.options.run_id == name)
    # one that has failed before it trained has nothing
    same = (other for other in same if other.is_active or other.kept_folder.checkpoint is not None)
    return max(same, key=lambda other: other.started_at, default=None)


def make_room(run: Neighbour) -> None:
    """End runs that train another model under the very name of a run that somebody is about to join."""
    name = run.options.run_id
    older = [other for other in _runs if other is not run and other.is_active and _is_same_place(other, run)]
    give_way([other for other in older if other.options.run_id == name and other.model is not run.model], run)


def _peers_here(count: int) -> str:
    return "peer on this machine" if count == 1 else f"{count} peers on this machine"


def _as_what(run: Neighbour, other: Neighbour) -> str:
    name = run.options.run_id
    if name == other.options.run_id:
        return ""
    if run.swarm.is_joined:
        return f" in the run {name!r}"
    return f" as {name!r}, a new run that begins with the weights of its own {type(run.model).__name__}"


def _is_same_place(one: Neighbour, other: Neighbour) -> bool:
    is_same = one.experiment == other.experiment or one.options.run_id == other.options.run_id
    return is_same and one.swarm is other.swarm


def _share_parameters(one: Neighbour, other: Neighbour) -> bool:
    own = {id(parameter) for parameter in one.model.parameters()}
    return any(id(parameter) in own for parameter in other.model.parameters())
