"""What the views are tested on: a real history and real values, steered by hand. Nothing here trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hivenb.engine.network.addresses import Reach
from hivenb.history import History
from hivenb.options import Options
from hivenb.run.status import RunState, RunStatus
from hivenb.run.training_length import Length
from hivenb.swarm import PeerInfo
from hivenb.swarm.members import Member, Presence
from hivenb.swarm.swarm import Observers

STATUS = RunStatus(
    state=RunState.READY,
    epoch=14,
    step=100,
    samples=1310,
    target_batch_size=2048,
    eta_seconds=3.2,
    num_peers=3,
    samples_per_second=130.0,
    swarm_samples_per_second=412.0,
    loss=0.4123,
    error=None,
)


class Scene:
    """Looks like a run to a view, and does what the test says."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1000, 250)
        self.history = History()
        self.status = STATUS
        self.data: object = None
        self.trainer_kwargs: dict[str, object] = {}
        self.options = Options(target_batch_size=2048)
        self.log_lines: tuple[str, ...] = ()
        self.swarm = SimpleNamespace(
            invite="hivenb://invite",
            who_can_join="invited only",
            local_peers=(),
            is_open=True,
            observers=Observers(),
            blocked=(),
            can_ban=False,
            newest_run_id="hivenb",
            banned=(),
            local=SimpleNamespace(to_come_to=lambda run: 0, forget_those_to_come=lambda run: None),
        )
        self.length = Length()
        self.local_peers: tuple[Any, ...] = ()
        self.members: Any = ()
        self.calls: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self.pending_options: Options | None = None
        self.pending_epoch: int | None = None
        self.options_error: Exception | None = None
        self.not_host_reason: str | None = None
        self.snapshot_epoch: int | None = None

    def start(self) -> None:
        self._do("start", RunState.TRAINING)

    def pause(self) -> None:
        self._do("pause", RunState.PAUSED)

    def resume(self) -> None:
        self._do("resume", RunState.TRAINING)

    def stop(self, wait: bool = True) -> None:
        assert not wait, "a button must not wait"
        self._do("stop", RunState.STOPPED)

    @property
    def is_active(self) -> bool:
        return self.status.state.is_active

    def roll_back(self, wait: bool = True) -> int:
        assert not wait, "a button must not wait"
        assert self.snapshot_epoch is not None
        self._do("roll_back", self.status.state)
        return self.snapshot_epoch

    def apply(self, options: Options | None = None, *, wait: bool = True, **changes: Any) -> Options:
        assert not wait, "a switch must not wait"
        self.options_error = None
        new = (options or self.pending_options or self.options).replace(**changes)
        if self.status.state.is_active:
            self.pending_options = new  # until the test says that it is in force
        else:
            self.options = new
        return new

    def set(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def _do(self, name: str, state: RunState) -> None:
        self.calls.append((name, threading.current_thread().name))
        if self.failure is not None:
            raise self.failure
        self.set(state=state)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def status() -> RunStatus:
    return STATUS


@pytest.fixture
def peers() -> tuple[PeerInfo, ...]:
    return (
        PeerInfo("12D3KooWself0001", 14, 410, 130.0, False, 0.4, True),
        PeerInfo("12D3KooWother002", 14, 900, 282.0, True, 17.0, False),
    )


@pytest.fixture
def members(peers: tuple[PeerInfo, ...]) -> tuple[Member, ...]:
    own, other = peers
    return (
        Member(own, Presence.HERE, here_for=125.0, samples=5000.0, share=0.25),
        Member(other, Presence.GONE, here_for=12.0, samples=15000.0, share=0.75, name="Ann", route=Reach.NOT),
    )


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until something holds that a background thread brings about."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def training() -> History:
    """Half a minute of a run with three peers, as it might have been."""
    history = History()
    history.mark("run", "started", time=1000.0)
    for i in range(300):
        now = 1000.0 + i / 10
        history.record("loss", 2.3 / (1 + i / 30) + 0.05 * (i % 3), epoch=i // 30, time=now)
        if i % 10 == 0:
            history.record("peers", 1 + (i > 60) + (i > 90), time=now)
            history.record("samples_per_second", 130 + i % 7, time=now)
            history.record("swarm_samples_per_second", 400 + i % 9, time=now)
        if i % 50 == 49:
            history.record("val_loss", 2.4 / (1 + i / 30), time=now)
            history.record("val_acc", 1 - 0.8 / (1 + i / 30), time=now)
    history.mark("option", "float16 gradients", time=1015.0)
    history.mark("peer", "peer joined", time=1006.0)
    return history
