"""Where a run stands, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from hivenb.engine.progress.tracker import seconds_left

if TYPE_CHECKING:
    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.run.recorder import Recorder


class RunState(str, Enum):
    """Where a run stands."""

    READY = "ready"
    STARTING = "starting"
    TRAINING = "training"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_active(self) -> bool:
        """Whether the Trainer's thread is at work, or about to be."""
        return self in (RunState.STARTING, RunState.TRAINING, RunState.PAUSED, RunState.STOPPING)


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment.

    :param state: where it stands
    :param epoch: swarm epochs that are done
    :param step: batches that this peer has trained on
    :param samples: samples that the swarm has accumulated towards the next swarm epoch
    :param target_batch_size: samples that make a swarm epoch
    :param eta_seconds: seconds until the next swarm epoch, as estimated; ``None`` if it cannot be told
    :param num_peers: peers in the run, this one included while it trains
    :param samples_per_second: speed of this peer
    :param swarm_samples_per_second: speed of all peers together
    :param loss: newest training loss; ``None`` before the first
    :param error: what went wrong, in words; ``None`` if nothing did
    :param origin: with what it has begun, as ``run.origin`` says it
    :param trained_epochs: swarm epochs that have passed while it trained; it may have joined at a later one
    :param elsewhere: how many peers of the swarm train in other runs, by their names; this machine's are left out
    :param skipped_batches: batches of this peer that count for nothing, as their gradients were not finite
    :param excluded_peers: peers for which no round of this peer waits, by their ids, with the reasons
    """

    state: RunState
    epoch: int
    step: int
    samples: int
    target_batch_size: int
    eta_seconds: float | None
    num_peers: int
    samples_per_second: float
    swarm_samples_per_second: float
    loss: float | None
    error: str | None
    skipped_batches: int = 0
    excluded_peers: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    trained_epochs: int = 0


def status_of(
    state: RunState,
    error: BaseException | None,
    *,
    recorder: Recorder,
    target_batch_size: int,
    progress: Any,
    peers: Sequence[PeerInfo],
    loss: float | None,
) -> RunStatus:
    """The status of a run, put together from those who know.

    :param recorder: of the Trainer's, which counts epochs and batches
    :param progress: the swarm's, as hivemind's tracker has it; ``None`` while there is none
    :param peers: as last seen
    """
    return RunStatus(
        state=state,
        epoch=recorder.epoch,
        step=recorder.steps,
        samples=0 if progress is None else progress.samples_accumulated,
        target_batch_size=target_batch_size,
        eta_seconds=None if progress is None else seconds_left(progress),
        num_peers=max(len(peers), 1 if state is RunState.TRAINING else 0),
        samples_per_second=next((p.samples_per_second for p in peers if p.is_self), 0.0),
        swarm_samples_per_second=sum(p.samples_per_second for p in peers),
        loss=loss,
        error=None if error is None else f"{type(error).__name__}: {error}",
        skipped_batches=recorder.skipped_batches,
        trained_epochs=recorder.epochs,
    )


def who_trains_elsewhere(peers: Mapping[str, int], own: str) -> str:
    """That others train another run in the swarm, in words.

    :param peers: how many train in each, by its name; at least one
    :param own: name of the run that is looked at
    """
    total = sum(peers.values())
    who = "1 peer trains" if total == 1 else f"{total:,} peers train"
    named = ", ".join(map(repr, sorted(peers)))
    return (
        f"{who} another run in this swarm, {named}, and not {own!r}. Who joins by swarm.invite as it is now trains here"
    )
