"""Averagers of peers that meet in twos, made in the process of the test, which keeps its handler of SIGINT."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def averager_of_two(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """One that is at work, and finds one other peer soon.

    :param kind: class of the averager, ours or hivemind's
    :param args: of it
    :param options: of it, beside what makes two meet
    """
    handler = signal.getsignal(signal.SIGINT)
    of_two = {"min_matchmaking_time": 3.0, "request_timeout": 1.0, "target_group_size": 2, "start": True}
    made = kind(*args, **{**of_two, **options})
    signal.signal(signal.SIGINT, handler)  # which plain hivemind has set to be ignored
    return made
