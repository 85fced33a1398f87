"""What a reducer makes of senders that leave or send what is no part: the average of the others, at once."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest
import torch
from hivemind.averaging.partition import AllreduceException

from hivenb.engine.exchange.reducer import FaultTolerantReducer, PartRules
from hivenb.engine.trust.aggregation import RefusedPart

SHAPE = torch.Size([2])


def reduce(*parts: torch.Tensor, weights: tuple[float, ...] = ()) -> tuple[list[float], list]:
    """What the senders of those parts get, and who of them was refused, each as the runner would treat it."""
    refused: list[tuple[int, str]] = []

    async def run() -> list[float]:
        reducer = FaultTolerantReducer(
            [SHAPE],
            len(parts),
            PartRules([torch.float32], on_refused=lambda *told: refused.append(told)),
        )

        async def send(sender: int) -> torch.Tensor | None:
            try:
                return await reducer.accumulate_part(sender, 0, parts[sender], (weights or (1.0,) * len(parts))[sender])
            except AllreduceException:
                reducer.on_sender_failed(sender)
                return None

        found = await asyncio.wait_for(asyncio.gather(*map(send, range(len(parts)))), 10)
        return next(average for average in found if average is not None).tolist()

    return asyncio.run(run()), refused


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [0.0, math.inf], [1e30, 0.0], [0.0]], ids=str)
def test_nobody_waits_for_what_could_not_be_added(place: int, bad: list[float]) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    parts.insert(place, torch.tensor(bad))
    average, refused = reduce(*parts)
    assert average == [2.0, 3.0]
    assert [sender for sender, _ in refused] == [place]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_none_counts_for_nothing(weight: float) -> None:
    average, refused = reduce(torch.ones(2), torch.full((2,), 3.0), weights=(1.0, weight))
    assert average == [1.0, 1.0]
    assert len(refused) == 1


def test_one_that_has_gone_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """hivemind warns of its share in percent, in each round that somebody leaves."""

    async def run() -> asyncio.Future:
        reducer = FaultTolerantReducer([SHAPE], 2, PartRules([torch.float32]))
        waiting = asyncio.ensure_future(reducer.accumulate_part(0, 0, torch.ones(2)))
        while not reducer.current_part_accumulated_from:
            await asyncio.sleep(0)
        reducer.finalize()
        await asyncio.wait({waiting}, timeout=10)
        return waiting

    with caplog.at_level(logging.INFO):
        assert asyncio.run(run()).cancelled()  # and nobody waits for it any longer
    assert not caplog.records


def test_where_nobody_has_a_weight_the_average_is_one_of_numbers() -> None:
    average, refused = reduce(torch.ones(2), torch.full((2,), 3.0), weights=(0.0, 0.0))
    assert average == [2.0, 2.0]
    assert not refused


def test_beside_any_other_a_weight_of_zero_is_one() -> None:
    assert reduce(torch.full((2,), 0.1), torch.full((2,), 1e6), weights=(3.0, 0.0))[0] == torch.full((2,), 0.1).tolist()


def test_a_part_that_asks_for_gradients_costs_nobody_the_average() -> None:
    average, _ = reduce(torch.ones(2), torch.ones(2, requires_grad=True))
    assert average == [1.0, 1.0]


def test_what_a_sender_claims_beyond_its_largest_weight_does_not_count_and_is_told() -> None:
    told_weights: list[tuple[int, float, float]] = []

    async def run() -> list[float]:
        rules = PartRules(largest_weights=[math.inf, 3.0], on_weight=lambda *told: told_weights.append(told))
        reducer = FaultTolerantReducer([SHAPE], 2, rules)
        parts = torch.zeros(2), torch.full((2,), 8.0)
        sent = [
            reducer.accumulate_part(n, 0, part, weight)
            for n, part, weight in zip((0, 1), parts, (1.0, 1e9), strict=True)
        ]
        return (await asyncio.gather(*sent))[0].tolist()

    assert asyncio.run(run()) == [6.0, 6.0]
    assert told_weights == [(0, 1.0, 1.0), (1, 1e9, 3.0)]


def test_a_part_out_of_turn_is_refused_and_counts_for_nothing() -> None:
    refused: list[tuple[int, str]] = []

    async def run() -> list[float]:
        reducer = FaultTolerantReducer([SHAPE] * 2, 2, PartRules(on_refused=lambda *told: refused.append(told)))
        first = asyncio.ensure_future(reducer.accumulate_part(0, 0, torch.ones(2)))
        await asyncio.sleep(0)
        with pytest.raises(RefusedPart):
            await reducer.accumulate_part(0, 0, torch.full((2,), 9.0))
        with pytest.raises(RefusedPart):
            await reducer.accumulate_part(1, 1, torch.full((2,), 9.0))
        await reducer.accumulate_part(1, 0, torch.full((2,), 3.0))
        return (await asyncio.wait_for(first, 10)).tolist()

    assert asyncio.run(run()) == [2.0, 2.0]
    assert [sender for sender, _ in refused] == [0, 1]


def test_weights_round_no_number_that_came_in_a_short_type() -> None:
    """Three times 1 + 1/128 is no number of bfloat16; four of them are one."""
    part = torch.full((2,), 1 + 1 / 128, dtype=torch.bfloat16)
    average, _ = reduce(part, part, weights=(3.0, 1.0))
    assert average == [1 + 1 / 128] * 2
