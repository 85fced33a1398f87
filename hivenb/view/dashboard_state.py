"""What the dashboard shows at one moment, read from a run once per frame, so that text and widgets always agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hivenb.figures.advice import Advice, advise
from hivenb.figures.history import Snapshot
from hivenb.run.local_peer_count import LocalCount, local_peer_count
from hivenb.run.script import script_of

if TYPE_CHECKING:
    from hivenb.options.options import Options
    from hivenb.run.status import RunStatus
    from hivenb.run.training import TrainingRun
    from hivenb.swarm.roster import Member


@dataclass(frozen=True)
class OptionsState:
    """The options of a run, and what has become of those that were asked for.

    :param in_force: what the run trains with
    :param pending: options that were asked for and are not in force yet
    :param pending_epoch: from which on those of them count on which all peers have to agree, if that is decided
    :param error: why the options that were asked for last could not be put in force
    :param locked: why what all peers have to agree on cannot be changed here, if it cannot
    :param code: the plain Lightning script that does what the run does
    """

    in_force: Options
    pending: Options | None
    pending_epoch: int | None
    error: str | None
    locked: str | None
    code: str

    @classmethod
    def of(cls, run: TrainingRun) -> OptionsState:
        """Those of a run at this moment."""
        error = run.options_error
        return cls(
            run.options,
            run.pending_options,
            run.pending_epoch,
            None if error is None else f"{type(error).__name__}: {error}",
            run.why_not_host,
            script_of(run, is_active=run.status.state.is_active),
        )


@dataclass(frozen=True)
class DashboardState:
    """All that one frame shows.

    :param status: of the run
    :param snapshot: of its history
    :param members: peers of the run, as last seen
    :param local: how many peers there are on this machine
    :param local_ids: which of the members they are: number by id
    :param options: of the run
    :param log: its last lines, newest last
    """

    status: RunStatus
    snapshot: Snapshot
    members: tuple[Member, ...]
    local: LocalCount
    local_ids: Mapping[str, int]
    options: OptionsState
    log: tuple[str, ...]

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What the figures suggest to change; worked out only when a view asks for it."""
        return advise(self.snapshot, self.options.in_force)

    @classmethod
    def of(cls, run: TrainingRun) -> DashboardState:
        """The state of this moment, from what the run knows already: waits for neither swarm nor device."""
        # before the history: a change is marked there first, and advice on what it has replaced would be outdated
        options = OptionsState.of(run)
        return cls(
            run.status,
            run.history.snapshot(),
            run.roster.members,
            local_peer_count(run).now,
            {peer.peer_id: peer.number for peer in run.swarm.local_peers if peer.peer_id is not None},
            options,
            tuple(run.log),
        )
