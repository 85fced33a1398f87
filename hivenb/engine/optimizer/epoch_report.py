"""What an epoch of the swarm came to, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EpochReport:
    """What one epoch of the swarm came to at this peer.

    :param epoch: the epoch that has just begun; also the number of global steps made so far
    :param samples: samples that this peer has put in
    :param group_size: peers that averaged gradients with this one, itself included; 1 when it was alone or the
      round failed. With ``delay_grad_averaging``, in the round before: this one has just begun
    :param seconds: for which this peer's training stood still since the epoch before: all that its steps took besides
      computing gradients, the transition to this epoch included
    :param failed: why the round of gradient averaging failed; ``None`` if it did not
    :param refused: why what a peer has sent in that round was not taken, in words, by the peer's id
    """

    epoch: int
    samples: int
    group_size: int
    seconds: float
    failed: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
