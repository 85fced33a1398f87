"""Who meets whom: peers at the same epoch, and those that do not say at which they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.partition import AllreduceException
from hivemind.optim.grad_averager import GradientAverager as PlainGradientAverager
from hivemind.utils import MSGPackSerializer

from hivenb.engine.averagers import GradientAverager
from hivenb.engine.dht import DHT
from hivenb.engine.epoch_matchmaking import epoch_of, is_marked, marked

Make = Callable[..., Any]


@pytest.fixture
def make_averager(run_id: str) -> Iterator[Make]:
    made: list[GradientAverager] = []

    def make(own: DHT, kind: type = GradientAverager) -> Any:
        settings = {"prefix": run_id, "min_matchmaking_time": 1.0, "request_timeout": 1.0, "start": True}
        made.append(kind([torch.nn.Parameter(torch.zeros(3))], dht=own, **settings))
        return made[-1]

    yield make
    for averager in made:
        averager.shutdown()


def test_the_epoch_travels_with_the_request() -> None:
    gather = MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(7)])
    assert epoch_of(gather) is None, "a peer of plain hivemind may mean something else"
    assert epoch_of(marked(gather)) == 7
    assert is_marked(MSGPackSerializer.loads(marked(gather)))


@pytest.mark.parametrize("sent", [b"", b"nonsense", MSGPackSerializer.dumps(5), MSGPackSerializer.dumps([1, 2])])
def test_what_is_no_request_of_ours_has_no_epoch(sent: bytes) -> None:
    assert epoch_of(sent) is None


def test_peers_at_different_epochs_do_not_meet(dht: DHT, joining_dht: DHT, make_averager: Make) -> None:
    averagers = [make_averager(own) for own in (dht, joining_dht)]
    controls = [
        averager.step(gather=epoch, wait=False, timeout=5.0, allow_retries=False)
        for epoch, averager in enumerate(averagers, start=3)
    ]
    for control in controls:
        with pytest.raises(AllreduceException):
            control.result(20)


def test_who_gives_up_an_old_epoch_meets_those_of_the_new_one(
    dht: DHT, joining_dht: DHT, make_averager: Make, eventually: Callable[..., None]
) -> None:
    late, ahead = (make_averager(own) for own in (dht, joining_dht))
    old = late.step(gather=3, wait=False, timeout=60.0)
    new = ahead.step(gather=4, wait=False, timeout=60.0)
    eventually(lambda: old.stage is AveragingStage.LOOKING_FOR_GROUP)
    assert not late.give_up_searches(before=3)
    assert late.give_up_searches(before=4)
    assert old.cancelled()
    assert len(late.step(gather=4, timeout=30.0)) == len(new.result(30)) == 2


@pytest.mark.parametrize("gather", [None, 9])
def test_a_peer_of_plain_hivemind_is_met_at_any_epoch(
    gather: Any, dht: DHT, joining_dht: DHT, make_averager: Make
) -> None:
    plain = make_averager(dht, PlainGradientAverager).step(gather=gather, wait=False, timeout=30.0)
    ours = make_averager(joining_dht).step(gather=4, wait=False, timeout=30.0)
    assert len(plain.result(40)) == len(ours.result(40)) == 2
