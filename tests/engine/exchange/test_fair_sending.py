"""Parts are sent to all receivers evenly: whoever is ahead waits, and for nobody for ever."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from fuzzing.averager_without_process import EVIL, GOOD, OWN, anew, gathered, run, runner_of, step
from hivemind.averaging.group_info import GroupInfo

from hivenb.engine.exchange import sending as fair_sending
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.exchange.sending import LEAD, FairSending

#: Seconds for what takes a moment, or for ever.
LONGEST_WAIT = 15.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_sending, "LONGEST_WAIT", 600.0)


async def send(sending: FairSending, receiver: str, count: int) -> None:
    for _ in range(count):
        await sending.turn_of(receiver)


async def settled(*tasks: asyncio.Task[None]) -> list[bool]:
    """Which of them are done when none goes on by itself any more."""
    for _ in range(50):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


def test_who_is_ahead_waits_for_the_last_one() -> None:
    async def check() -> None:
        sending = FairSending({"quick": 20, "slow": 20, "other": 20})
        await send(sending, "other", 2)
        quick = asyncio.create_task(send(sending, "quick", 20))
        assert await settled(quick) == [False]
        assert sending.lead_of("quick") == LEAD
        await send(sending, "slow", 3)
        assert await settled(quick) == [False]
        assert sending.lead_of("quick") == LEAD, "two parts more, as the last one is the other now"
        for receiver in ("slow", "other"):
            sending.leave(receiver)
        assert await settled(quick) == [True]

    asyncio.run(check())


def test_it_is_shares_that_are_compared() -> None:
    async def check() -> None:
        sending = FairSending({"large": 40, "small": 10})
        large = asyncio.create_task(send(sending, "large", 40))
        await settled(large)
        await send(sending, "small", 5)
        await settled(large)
        assert sending.lead_of("large") == LEAD
        await send(sending, "small", 5)
        assert await settled(large) == [True]

    asyncio.run(check())


def test_nobody_waits_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_sending, "LONGEST_WAIT", 0.01)
    sending = FairSending({"living": 2 * LEAD, "stalled": 2 * LEAD})
    asyncio.run(asyncio.wait_for(send(sending, "living", 2 * LEAD), 30))


def test_one_alone_and_one_that_is_not_known_wait_for_nobody() -> None:
    sending = FairSending({"only": 100, "idle": 0})
    asyncio.run(asyncio.wait_for(send(sending, "only", 100), 30))
    asyncio.run(asyncio.wait_for(send(sending, "nobody", 100), 30))


def test_one_that_is_cancelled_while_it_waits_keeps_nobody() -> None:
    async def check() -> None:
        sending = FairSending({"quick": 20, "slow": 20})
        quick = asyncio.create_task(send(sending, "quick", 20))
        await settled(quick)
        quick.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await quick
        sending.leave("quick")
        await asyncio.wait_for(send(sending, "slow", 20), 30)

    asyncio.run(check())


def _runner_of_three() -> FaultTolerantRunner:
    """One that has many parts for each of two others; to be called in the loop."""
    own = anew()
    group = GroupInfo(b"group", (EVIL, OWN, GOOD), (gathered(), gathered(), gathered()))
    own._matchmaking.step_control = step()
    own._matchmaking._await_trigger(group)
    tensor = torch.ones(1_000)
    settings: dict[str, Any] = {"part_size_bytes": 128, "peer_fractions": (0.3, 0.3, 0.4)}
    runner = runner_of(own, group, [tensor], **settings)
    assert type(runner) is FaultTolerantRunner
    return runner


def test_a_round_sends_its_parts_so() -> None:
    async def check() -> None:
        runner = _runner_of_three()
        counts = dict(zip(runner.ordered_peer_ids, runner.tensor_part_container.num_parts_by_peer, strict=True))
        taken = {EVIL: 0, GOOD: 0}

        async def take(receiver: object) -> None:
            async for _ in runner._generate_input_for_peer(runner.ordered_peer_ids.index(receiver)):
                taken[receiver] += 1

        quick = asyncio.create_task(take(EVIL))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(quick), 0.5)
        assert runner._fair_sending.lead_of(EVIL) == taken[EVIL] == LEAD
        await asyncio.wait_for(asyncio.gather(quick, take(GOOD)), LONGEST_WAIT)
        assert taken == {receiver: counts[receiver] for receiver in taken}
        runner.finalize(cancel=True)

    run(check())
