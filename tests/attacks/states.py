"""Attacks on newcomers, who take over the swarm's state from a peer: from one that serves another."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hivemind
import tiny
import torch
from attacks.attacked_runs import RUN_ID, happens, make_run, require, stranger, swarms, training
from attacks.case import Attack, Outcome
from hivemind.optim.state_averager import TrainingStateAverager

import hivenb
from hivenb.engine.averaging import state_download

#: Of the attacker: far above all that a peer can have.
_PRIORITY = 1e9


class _Noting(tiny.PacedModel):
    """Notes with which parameters it begins."""

    began_with: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.began_with is None:
            self.began_with = torch.cat([one.flatten() for one in tiny.parameters(self)])
        return super().training_step(batch, batch_idx)


@contextlib.contextmanager
def _serving(
    dht: hivemind.DHT, run: hivenb.TrainingRun, forge: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[bytes]:
    """An averager of plain hivemind's that serves a made-up state, always of the present epoch."""
    model = tiny.TinyModel()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(forge(parameter))
    averager = TrainingStateAverager(
        dht=dht,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        params=list(model.parameters()),
        prefix=f"{RUN_ID}_state_averager",
        offload_optimizer=False,
        start=True,
    )
    ended = threading.Event()

    def keep_up() -> None:
        while not ended.wait(0.1):
            averager.local_epoch = run.status.epoch

    keeping_up = threading.Thread(target=keep_up)
    keeping_up.start()
    averager.state_sharing_priority = _PRIORITY
    try:
        yield averager.peer_id.to_bytes()
    finally:
        ended.set()
        keeping_up.join()
        averager.shutdown()


def _believe_all() -> None:
    ranked = state_download.ranked_sources
    state_download.ranked_sources = lambda entries, newest: ranked(entries, math.inf)
    state_download.SharesState._why_refused = lambda self, loaded: None


def _made_up_state(forge: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    with swarms(3) as (first, second, third), stranger(first) as attacker:
        founder, member = make_run(first), make_run(second)
        with training(founder, member), _serving(attacker, founder, forge) as liar:
            key = f"{RUN_ID}_state_averager.all_averagers"
            require(lambda: liar in getattr(third.dht.get(key, latest=True), "value", {}))
            newcomer = make_run(third, _Noting())
            newcomer.start()
            model = newcomer.model
            came = happens(lambda: model.began_with is not None or not newcomer.is_active)
            swarms_own = torch.cat([one.flatten() for one in tiny.parameters(founder.model)])
            newcomer.stop()
        if not came or model.began_with is None:
            return Outcome(False, f"the newcomer did not come: {newcomer.exception!r}")
        distance = float((model.began_with - swarms_own).norm() / swarms_own.norm())
        return Outcome(distance < 0.5, f"the newcomer begins at {distance:.2g} of the norm from the others")


ATTACKS = [
    Attack(
        "a-state-that-is-no-number",
        "serves a state of nan under a priority of 10^9",
        _believe_all,
        partial(_made_up_state, lambda parameter: torch.full_like(parameter, math.nan)),
    ),
    Attack(
        "a-state-that-is-made-up",
        "serves a state of finite numbers, of the right epoch and shapes, that it has made up",
        _believe_all,
        partial(_made_up_state, lambda parameter: 10 * torch.randn_like(parameter)),
    ),
]
