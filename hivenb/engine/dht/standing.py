"""Whether the others let this peer in, as all its processes see it: one to whom nobody talks has to know why."""

from __future__ import annotations

import ctypes
import time
from multiprocessing.sharedctypes import RawArray

from hivenb.engine.dht.guard import EXPIRED, SHOWN_OUT

#: Seconds for which nobody has answered this peer, and refusals meanwhile, until it is known to be out: a member that
#: says so falsely is not believed while any other one answers.
UNANSWERED_FOR, REFUSALS_UNTIL = 5.0, 2

_REASONS = (SHOWN_OUT, EXPIRED)


class Standing:
    """What the others have said to the requests of this peer. The DHT's process writes, all read."""

    def __init__(self) -> None:
        self._answered_at = RawArray(ctypes.c_double, [time.monotonic()])
        self._refusals = RawArray(ctypes.c_int, [0, 0])

    def note_answer(self) -> None:
        """Another peer has answered."""
        self._refusals[0], self._answered_at[0] = 0, time.monotonic()

    def note_refusal(self, reason: str) -> None:
        """Another peer has not, and has said why."""
        if reason in _REASONS:
            self._refusals[1] = _REASONS.index(reason)
            self._refusals[0] += 1

    @property
    def why_out(self) -> str | None:
        """Why nobody lets this peer in any more; ``None`` as long as somebody does."""
        is_out = self._refusals[0] >= REFUSALS_UNTIL and time.monotonic() - self._answered_at[0] > UNANSWERED_FOR
        return _REASONS[self._refusals[1]] if is_out else None
