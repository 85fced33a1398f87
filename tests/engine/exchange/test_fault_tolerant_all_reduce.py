"""A peer that dies in a group that has met costs the others no deadline, and whose average is lost is not counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter
from tiny import LOOPBACK

from hivenb.engine.averaging.gradient_averager import GradientAverager, own_factory
from hivenb.engine.exchange import runner as module
from hivenb.engine.matchmaking.matchmaking import ExpectedPeers
from hivenb.engine.network.dht import DHT
from hivenb.engine.process.child import shared_locks_held

#: Of averagers that would wait for a silent one for longer than any test lasts.
DEADLINES = {"request_timeout": 2.0, "next_chunk_timeout": 300.0, "allreduce_timeout": 600.0}


@pytest.fixture
def dhts(dht: DHT) -> Iterator[list[DHT]]:
    """Of three peers; a test may kill them."""
    with contextlib.ExitStack() as ended:
        made = []
        for _ in range(3):
            made.append(DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK))
            ended.callback(lambda own=made[-1]: own.is_alive() and own.shutdown())
        yield made


@pytest.fixture
def averagers(
    dhts: list[DHT], make_averager: Callable[..., GradientAverager], expect_each_other: Callable[..., None]
) -> list[GradientAverager]:
    """Three that would wait for a silent one for longer than any test lasts."""
    made = [make_averager(own, min_matchmaking_time=5.0, **DEADLINES) for own in dhts]
    expect_each_other(*made, epoch=1)
    return made


@pytest.mark.usefixtures("shared_out")
def test_the_others_go_on_without_it(averagers: list[GradientAverager], eventually: Callable[..., None]) -> None:
    controls = _meet(averagers, eventually)
    *living, dead = averagers
    _kill(dead)
    for value, (averager, control) in enumerate(zip(living, controls, strict=False), start=1):
        _begin(averager, control, value)
    for control in controls[:2]:
        # whoever neither averages for the dead one nor gets anything from it does not know
        assert control.result(60).keys() >= {averager.peer_id for averager in living}
    controls[2].cancel()
    for averager in living:
        with averager.get_tensors() as (gradient,):
            # as small as it is, one peer averages all of it; where that was the dead one, it stays as it was
            assert sum(gradient.sub(1.5).abs() < 1e-6) in (0, 3)


@pytest.fixture
def nobody_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By averagers that are made afterwards."""
    monkeypatch.setattr(module, "DIAL_AFTER", 600.0)


