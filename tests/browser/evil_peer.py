"""A peer that trains as others do, and calls itself something that is to run in a page; ends when it is told to."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import lightning
import torch

import hivenb
from hivenb import tasks
from hivenb.swarm.agreement import public_names

#: As long as a record may be, with all that might break whoever shows it.
NAME = '<img src=x onerror=ran()>"><script>ran()</script>\u202edlrow\x1b[31m\x07' + "w" * 200


class Unhurried(lightning.Callback):
    """Leaves the cores to the browser."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.05)


def main(told: Connection, invite: str, run_id: str, log: str) -> None:
    """Train until told to end.

    :param told: a word on it ends the peer
    :param log: a file for what it says
    """
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    public_names.clean = lambda name: name  # it tells others its name as it is; they have to clean it
    task = tasks.digits(hidden=8, blocks=1)
    options = hivenb.Options(target_batch_size=4096, matchmaking_time=2.0, run_id=run_id)
    with hivenb.Swarm.join(invite, "evil", public_name=NAME) as swarm:
        run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=options, callbacks=[Unhurried()])
        run.start()
        told.recv()
        run.stop()
