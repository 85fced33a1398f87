"""A model in pieces: about as large, alike at all peers, and each in its turn."""

from __future__ import annotations

import pytest

from hivenb.engine.averaging.extensions.outer_optimizer import Fragments


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_tensor_is_in_one_piece_and_pieces_are_about_as_large(count: int) -> None:
    sizes = [100, 7, 50, 50, 30, 20, 1, 99, 3, 40]
    pieces = Fragments(sizes, count).members
    assert len(pieces) == count
    assert sorted(tensor for piece in pieces for tensor in piece) == list(range(len(sizes)))
    numbers = [sum(sizes[tensor] for tensor in piece) for piece in pieces]
    assert max(numbers) <= sum(sizes) / count + max(sizes) / 2
    assert Fragments(sizes, count).members == pieces


def test_there_are_no_more_pieces_than_tensors() -> None:
    assert Fragments([5, 6], 9).members == ((1,), (0,))


def test_each_has_its_turn() -> None:
    fragments = Fragments([1, 1, 1], 3)
    assert [fragments.of_round(epoch) for epoch in range(4)] == [0, 1, 2, 0]


def test_samples_are_counted_until_the_piece_was_averaged() -> None:
    fragments = Fragments([1, 1], 2)
    fragments.count(8)
    sent = list(fragments.samples)
    fragments.count(2)  # while the round is under way
    fragments.discount(sent, [1])
    assert fragments.samples == [10, 2]
    fragments.forget()
    assert fragments.samples == [0, 0]
