"""What a newcomer takes over as the state of PowerSGD: factors of its own shapes, from who may be at that epoch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzzing.averager_without_process import EVIL, GOOD, OWN
from hivemind.optim import power_sgd_averager
from hivemind.p2p import PeerID

from hivenb.engine.averaging.gradient_averager import PowerSGDGradientAverager, own_factory
from hivenb.engine.averaging.state_download import SLACK, Download, Wanted
from hivenb.errors import UnbelievedStateError

SHAPES = [(20, 2), (30, 2)]


@pytest.fixture(
    params=[PowerSGDGradientAverager, own_factory(power_sgd_averager.PowerSGDGradientAverager)],
    ids=["ours", "settled"],
)
def averager(request: pytest.FixtureRequest) -> Any:
    """Of two matrices and a vector; it never starts its process."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 20), (40, 30), (7,))]
    dht = SimpleNamespace(peer_id=OWN, client_mode=False)
    made = request.param(parameters, averager_rank=2, dht=dht, prefix="run", start=False)
    assert [tuple(one.shape) for one in made._qs] == SHAPES
    return made


def state(peer: PeerID, *tensors: torch.Tensor) -> Download:
    return Download(peer.to_bytes(), {"group_bits": ""}, tensors)


def download(averager: Any, monkeypatch: pytest.MonkeyPatch, *states: Download) -> list[Wanted]:
    """Those that its process downloads, one after the other; what it is asked for."""
    asked: list[Wanted] = []
    left = iter(states)

    def ask(wanted: Wanted) -> Download | None:
        asked.append(wanted)
        return next(left, None)

    monkeypatch.setattr(averager, "_ask_process", ask)
    averager.load_state_from_peers(timeout=10.0)
    return asked


@pytest.mark.parametrize(
    "bad",
    [
        [torch.tensor(9.0), torch.tensor(9.0)],
        [torch.full((20, 3), 9.0), torch.full((30, 3), 9.0)],
        [torch.full((20, 2), 9.0)],
        [torch.full(shape, math.nan) for shape in SHAPES],
        [],
    ],
    ids=["single numbers", "another rank", "too few", "nan", "nothing"],
)
def test_factors_that_are_none_are_left_for_those_of_another(
    averager: Any, monkeypatch: pytest.MonkeyPatch, bad: list[torch.Tensor]
) -> None:
    good = [torch.full(shape, 0.5) for shape in SHAPES]
    asked = download(averager, monkeypatch, state(EVIL, *bad), state(GOOD, *good))
    assert asked[-1].refused == {EVIL.to_bytes()}
    assert all(bool((one == 0.5).all()) for one in averager._qs)


def test_if_nobody_has_them_it_says_so(averager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [one.clone() for one in averager._qs]
    with pytest.raises(UnbelievedStateError, match=r"\(20, 3\).*averager_rank"):
        download(averager, monkeypatch, state(EVIL, torch.ones(20, 3), torch.ones(30, 3)))
    assert all(map(torch.equal, averager._qs, before))


def test_it_is_no_larger_than_factors_are(averager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (wanted,) = download(averager, monkeypatch)
    assert wanted.most_bytes == 16 * (20 + 30) * 2 + SLACK