@pytest.mark.parametrize("is_known", [True, False], ids=["known before", "heard then"])
def test_one_that_has_gone_is_left_out_as_soon_as_that_is_known(
    is_known: bool,
    nobody_is_dialled: None,
    tmp_path: Path,
    dhts: list[DHT],
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    """Of one whose network was cut, nobody would find it out by dialling it, either."""
    noting = type("NotingThere", (Noting,), {"folder": tmp_path})
    # of so many numbers, each averages a part
    averagers = [
        make_averager(own, 300_000, kind, min_matchmaking_time=5.0, **DEADLINES)
        for own, kind in zip(dhts, (noting, GradientAverager, GradientAverager), strict=True)
    ]
    expect_each_other(*averagers, epoch=1)
    controls = _meet(averagers, eventually)
    *living, silent = averagers

    def know() -> None:
        for averager in living:
            averager.expect_peers(ExpectedPeers(frozenset(), gone=frozenset({silent.peer_id.to_bytes()})))

    with shared_locks_held():
        for process in (silent, silent.dht):
            os.kill(process.pid, signal.SIGSTOP)
    try:
        if is_known:
            know()
        for value, (averager, control) in enumerate(zip(living, controls, strict=False), start=1):
            _begin(averager, control, value)
        if not is_known:
            eventually((tmp_path / f"received from {living[1].peer_id}").exists, 60)
            know()
        for control in controls[:2]:
            assert control.result(60).keys() == {averager.peer_id for averager in living}
    finally:
        _kill(silent)
        controls[2].cancel()


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize("leaver", [0, 2])
def test_one_that_leaves_a_group_says_so(
    averagers: list[GradientAverager], leaver: int, eventually: Callable[..., None]
) -> None:
    controls = _meet(averagers, eventually)
    staying = [number for number in range(3) if number != leaver]
    _begin(averagers[staying[0]], controls[staying[0]], 1.0)
    controls[leaver].cancel()
    _begin(averagers[staying[1]], controls[staying[1]], 2.0)
    for number in staying:
        assert controls[number].result(60).keys() >= {averagers[one].peer_id for one in staying}
        with averagers[number].get_tensors() as (gradient,):
            # as small as it is, one peer averages all of it; where that is the one that left, it stays as it was
            assert sum(gradient.sub(1.5).abs() < 1e-6) in (0, 3)


def test_one_that_leaves_a_group_says_so_for_both_halves_of_a_round(
    dhts: list[DHT],
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    low_rank = own_factory(partial(PowerSGDGradientAverager, averager_rank=1))
    averagers = [
        # in client mode it averages nothing for the others, who would notice its absence when they send to it
        make_averager(own, (8, 8), low_rank, min_matchmaking_time=5.0, client_mode=is_leaving, **DEADLINES)
        for own, is_leaving in zip(dhts, (True, False, False), strict=True)
    ]
    expect_each_other(*averagers, epoch=1)
    leaving, *controls = _meet(averagers, eventually)
    leaving.cancel()
    for averager, control in zip(averagers[1:], controls, strict=True):
        _begin(averager, control, 1.0)
    for control in controls:
        assert control.result(60).keys() >= {averager.peer_id for averager in averagers[1:]}


class Noting(GradientAverager):
    """Notes in a folder from whom it has received all parts, and who does not wait for their averages any more."""

    folder: Path

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async def noted() -> AsyncIterator[averaging_pb2.AveragingData]:
            async for part in stream:
                yield part
            (self.folder / f"received from {context.remote_id}").touch()

        try:
            async for message in super().rpc_aggregate_part(noted(), context):
                yield message
        finally:
            (self.folder / f"left by {context.remote_id}").touch()


def test_one_that_dies_while_it_waits_for_a_slower_one_costs_nobody_the_round(
    tmp_path: Path,
    dhts: list[DHT],
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    averagers = []
    for own, folder in zip(dhts, folders, strict=True):
        folder.mkdir()
        kind = type("NotingThere", (Noting,), {"folder": folder})
        # of so many numbers, each averages a part
        averagers.append(make_averager(own, 300_000, kind, min_matchmaking_time=5.0, **DEADLINES))
    expect_each_other(*averagers, epoch=1)
    controls = _meet(averagers, eventually)
    quick, dying, slow = range(3)
    values = (0.0, 9.0, 3.0)
    for number in (quick, dying):
        _begin(averagers[number], controls[number], values[number])
    victim = averagers[dying].peer_id
    eventually((folders[quick] / f"received from {victim}").exists, 60)
    _kill(averagers[dying])
    eventually((folders[quick] / f"left by {victim}").exists, 60)
    _begin(averagers[slow], controls[slow], values[slow])
    for number in (quick, slow):
        assert controls[number].result(60).keys() == {averagers[quick].peer_id, averagers[slow].peer_id}
        with averagers[number].get_tensors() as (gradient,):
            # the part that the dead one was to average stays as it was; in that of the quick one, its data counts
            assert set(gradient.tolist()) == {values[number], 1.5, 4.0}
    controls[dying].cancel()


def _meet(averagers: list[GradientAverager], eventually: Callable[..., None]) -> list[Any]:
    """Their rounds, in which they have a group and wait for their triggers."""
    controls = [averager.schedule_step(gather=1, timeout=120.0) for averager in averagers]
    eventually(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls), 60)
    return controls


def _kill(averager: GradientAverager) -> None:
    for process in (averager, averager.dht):
        process.kill()


def _begin(averager: GradientAverager, control: Any, value: float) -> None:
    with averager.get_tensors() as (gradient,):
        gradient.fill_(value)
    averager.local_samples_accumulated = 1
    control.weight = 1.0
    control.allow_allreduce()


def test_a_client_goes_on_if_who_averages_for_it_dies_while_it_sends(
    dhts: list[DHT],
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    eventually: Callable[..., None],
) -> None:
    # more than the buffers on the way can hold
    dying, client = (
        make_averager(own, 10_000_000, min_matchmaking_time=5.0, client_mode=client_mode, **DEADLINES)
        for own, client_mode in zip(dhts, (False, True), strict=False)
    )
    expect_each_other(dying, client, epoch=1)
    controls = _meet([dying, client], eventually)
    _begin(client, controls[1], 1.0)
    eventually(lambda: controls[1].stage is AveragingStage.RUNNING_ALLREDUCE, 60)
    _kill(dying)
    assert controls[1].result(60).keys() == {client.peer_id}
    with client.get_tensors() as (gradient,):
        assert bool(gradient.eq(1.0).all())
    controls[0].cancel()


@pytest.mark.usefixtures("shared_out")
def test_one_that_does_not_answer_has_not_taken_part(
    dhts: list[DHT],
    make_averager: Callable[..., GradientAverager],
    expect_each_other: Callable[..., None],
    silent: type[GradientAverager],
) -> None:
    averagers = [make_averager(own, kind=silent, min_matchmaking_time=5.0, next_chunk_timeout=1.0) for own in dhts[:2]]
    expect_each_other(*averagers, epoch=1)
    for value, averager in enumerate(averagers, start=1):
        averager.parameters[0].grad = torch.full((3,), float(value))
        averager.accumulate_grads_(1)
    controls = [averager.step(gather=1, timeout=60.0, wait=False) for averager in averagers]
    groups = [set(control.result(60)) for control in controls]
    # small as it is, one of them averages all of it, and the other one which parameters have a gradient
    assert [len(group) for group in groups] == [1, 1]
    have_the_average = []
    for own in averagers:
        with own.get_tensors() as (gradient,):
            have_the_average.append(bool((gradient == 1.5).all()))
    assert sorted(have_the_average) == [False, True]


def test_a_sender_that_dies_before_a_round_begins_leaves_it_to_the_others(
    dht: DHT, joining_dht: DHT, run_id: str
) -> None:
    """With PowerSGD, the second half of a round waits for the first one with some data of the others at hand."""

    async def be_sent_a_part() -> None:
        averager = GradientAverager([torch.nn.Parameter(torch.zeros(3))], dht=dht, prefix=run_id, start=False)
        group: asyncio.Future[Any] = asyncio.Future()
        averager._running_groups = {b"group": group}
        averager._own_matchmaking = SimpleNamespace(wait_for_trigger=_at_once)
        context = P2PContext(handle_name="", local_id=dht.peer_id, remote_id=joining_dht.peer_id)
        parts = as_aiter(averaging_pb2.AveragingData(group_id=b"group"))
        asking = asyncio.ensure_future(anext(averager.rpc_aggregate_part(parts, context)))
        await asyncio.wait({asking}, timeout=0.1)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert not group.cancelled()

    asyncio.run(be_sent_a_part())


async def _at_once(group_id: bytes) -> bool:
    return True
