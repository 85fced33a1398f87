"""A peer as hivemind's quick start has it: its DHT, its optimizer, and a loop in plain torch. Not a test."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import hivemind
import torch
from tiny import LOOPBACK, parameters, samples

from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from strategy.peer import Moment


class Transitions(logging.Handler):
    """Learns from hivemind's log, the only place that tells, whether an epoch has ended, and in how large a group."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.group_size = 1
        self.ended = False

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[:3] == ["Averaged", "gradients", "with"]:
            self.group_size = int(words[3])
        elif words[:2] == ["Transitioning", "to"]:
            self.ended = True


def train(connection: Any, number: int, initial_peers: Sequence[str], stages: Sequence[dict[str, Any]]) -> None:
    """As :func:`strategy.peer.train`, with hivemind's own classes only; until told to stop.

    :param stages: one, of which ``target``, ``module``, ``model``, and ``plain`` (keyword arguments of
      ``hivemind.Optimizer``) are looked at
    """
    (settings,) = stages
    torch.set_num_threads(1)
    torch.manual_seed(number)
    transitions = Transitions()
    logging.getLogger("hivemind.optim.optimizer").addHandler(transitions)
    logging.getLogger("hivemind.optim.optimizer").setLevel(logging.DEBUG)
    model = settings["module"](**settings["model"])
    dht = hivemind.DHT(initial_peers=initial_peers, start=True, startup_timeout=60.0, **LOOPBACK)
    connection.send(("addresses", [str(a) for a in dht.get_visible_maddrs()]))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="lightning_run",
        batch_size_per_step=8,
        target_batch_size=settings["target"],
        optimizer=model.configure_optimizers(),
        use_local_updates=False,
        delay_state_averaging=False,
        matchmaking_time=3.0,
        averaging_timeout=8.0,
        client_mode=False,  # left to itself, hivemind 1.1.12 takes the opposite of what the DHT does
        **settings["plain"],
    )
    try:
        while not (connection.poll() and connection.recv() == "stop"):
            x, y = samples(8, seed=1000 * number + optimizer.local_progress.samples_accumulated)
            time.sleep(0.05)
            transitions.group_size, transitions.ended = 1, False
            put_in = optimizer.local_progress.samples_accumulated + len(x)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model.layer(x), y).backward()
            optimizer.step()
            if transitions.ended:
                report = EpochReport(optimizer.local_epoch, put_in, transitions.group_size, 0.0)
                arrays = [parameter.numpy() for parameter in parameters(model)]
                connection.send(("moment", Moment(0, report.epoch, report, 0.0, arrays, [])))
        connection.send(("end", (optimizer.local_epoch, [p.numpy() for p in parameters(model)])))
    finally:
        optimizer.shutdown()
        dht.shutdown()
    connection.close()
