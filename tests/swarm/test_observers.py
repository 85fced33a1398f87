"""Who looks at a swarm hears of its end, and is not kept by it."""

from __future__ import annotations

import gc

from hivenb.swarm.swarm import Observers, Swarm


class Looking:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_it_keeps_nobody_alive() -> None:
    observers, gone, there = Observers(), Looking(), Looking()
    observers.add(gone)
    observers.add(there)
    del gone
    gc.collect()
    observers.close()
    assert there.closed == 1
    observers.forget()
    observers.close()
    assert there.closed == 1


def test_a_swarm_that_is_closed_closes_them(swarm: Swarm) -> None:
    looking = Looking()
    swarm.observers.add(looking)
    swarm.close()
    assert looking.closed == 1
    assert not swarm.is_open
