"""A peer in a process of its own that joins with an invite and obeys orders; see ``Joined``."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import torch
from tiny import TinyModel, loader

import hivenb
from hivenb.errors import HivenbError

#: Seconds that a batch takes, so that an epoch takes a good part of one.
BATCH_SECONDS = 0.02


class DiaryModel(TinyModel):
    """Writes down which epoch is trained with which target batch size.

    :param folder: where to; a file for each process
    """

    def __init__(self, folder: Path, batch_seconds: float = BATCH_SECONDS, **kwargs: Any):
        super().__init__(**kwargs)
        self.folder, self.batch_seconds, self.noted = Path(folder), batch_seconds, None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        import os

        strategy = self.trainer.strategy
        now = (strategy.hivemind_epoch, strategy.options.target_batch_size)
        if now != self.noted:
            self.noted = now
            with (self.folder / f"{os.getpid()}.txt").open("a") as diary:
                diary.write(f"{now[0]} {now[1]}\n")
        time.sleep(self.batch_seconds)
        return super().training_step(batch, batch_idx)


def diaries(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """What all peers have written: by process, pairs of epoch and target batch size in their order."""
    return {
        int(path.stem): [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        for path in folder.glob("*.txt")
    }


class Joined:
    """Such a process, from outside."""

    def __init__(self, process: BaseProcess, connection: Connection):
        self.process, self.connection = process, connection

    def ask(self, order: str, **what: Any) -> Any:
        """Give an order, and wait for the answer.

        :raises AssertionError: with what went wrong there
        """
        self.connection.send((order, what))
        kind, answer = self.connection.recv()
        assert kind == "done", answer
        return answer


@contextmanager
def peer(invite: str | None, folder: Path, run_id: str, **options: Any) -> Iterator[Joined]:
    """A peer that trains until the end of the block.

    :param invite: of the swarm to join; ``None`` to open one
    :param folder: for its diary
    :param options: of its own
    """
    ours, theirs = mp.Pipe()
    process = forked.start(_train, theirs, invite, folder, {"run_id": run_id, **options})
    theirs.close()
    try:
        yield Joined(process, ours)
        if process.is_alive():
            ours.send(None)
            process.join(30)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        ours.close()


def _train(orders: Connection, invite: str | None, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with hivenb.Swarm.join(invite) if invite else hivenb.Swarm() as swarm:
        run = hivenb.TrainingRun(
            DiaryModel(folder),
            loader(4096, 8, shuffle=True),
            swarm=swarm,
            options=hivenb.Options(**options),
            accelerator="cpu",
        )
        run.start()
        for order, what in iter(orders.recv, None):
            try:
                orders.send(("done", obey(run, order, what)))
            except HivenbError as e:
                orders.send(("failed", f"{type(e).__name__}: {e}"))


def obey(run: hivenb.TrainingRun, order: str, what: dict[str, Any]) -> Any:
    if order == "wait":
        return run.wait(**what)
    if order == "apply":
        return run.apply(**what).target_batch_size
    if order == "stop":
        return run.stop()
    if order == "start":
        return run.start()
    return {
        "invite": run.swarm.invite,
        "peer_id": run.swarm.peer_id,
        "epoch": run.strategy.hivemind_epoch,
        "group": run.history.snapshot().last("group_size"),
        "not_host_reason": run.not_host_reason,
        "options": {name: getattr(run.options, name) for name in ("target_batch_size", "average_state_every")},
        "events": [event.text for event in run.history.snapshot().events],
        "log": run.log_lines,
    }
