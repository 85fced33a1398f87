"""Rounds and downloads of tensors of every type, however they lie in memory: exact, and they lie there as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.network.dht import DHT

pytestmark = pytest.mark.process

MEETING: dict[str, Any] = {
    "target_group_size": 2,
    "min_matchmaking_time": 20.0,
    "request_timeout": 1.0,
    "next_chunk_timeout": 20.0,
    "start": True,
}
CHANNELS_LAST = torch.channels_last


def values(peer: int) -> list[torch.Tensor]:
    """The first is cut into several parts; halves of all can be told in their types."""
    generator = torch.Generator().manual_seed(peer)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype) + 8 * peer

    return [
        some(600, 30, 4, 4),
        some(500, 300).t(),
        some(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        some(40, 50, dtype=torch.float64).t(),
        some(7, dtype=torch.float64) * 1e-30,
        some(5, dtype=torch.complex64),
        some(6).to(torch.bfloat16),
    ]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64))


def layout(tensors: Any) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in tensors]


@pytest.mark.parametrize("offloaded", [False, True], ids=["all-gather", "offloaded, shared out"])
def test_a_round_and_a_download(
    dht: DHT,
    joining_dht: DHT,
    run_id: str,
    eventually: Callable[..., None],
    offloaded: bool,
    request: pytest.FixtureRequest,
) -> None:
    if offloaded:
        request.getfixturevalue("shared_out")
    models = [[torch.nn.Parameter(value) for value in values(peer)] for peer in (0, 1)]
    models[0][0].data = models[0][0].data.to(memory_format=CHANNELS_LAST)  # and contiguous at the other peer
    layouts = [layout(model) for model in models]
    assert layouts[0] != layouts[1]
    averagers = []
    try:
        for own, model in zip((dht, joining_dht), models, strict=True):
            made: dict[str, Any] = {"optimizer": torch.optim.Adam(model, lr=0.0)}
            if offloaded:
                made = {"optimizer": lambda groups: torch.optim.Adam(groups, lr=0.0), "params": [{"params": model}]}
            averagers.append(
                TrainingStateAverager(dht=own, prefix=run_id, offload_optimizer=offloaded, **made, **MEETING)
            )
        expected = [(widened(one) + widened(other)) / 2 for one, other in zip(*models, strict=True)]
        for averager in averagers:
            averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 60.0})
        for averager in averagers:
            averager.step(wait_for_delayed_updates=True)
        for model, before in zip(models, layouts, strict=True):
            for parameter, average in zip(model, expected, strict=True):
                # of a sum and a difference, and of the result in its own type
                bound = 4 * torch.finfo(parameter.dtype).eps * average.abs().max()
                assert float((widened(parameter) - average).abs().max()) <= bound, parameter.dtype
            assert layout(model) == before

        giver, joiner = averagers
        with torch.no_grad():
            for tensor in [*models[1], *(p for group in joiner.optimizer.param_groups for p in group["params"])]:
                tensor.fill_(-50)
        giver.local_epoch = 7
        giver.allow_state_sharing = True
        eventually(lambda: joiner.load_state_from_peers(timeout=20.0) or joiner.local_epoch == 7)
        for given, loaded in zip(*models, strict=True):
            assert torch.equal(given, loaded)
        assert layout(models[1]) == layouts[1]
        for parameter, state in joiner.optimizer.state.items():
            assert {one.stride() for one in (state["exp_avg"], state["exp_avg_sq"])} == {parameter.stride()}
    finally:
        for averager in averagers:
            averager.shutdown()
