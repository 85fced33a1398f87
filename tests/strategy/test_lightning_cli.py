"""The strategy in a LightningCLI, by a config file and by the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import QUIET, TinyModel, loader

from hivenb.options.options import Options
from hivenb.strategy import HivemindStrategy

pytest.importorskip("jsonargparse")

CONFIG = """
trainer:
  max_epochs: 1
  strategy:
    class_path: hivenb.HivemindStrategy
    init_args:
      target_batch_size: 16
      delay_state_averaging: true
      delay_optimizer_step: true
      host_maddrs: [/ip4/127.0.0.1/tcp/0]
      scheduler_fn:
        class_path: torch.optim.lr_scheduler.ExponentialLR
        init_args:
          gamma: 0.5
    dict_kwargs:
      grad_compression: float16
      nat_port_map: false
      auto_nat: false
"""


class Model(TinyModel):
    def __init__(self, lr: float = 1.0):
        super().__init__(lr=lr)

    def train_dataloader(self) -> Any:
        return loader(64, 16)


def trainer_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["train.py"])
    kwargs = {"save_config_callback": None, "trainer_defaults": QUIET, "args": list(arguments)}
    return LightningCLI(Model, run=False, **kwargs)


@pytest.mark.process
def test_a_config_may_hold_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    cli = trainer_of("--config", str(tmp_path / "config.yaml"), monkeypatch=monkeypatch)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HivemindStrategy)
    assert strategy.options.grad_compression == "float16"
    assert strategy.options.offload_optimizer is True
    cli.trainer.fit(cli.model)
    assert strategy.optimizer is not None
    assert isinstance(strategy.optimizer.state_averager.scheduler.schedulers[0], torch.optim.lr_scheduler.ExponentialLR)
    assert strategy.optimizer.opt.param_groups[0]["lr"] == 0.5**4


def test_so_may_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = trainer_of(
        "--trainer.strategy=hivenb.HivemindStrategy",
        "--trainer.strategy.target_batch_size=16",
        "--trainer.strategy.scheduler_fn=torch.optim.lr_scheduler.ExponentialLR",
        "--trainer.strategy.scheduler_fn.gamma=0.5",
        monkeypatch=monkeypatch,
    )
    made = cli.trainer.strategy.options.scheduler_fn(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    assert (type(made), made.gamma) == (torch.optim.lr_scheduler.ExponentialLR, 0.5)
    assert cli.trainer.strategy.options.replace(scheduler_fn=None) == Options(target_batch_size=16)


@pytest.mark.parametrize("name", ["hivenb.HivemindStrategy", "HivemindStrategy", "hivenb.strategy.HivemindStrategy"])
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match=r"needs a target_batch_size.*--trainer\.strategy\.target_b"):
        trainer_of(f"--trainer.strategy={name}", monkeypatch=monkeypatch)


def test_in_a_config_it_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("trainer:\n  strategy:\n    class_path: hivenb.HivemindStrategy\n")
    with pytest.raises(SystemExit):
        trainer_of("--config", str(tmp_path / "config.yaml"), monkeypatch=monkeypatch)
    assert "required: target_batch_size" in capsys.readouterr().err
