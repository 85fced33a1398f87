"""Rounds and averagers as an optimizer's helpers see them, without a process: for what they decide, not to train."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hivemind.averaging.control import AveragingStage
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time

from hivenb.engine.averaging.round import Round
from hivenb.engine.matchmaking.matchmaking import ExpectedPeers
from hivenb.engine.network.daemon import BlockedPeers
from hivenb.engine.trust.aggregation import SampleReports
from hivenb.engine.trust.reliability import RoundReport

#: Id of the peer whose rounds they are.
OWN = b"this one"


class FakeRound(Future):
    """A round whose stage a test sets.

    :param stage: where it stands
    :param epoch: that it is a round of
    """

    def __init__(self, stage: AveragingStage = AveragingStage.LOOKING_FOR_GROUP, epoch: float = 0):
        super().__init__()
        self.stage, self.epoch = stage, epoch
        self.weight, self.triggered, self.is_deserted, self.offers_early = 1.0, False, False, False
        self.begins_early: Future[bool] | None = None

    is_to_come = Round.is_to_come

    def allow_allreduce(self) -> None:
        self.triggered = True


class FakeAverager:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.group_size_is_fixed = self.averaging_in_progress = self.has_retired = self.finds_nobody = False
        self.finished_averaging_round = threading.Event()
        self.scheduled: list[FakeRound] = []
        self.is_waited_for: bool | None = None
        self.expected: list[ExpectedPeers] = []
        self.given_up: list[float] = []
        self.given_up_if_alone: list[float] = []
        self.told: list[SampleReports] = []
        self.lines: list[bool] = []
        self.round_reports: list[RoundReport] = []
        self.exchanged_early: list[FakeRound] = []
        self.was_made_ready, self.may_begin_early, self.rounds_take_long = 0, True, False
        self.sends_exactly = self.costs_little_early = self.peers_step_differently = False
        self.waited, self.pending_updates = 0, set[str]()

    def schedule_step(
        self, gather: int, timeout: float, offers_early: bool = False, is_waited_for: bool = True
    ) -> FakeRound:
        self.scheduled.append(FakeRound(epoch=gather))
        self.scheduled[-1].offers_early, self.is_waited_for = offers_early, is_waited_for
        return self.scheduled[-1]

    @property
    def has_begun_early(self) -> bool:
        return bool(self.exchanged_early)

    def be_ready_early(self) -> None:
        self.was_made_ready += 1

    def exchange_early(self, control: FakeRound, timeout: float) -> None:
        self.exchanged_early.append(control)

    def expect_peers(self, peers: ExpectedPeers) -> None:
        self.expected.append(peers)

    def note_reports(self, reports: SampleReports) -> None:
        self.told.append(reports)

    def note_line(self, is_long: bool) -> None:
        self.lines.append(is_long)

    def take_round_reports(self) -> list[RoundReport]:
        taken, self.round_reports = self.round_reports, []
        return taken

    def give_up_searches(self, before: float) -> bool:
        self.given_up.append(before)
        return any(one.epoch < before and not one.done() and one.cancel() for one in self.scheduled)

    def give_up_if_alone(self, epoch: float) -> None:
        self.given_up_if_alone.append(epoch)

    def is_alone(self, epoch: float) -> bool:
        return self.finds_nobody

    def step(self, wait_for_delayed_updates: bool) -> None:
        self.waited += 1


def participant(**changes: Any) -> Any:
    """An optimizer that is at epoch 4 with one other peer far away, and whose epoch is about to end."""
    settings: dict[str, Any] = {
        "dht": SimpleNamespace(blocked_peers=BlockedPeers()),
        "averaging_timeout": 0.2,
        "matchmaking_time": 5.0,
        "average_state_every": 1,
        "auxiliary": False,
        "delay_grad_averaging": False,
        "delay_state_averaging": False,
        "delay_optimizer_step": False,
        "use_local_updates": False,
        "state_averager": FakeAverager(),
        "grad_averager": FakeAverager(),
        "local_epoch": 4,
        "is_synchronized_with_peers": lambda: True,
        "rounds": SimpleNamespace(has_group=False, last=SimpleNamespace(group_size=1)),
        "tracker": SimpleNamespace(
            global_epoch=4,
            target_batch_size=64,
            global_progress=SimpleNamespace(num_peers=2),
            list=SimpleNamespace(round_trip=0.1),
            local_progress=LocalTrainingProgress(
                peer_id=OWN, epoch=4, samples_accumulated=0, samples_per_second=1.0, time=1.0, client_mode=False
            ),
            estimated_next_update_time=get_dht_time() + 1.0,
        ),
    }
    return SimpleNamespace(**{**settings, **changes})
