"""How much an epoch sends, by the arithmetic of all-reduce by parts."""

from __future__ import annotations

import pytest
import torch

from hivenb.compression import SIZE_ADAPTIVE_THRESHOLD, Float16Compression
from hivenb.figures.predicted_traffic import buffer_bytes, encoded_size, epoch_bytes, tensor_shapes
from hivenb.options import Options
from hivenb.options.choices import PowerSGD

DILOCO = {"use_local_updates": True, "outer_optimizer": "nesterov"}


def test_only_what_is_trained_counts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5))
    model[0].weight.requires_grad_(False)
    assert tensor_shapes(model) == ((20,), (5, 20), (5,))
    assert tensor_shapes(torch.nn.LazyLinear(3)) == ()


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("none", 4 * (SIZE_ADAPTIVE_THRESHOLD + 10)),
        ("float16", 2 * (SIZE_ADAPTIVE_THRESHOLD + 10)),
        ("uniform8bit", SIZE_ADAPTIVE_THRESHOLD + 10),
        ("size_adaptive", SIZE_ADAPTIVE_THRESHOLD + 20),
        (Float16Compression(), None),
    ],
)
def test_each_codec_has_its_size(codec: object, size: float | None) -> None:
    assert encoded_size((SIZE_ADAPTIVE_THRESHOLD, 10), codec) == size


@pytest.mark.parametrize(
    ("peers", "changes", "gradients", "parameters"),
    [
        (1, {}, 0, 0),
        (2, {}, 400, 400),
        (4, {"grad_compression": "float16"}, 300, 600),
        (2, {"average_opt_statistics": ("exp_avg", "exp_avg_sq")}, 400, 1200),
        (2, {"use_local_updates": True}, 0, 400),
        (2, {**DILOCO, "grad_compression": "float16"}, 0, 200),
        (2, {**DILOCO, "outer_fragments": 4}, 0, 100),
        (2, {"grad_averager_factory": lambda **_: None, "state_averaging_compression": "uniform8bit"}, None, 100),
        (2, {"grad_averager_factory": PowerSGD(1).factory(), "grad_compression": "float16"}, 2 * (6 + 10 + 40), 400),
    ],
)
def test_a_peer_sends_its_parts_and_the_averages_of_its_own(
    peers: int, changes: dict[str, object], gradients: float | None, parameters: float
) -> None:
    options = Options(target_batch_size=8).replace(**changes)
    sent = epoch_bytes(((6, 10), (40,)), options, peers)
    assert (sent.gradients, sent.parameters) == (gradients, parameters)


def test_buffers_are_sent_with_the_parameters_unless_they_are_not_averaged() -> None:
    buffers = buffer_bytes(torch.nn.BatchNorm1d(10))
    assert buffers == 4 * 20 + 8
    options = Options(target_batch_size=8, state_averaging_compression="float16")
    assert epoch_bytes(((40,),), options, 2, buffers).parameters == 80 + buffers
    assert epoch_bytes(((40,),), options.replace(average_buffers=False), 2, buffers).parameters == 80
