"""What a peer has seen of the others while it exchanged data with them in a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hivemind.p2p import PeerID


@dataclass
class ExchangeNotes:
    """Of the exchanges of one round, in the averager's process. Peers are told by their ids.

    :param unreached: those whose data, or whose averages, have not arrived
    :param refused: why what a peer has sent was not taken, in words
    :param weights: which a sender claims, and with which it counts
    """

    unreached: set[PeerID] = field(default_factory=set)
    refused: dict[PeerID, str] = field(default_factory=dict)
    weights: dict[PeerID, tuple[float, float]] = field(default_factory=dict)

    def take_in(self, other: ExchangeNotes) -> None:
        """Add those of another exchange of the same round."""
        self.unreached |= other.unreached
        self.refused |= other.refused
        self.weights |= other.weights

    @property
    def claimed(self) -> Mapping[PeerID, float]:
        """The weights that senders claim."""
        return {peer: claimed for peer, (claimed, _) in self.weights.items()}

    def lines(self, implausible: Collection[PeerID] = ()) -> Mapping[PeerID, str]:
        """What to say of those of whom something was not taken.

        Nothing of a weight that is bounded in all honesty: reports are older than what a peer puts into a round.

        :param implausible: those whose weight no honest peer has
        """
        lines = {peer: f"{peer} is left out of a round: {reason}" for peer, reason in self.refused.items()}
        for peer in implausible:
            claimed, counted = self.weights[peer]
            words = f"counts with a weight of {counted:.4g} in a round, not with the {claimed:.4g} that it claims"
            why = "a peer's weight is the samples that it has reported, and 1 for its state"
            lines.setdefault(peer, f"{peer} {words}: {why}")
        return lines
