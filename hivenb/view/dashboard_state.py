"""What the dashboard shows at one moment, read from a run once per frame, so that text and widgets always agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hivenb.figures.advice import Advice, advise
from hivenb.figures.history import Snapshot
from hivenb.run.local_peer_count import LocalCount, local_peer_count
from hivenb.run.training_length import Length
from hivenb.view.empty_states import Situation

if TYPE_CHECKING:
    from hivenb.options.options import Options
    from hivenb.run.status import RunStatus
    from hivenb.run.training import TrainingRun
    from hivenb.swarm.members import Member


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

    def asks_for(self, changes: Mapping[str, Any]) -> bool:
        """Whether these changes were asked for, and are not in force yet."""
        pending = self.pending
        return pending is not None and all(getattr(pending, name) == value for name, value in changes.items())

    @classmethod
    def of(cls, run: TrainingRun) -> OptionsState:
        """Those of a run at this moment."""
        from hivenb.run.script import script_of  # needs Lightning, which is loaded by the time there is a run

        error = run.options_error
        return cls(
            run.options,
            run.pending_options,
            run.pending_epoch,
            None if error is None else f"{type(error).__name__}: {error}",
            run.not_host_reason,
            script_of(run, is_active=run.status.state.is_active),
        )


@dataclass(frozen=True)
class RunHeader:
    """What of a run only its header shows.

    :param name: of the run
    :param length: how long it has trained, and how far it is
    :param swarm_is_open: otherwise the run cannot be started any more
    :param snapshot_epoch: of the last good state, to which it can return; ``None`` while there is none
    """

    name: str
    length: Length = field(default_factory=Length)
    swarm_is_open: bool = True
    snapshot_epoch: int | None = None


@dataclass(frozen=True)
class LocalPeersNow:
    """The peers on this machine.

    :param count: how many there are, and how many there are to be
    :param states: of each of them, by its number
    :param ids: which of the members they are: number by id
    :param ended: why those take part no more that have not left as they were told to, by their numbers
    """

    count: LocalCount
    states: Mapping[int, str] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: TrainingRun) -> LocalPeersNow:
        """Those of a run at this moment, and the ids of all of its swarm."""
        peers, own = run.swarm.local_peers, run.local_peers
        return cls(
            local_peer_count(run).now,
            {peer.number: peer.state for peer in own},
            {peer.peer_id: peer.number for peer in peers if peer.peer_id is not None},
            {peer.number: why for peer in own if (why := peer.why_ended)},
        )


@dataclass(frozen=True)
class DashboardState:
    """All that one frame shows.

    :param status: of the run
    :param header: of the run
    :param snapshot: of its history
    :param members: peers of the run, as last seen
    :param local: peers on this machine
    :param options: of the run
    :param log: its last lines, newest last
    :param blocked: ids of the peers that a person has blocked
    :param can_ban: whether this peer can ban others from the swarm
    """

    status: RunStatus
    header: RunHeader
    snapshot: Snapshot
    members: tuple[Member, ...]
    local: LocalPeersNow
    options: OptionsState
    log: tuple[str, ...]
    blocked: tuple[str, ...] = ()
    can_ban: bool = False

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What the figures suggest to change; worked out only when a view asks for it."""
        return advise(self.snapshot, self.options.in_force)

    @cached_property
    def situation(self) -> Situation:
        """What decides what is said where there is nothing to see yet."""
        count = self.local.count
        return Situation(
            state=str(self.status.state.value),
            # all that matters of it is whether a loss could be there
            steps=min(self.status.step, 2) if "loss" not in self.snapshot.series else 0,
            helps=self.options.in_force.auxiliary,
            local=count.there,
            coming=max(0, count.wanted - count.there),
            swarm_is_open=self.header.swarm_is_open,
        )

    @classmethod
    def of(cls, run: TrainingRun) -> DashboardState:
        """The state of this moment, from what the run knows already: waits for neither swarm nor device."""
        # before the history: a change is marked there first, and advice on what it has replaced would be outdated
        options = OptionsState.of(run)
        status, snapshot = run.status, run.history.snapshot()
        now = cls(
            status,
            RunHeader(run.options.run_id, run.length, run.swarm.is_open, run.snapshot_epoch),
            snapshot,
            run.members,
            LocalPeersNow.of(run),
            options,
            tuple(run.log_lines),
        )
        return replace(now, blocked=run.swarm.blocked, can_ban=run.swarm.can_ban)
