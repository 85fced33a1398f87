"""The swarm's figures in whatever logger a Trainer has."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger
from tiny import QUIET, TinyModel, loader

import hivenb


def logged(logger: CSVLogger) -> list[dict[str, float]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_each_epoch_is_logged_once_to_each_logger(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name=name) for name in ("one", "two")]
    strategy = hivenb.HivemindStrategy(16, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0)
    quiet = {**QUIET, "logger": loggers}
    fitter = Trainer(strategy=strategy, **quiet, max_epochs=1, callbacks=[hivenb.SwarmStatsMonitor()])
    fitter.fit(TinyModel(), loader(64, 8))
    for logger in loggers:
        rows = [row for row in logged(logger) if "hivemind_epoch" in row]
        assert [row["step"] for row in rows] == [2, 4, 6, 8]
        assert [row["hivemind_epoch"] for row in rows] == [1, 2, 3, 4]
        assert {row["hivemind_peers"] for row in rows} == {row["hivemind_group_size"] for row in rows} == {1}
        assert {row["hivemind_samples"] for row in rows} == {16}
        assert all(row["hivemind_stalled_seconds"] >= 0 for row in rows)
        assert {row["hivemind_skipped_batches"] for row in rows} == {0}


def test_with_another_strategy_it_does_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fitter = Trainer(**{**QUIET, "logger": logger}, max_epochs=1, callbacks=[hivenb.SwarmStatsMonitor()])
    fitter.fit(TinyModel(), loader(64, 8))
    assert not (Path(logger.log_dir) / "metrics.csv").exists() or "hivemind" not in str(logged(logger))
