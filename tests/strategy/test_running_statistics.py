"""What a batch that does not count has done to running statistics is undone, and nothing else."""

from __future__ import annotations

import math

import torch
from torch import nn

from hivenb.strategy.module_hooks import RunningStatistics


def test_they_are_those_of_the_last_batch_that_counts() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    layers.register_buffer("own", torch.zeros(1))
    statistics, norm = RunningStatistics(layers), layers[0]
    statistics.follow(False)
    assert torch.equal(norm.running_var, torch.ones(2))
    layers(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    good = norm.running_mean.clone()
    statistics.follow(True)
    layers(torch.full((2, 2), math.nan))
    layers.own.add_(1)
    assert norm.running_mean.isnan().all()
    statistics.follow(False)
    assert torch.equal(norm.running_mean, good)
    assert int(norm.num_batches_tracked) == 1
    assert float(layers.own) == 1
    statistics.follow(False)
    assert torch.equal(norm.running_mean, good)


def test_a_module_without_any_is_left_alone() -> None:
    RunningStatistics(nn.Linear(2, 2)).follow(False)
