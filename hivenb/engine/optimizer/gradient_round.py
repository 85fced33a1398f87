"""What became of a round that averages gradients: with how many, why it failed, whether this peer was left out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hivemind.averaging.control import AveragingStage

from hivenb.engine.optimizer.epoch_report import EpochReport
from hivenb.engine.rounds.round import Round

#: Seconds after which a peer that looks for others to average gradients with asks itself whether it was left out.
LEFT_OUT_AFTER = 1.0

#: Seconds after which it asks once more, as somebody may have begun to look at that moment.
ASK_AGAIN_AFTER = 0.5


class MissedRound(Exception):
    """The others have ended an epoch whose gradients this peer was about to average with them."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round came to at this peer.

    :param group_size: peers that averaged together, this one included
    :param failed: why it failed; ``None`` if it did not, or there was nobody to average with
    :param refused: why what a peer has sent was not taken, in words, by the peer's id
    """

    group_size: int = 1
    failed: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def report(self, epoch: int, samples: int, seconds: float) -> EpochReport:
        """What the epoch came to that this round has ended, as :class:`EpochReport` has it."""
        return EpochReport(epoch, samples, self.group_size, seconds, self.failed, self.refused)


class CanBeAlone(Protocol):
    """An averager that knows whether it has met anybody."""

    def is_alone(self, epoch: float) -> bool:
        """Whether it looks for a group for the round of an epoch, and has met nobody."""


def outcome_of(control: Round, timeout: float) -> RoundOutcome:
    """Wait for a round.

    It has not failed if this peer or all others have left: then there was nobody to average with.

    :param timeout: ``averaging_timeout``, in seconds; a round that has not begun by then is given up
    """
    try:
        gathered = control.result(timeout)
        refused = {str(peer): reason for peer, reason in getattr(gathered, "refused", {}).items()}
        return RoundOutcome(len(gathered), refused=refused)
    except concurrent.futures.CancelledError:
        return RoundOutcome(
            failed=None if control.is_deserted else "given up: the others have gone on without this peer"
        )
    except (TimeoutError, concurrent.futures.TimeoutError):
        if control.stage is not AveragingStage.RUNNING_ALLREDUCE:
            control.cancel()
        return RoundOutcome(failed=f"not done within averaging_timeout={timeout} s")
    except Exception as e:
        return RoundOutcome(failed=repr(e))


def _has_succeeded(control: Round) -> bool:
    return control.done() and not control.cancelled() and control.exception() is None


def is_left_out(
    control: Round, averager: CanBeAlone, state_round: Round | None, oldest_epoch: Callable[[], int], timeout: float
) -> bool:
    """Wait until a round of gradients has a group, or is given up since the others have met without this peer.

    One that joins just then looks for them in vain, while they may wait for it: to average the state with them, which
    it does after the gradients, or to be ready for their next round.

    :param averager: of the gradients
    :param state_round: the round of the state that follows
    :param oldest_epoch: tells that of the others that can take part in rounds, as of now
    :param timeout: ``averaging_timeout``, in seconds
    :returns: whether it was given up
    """

    def finds_nobody(seconds: float) -> bool:
        """Whether, after so many seconds, it has nobody yet though all who could come have looked for it."""
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):  # is looked at by outcome_of
            control.result(seconds)
        if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
            return False
        have_met = (AveragingStage.AWAITING_TRIGGER, AveragingStage.RUNNING_ALLREDUCE)
        are_waiting = state_round is not None and (state_round.stage in have_met or _has_succeeded(state_round))
        is_over = oldest_epoch() > control.epoch
        return (are_waiting or is_over) and averager.is_alone(control.epoch)

    for _ in range(math.ceil(timeout / LEFT_OUT_AFTER)):
        if finds_nobody(LEFT_OUT_AFTER) and finds_nobody(ASK_AGAIN_AFTER):
            return control.cancel()
        if control.stage is not AveragingStage.LOOKING_FOR_GROUP:
            break
    return False
