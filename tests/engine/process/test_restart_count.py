"""The bound on how often something is started anew."""

from __future__ import annotations

import pytest

from hivenb.engine.process.restart_count import MOST_RESTARTS, RESTARTS_WITHIN, RestartCount
from hivenb.errors import ProcessEndedError


def test_what_ends_again_and_again_is_given_up_but_not_for_good() -> None:
    now = 0.0
    count = RestartCount(lambda: now)
    for _ in range(MOST_RESTARTS):
        count.add("the daemon has ended")
        now += 1.0
    with pytest.raises(ProcessEndedError, match="the daemon has ended, after it had been started anew 3 times within"):
        count.add("the daemon has ended")
    assert len(count) == MOST_RESTARTS
    now = RESTARTS_WITHIN
    count.add("the first of them is long ago")
    with pytest.raises(ProcessEndedError):
        count.add("but not the second")
    count.forget()
    count.add("as asked for")
