"""Each host's line to the middle of the network: when a packet that goes in comes out, if it does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Line:
    """What a line is like.

    :param delay: seconds from the host to the middle, and from there to the host
    :param jitter: seconds by which a packet may take longer, evenly spread; packets do not overtake each other
    :param up: bits a second that the host can send
    :param down: bits a second that it can receive
    :param loss: share of the packets that get lost, each way
    :param queue: seconds of packets that wait at most in front of the line, each way; what comes then is dropped
    :param is_cut: whether nothing goes through
    :param is_walled: whether nobody reaches the host to whom it has not sent something before, as behind a router at
      home
    :param is_translated: whether the host has an address of its own there, and the others see that of the router
    :param is_symmetric: whether the router shows it under another port to each whom it talks to
    """

    delay: float = 0.0
    jitter: float = 0.0
    up: float = 1e9
    down: float = 1e9
    loss: float = 0.0
    queue: float = 0.3
    is_cut: bool = False
    is_walled: bool = False
    is_translated: bool = False
    is_symmetric: bool = False

    @property
    def lets_nobody_in(self) -> bool:
        """Whether it has a wall; whoever translates addresses has one."""
        return self.is_walled or self.is_translated

    def __or__(self, changes: dict[str, object]) -> Line:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


class Direction:
    """One way of a line, with what is on it."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._free_at = self._last_at = 0.0

    def arrival(self, now: float, size: int, line: Line, rate: float) -> float | None:
        """When a packet is at the other end; ``None`` if it gets lost.

        :param now: when it comes to the line, in seconds; never before the packet before it
        :param size: in bytes
        :param line: as it is at present
        :param rate: bits a second of this way
        """
        if line.is_cut or self._chance.random() < line.loss:
            return None
        begins = max(now, self._free_at)
        if begins - now > line.queue:
            return None
        self._free_at = begins + 8 * size / rate
        jittered = self._free_at + line.delay + self._chance.random() * line.jitter
        self._last_at = max(self._last_at, jittered)
        return self._last_at
