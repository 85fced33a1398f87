"""A model in pieces, of which each round synchronizes one, so that no round sends all of it at once.

Streaming DiLoCo (Douillard et al. 2025, https://arxiv.org/abs/2501.18512) takes pieces of layers that are apart from
each other. Here a piece has tensors from anywhere, so many that all pieces are about as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Fragments:
    """The pieces, and the samples that a peer has put into each since that was synchronized.

    :param sizes: numbers in each tensor of the model
    :param count: of pieces; there are no more than tensors
    """

    def __init__(self, sizes: Sequence[int], count: int):
        pieces: list[list[int]] = [[] for _ in range(max(1, min(count, len(sizes))))]
        filled = [0] * len(pieces)
        for tensor in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            smallest = filled.index(min(filled))
            pieces[smallest].append(tensor)
            filled[smallest] += sizes[tensor]
        #: indices of the tensors of each piece
        self.members = tuple(tuple(sorted(piece)) for piece in pieces)
        #: of this peer, in each piece
        self.samples = [0.0] * len(pieces)

    def __len__(self) -> int:
        return len(self.members)

    def of_round(self, epoch: int) -> int:
        """The piece that the round of an epoch synchronizes: each in its turn."""
        return epoch % len(self)

    def count(self, samples: float) -> None:
        """Know of samples that were put into the model."""
        self.samples = [before + samples for before in self.samples]

    def discount(self, sent: Sequence[float], pieces: Iterable[int]) -> None:
        """Know that samples were averaged; there may be more by now.

        :param sent: of each piece, when it was sent
        :param pieces: those that were averaged
        """
        for piece in pieces:
            self.samples[piece] -= sent[piece]

    def forget(self) -> None:
        """Begin with no samples in any piece."""
        self.samples = [0.0] * len(self)
