"""What those who help an optimizer have to know of it."""

from __future__ import annotations

from typing import Any, Protocol


class Participant(Protocol):
    """An optimizer that takes part in rounds; all of this may change from step to step."""

    dht: Any
    averaging_timeout: float
    load_state_timeout: float
    matchmaking_time: float
    average_state_every: int
    auxiliary: bool
    delay_grad_averaging: bool
    delay_state_averaging: bool
    delay_optimizer_step: bool
    use_local_updates: bool
    state_averager: Any
    #: ``None`` with local updates
    grad_averager: Any
    tracker: Any
    rounds: Any

    @property
    def local_epoch(self) -> int:
        """The epoch of the swarm that it works on."""

    def is_synchronized_with_peers(self) -> bool:
        """Whether it is no more than an epoch behind the others."""

    def begin_epoch(self, epoch: int) -> None:
        """Be at an epoch of the swarm with nothing accumulated yet; to be called while the tracker is paused."""
