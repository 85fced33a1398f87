"""A firewall as a router at home has it: whoever is behind it reaches everybody, and is reached by nobody else."""

from __future__ import annotations

import math

from network.packet import TCP, Flow

#: Seconds for which an answer is let in after the last packet of its flow, of TCP and of all else: UDP's are short.
TCP_REMEMBERED, REMEMBERED = 7200.0, 30.0


class Firewall:
    """Lets in what answers to something that went out, from the very address and port that it went to.

    Which is what the address translation of most routers means for who can be reached (RFC 4787: address and
    port-dependent filtering); here, addresses stay as they are.
    """

    def __init__(self) -> None:
        self._known_until: dict[Flow, float] = {}

    def note_sent(self, flow: Flow, now: float) -> None:
        """A packet goes out."""
        self._remember(flow.back, now)

    def lets_in(self, flow: Flow, now: float) -> bool:
        """Whether a packet from outside is let through; if so, its flow goes on."""
        if self._known_until.get(flow, -math.inf) < now:
            self._known_until.pop(flow, None)
            return False
        self._remember(flow, now)
        return True

    def _remember(self, flow: Flow, now: float) -> None:
        self._known_until[flow] = now + (TCP_REMEMBERED if flow.protocol == TCP else REMEMBERED)
