"""What a new run means for those that train already: one of its name gives way, and no two train one model.

hivemind allows one run of a name for each DHT, and two Trainers would compute gradients of one module at a time.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Protocol

from hivenb._fresh_locks import free_in_children
from hivenb.errors import TrainingError
from hivenb.peers.local_peers import left_behind
from hivenb.run.run_in_swarm import RunInSwarm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hivenb.peers.local_peer import LocalPeer

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

    def stop(self) -> None:
        """End training; returns when it has ended."""


_runs: weakref.WeakSet[Neighbour] = weakref.WeakSet()


def claim_place(run: Neighbour) -> tuple[Neighbour, ...]:
    """Find out whose place a run takes that is about to start, and warn that they end.

    :returns: active runs of the same name in the same swarm, which :func:`give_way` ends
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
    for other in older:
        count = len(other.local_peers)
        leaving = f", and its {count} local peers leave" if count else ""
        warnings.warn(
            f"a run named {run.options.run_id!r} trains in this swarm already: it stops{leaving}, and this one takes "
            "its place. Two runs train side by side if each has a name: Options(run_id=...)",
            stacklevel=3,
        )
    left = len(left_behind(run.swarm.local_peers, run)) - sum(len(other.local_peers) for other in older)
    if left > 0:
        warnings.warn(
            f"{left} local peers of an older run named {run.options.run_id!r} are still in this swarm: they leave, as "
            "this run takes its place",
            stacklevel=3,
        )
    _runs.add(run)
    return older


def give_way(older: Sequence[Neighbour], newer: Neighbour) -> None:
    """End runs whose place another one takes, and local peers of that name; returns when they have ended."""
    for run in older:
        logger.warning(f"the run {run.options.run_id!r} stops, as a newer one of the same name takes its place")
        run.history.mark("run", "replaced by a newer one")
        run.stop()
        newer.history.mark("run", "took the place of an older one")
    newer.swarm.remove_left_behind(newer)


def _is_same_place(one: Neighbour, other: Neighbour) -> bool:
    return one.swarm is other.swarm and one.options.run_id == other.options.run_id


def _share_parameters(one: Neighbour, other: Neighbour) -> bool:
    own = {id(parameter) for parameter in one.model.parameters()}
    return any(id(parameter) in own for parameter in other.model.parameters())
