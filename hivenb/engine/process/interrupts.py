"""Who gets the interrupt of a cell: the main thread, and nobody else.

Jupyter's button sends SIGINT to the process, and Linux lets any thread take it that does not hold it back and just
looks at its signals, as one does that starts another thread. Python then notes the interrupt, but nothing wakes the
main thread, and a cell that sleeps sleeps on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from hivenb._interrupts import interrupts_blocked


class BackgroundThread(threading.Thread):
    """A daemon thread that leaves interrupts to the main thread, as do the threads that come of it.

    :param target: what it does
    :param name: what it is called
    :param args: of the target
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        with interrupts_blocked():
            super().start()
