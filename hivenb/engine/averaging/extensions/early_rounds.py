"""A round of the state that is held before the step of its epoch, and not after it.

What is averaged are the parameters from before the step. All in the group then step from the same parameters, with the
same gradients; what is left of a difference, such as what a codec makes of the gradients, is averaged an epoch later.
Nothing changes them in an epoch, so that they are exchanged as soon as the group has met, while all compute. A module's
buffers change with each batch: where there are some, all is exchanged when the epoch is over, beside the gradients, or
after the step if it is large.

A peer offers that on a long line, and where rounds after the step take long: on a narrow line, or with a large state;
and on any line where the state is small, gradients are sent as they are, and the rounds before found no difference
between peers, so that none is left. A group does so if all in it have offered. Otherwise, with a helper, one of plain
hivemind or one that averages in the background, the round is held after the step, as hivemind does. So do peers that
find that they step differently, with the same gradients: their moments differ, as after a step that one made alone.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hivenb.engine.averaging.extensions.extension import Extension
from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.group_records import AT_ONCE, EARLY
from hivenb.errors import ProcessEndedError

#: Seconds between two looks whether a round is over that has not said whether it began early.
_LOOK_AGAIN = 0.1

#: Seconds of a round after the step from which on it is worth to hold it before. Peers then differ for an epoch by what
#: their steps made of a codec, and what the module changes meanwhile is kept in memory.
LONG_ROUND = 0.25

#: Rounds of which the quickest one is not of a busy moment.
_ENOUGH = 3

#: Numbers of a state that is exchanged beside the gradients, at most. With more of them, the bytes take longer than the
#: round trip that this saves, and on a slow line the one would keep the other waiting. As many are looked at for a
#: difference.
MOST_BESIDE_GRADIENTS = 250_000

#: Share of the parameters' norm up to which what peers differ by is rounding. Where they step with the same gradients
#: and the same moments, it is no more.
ROUNDING = 1e-6

#: Rounds in a row in which peers differ by more, after which they step differently: one may be of their beginning.
_IN_A_ROW = 2

#: Rounds after which it is looked at again whether they still do: moments forget slowly.
_PAUSE = 64


class EarlyRounds(Extension):
    """Rounds of an averager of the state that may begin before the step of their epoch.

    :param at_once: whether nothing that is exchanged changes in an epoch, so that a round may begin with its group
    """

    def __init__(self, at_once: bool):
        self.at_once = at_once
        #: a round that may have begun early, and the seconds that it may take
        self._pending: tuple[Round, float] | None = None
        #: seconds of the latest rounds
        self._seconds: deque[float] = deque(maxlen=_ENOUGH)
        #: early rounds in a row in which peers differed, and rounds that are still to be held after their step for that
        self._differing, self._pause = 0, 0
        # for both processes
        self._offers = torch.zeros(1, dtype=torch.bool).share_memory_()

    # -- in the process that trains -----------------------------------------------------------------------------

    def suits(self, numbers: float) -> bool:
        """Whether a round may begin before the step.

        :param numbers: that are exchanged
        """
        return self.at_once or numbers <= MOST_BESIDE_GRADIENTS

    def costs_little(self, numbers: float) -> bool:
        """Whether a round that begins with its group costs next to nothing: it is over while all compute, and small.

        Not where peers step differently, as their moments do after local updates: after such a step, their parameters
        are not the same.

        :param numbers: that are exchanged
        """
        return self.at_once and not self.peers_differ and numbers <= MOST_BESIDE_GRADIENTS

    @property
    def peers_differ(self) -> bool:
        """Whether rounds of late have found other differences between peers than those of rounding."""
        return self._pause > 0

    def note_difference(self, share: float) -> None:
        """Know by how much a round has changed this peer's parameters.

        :param share: of their norm
        """
        self._differing = self._differing + 1 if share > ROUNDING else 0
        if self._differing >= _IN_A_ROW:
            self._differing, self._pause = 0, _PAUSE

    def note_end(self, control: Round) -> None:
        """Know how long a round has taken since its group was let begin, or began. From any thread."""
        if control.let_begin_at is not None and not control.cancelled() and control.exception() is None:
            self._seconds.append(time.monotonic() - control.let_begin_at)

    def note_in_vain(self) -> None:
        """Know that a group has not held the round before the step that this peer had offered.

        The line may be wide, and the rounds long since another peer is late at its steps and does not offer: this peer
        would copy its state in each epoch, for nothing.
        """
        self._seconds.clear()

    @property
    def rounds_take_long(self) -> bool:
        """Whether a round that can begin with its group took long of late, whatever the line is."""
        return self.at_once and len(self._seconds) == _ENOUGH and min(self._seconds) >= LONG_ROUND

    def offer(self, offers: bool) -> None:
        """Say whether this peer may hold the round that is scheduled next before its step, if the others may."""
        self._offers.fill_(offers)
        self._pause = max(0, self._pause - 1)

    def withdraw(self) -> None:
        """Offer nothing in the round that comes next, which nobody has scheduled: it comes after the step."""
        self._offers.fill_(False)

    @property
    def has_begun(self) -> bool:
        """Whether a round was let begin early whose outcome the next step takes over."""
        return self._pending is not None

    def expect(self, control: Round, timeout: float) -> None:
        """Know of a round that was let begin; the next step waits for it.

        :param timeout: seconds that the step waits for its averages
        """
        control.is_due = True
        self._pending = control, timeout

    def pop(self) -> tuple[Round, float] | None:
        """The round that was let begin, and the seconds that it may take; the next step is about to take it over."""
        pending, self._pending = self._pending, None
        return pending

    # -- in the averager's own process --------------------------------------------------------------------------

    def fields(self) -> Sequence[Any]:
        if not bool(self._offers):
            return ()
        return [AT_ONCE if self.at_once else EARLY]


def has_begun(control: Round, timeout: float) -> bool:
    """Whether a round has begun early, once that is known.

    :param control: its averager was asked; there is no answer if it was over, or has found no group yet
    :param timeout: seconds after which a round without a group is given up
    """
    answer, deadline = control.begins_early, time.monotonic() + timeout
    while answer is not None and (not control.done() or answer.done()):
        try:
            return bool(answer.result(_LOOK_AGAIN))
        except (TimeoutError, concurrent.futures.TimeoutError):
            if time.monotonic() > deadline:
                control.cancel()
        except ProcessEndedError:
            break
    return False
