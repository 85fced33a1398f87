"""Rounds that begin before their trigger, as soon as their group has met, where all in it have offered that."""

from __future__ import annotations

from collections.abc import Iterable

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MPFuture

from hivenb.engine.rounds.gathered import all_offer_early, epoch_of


class EarlyBeginnings:
    """Which rounds of this peer may begin early; in the averager's own process.

    All in a group have the same records of each other, and come to the same answer.
    """

    def __init__(self) -> None:
        self._allowed: dict[int, MPFuture[bool]] = {}

    def allow(self, epoch: int, answer: MPFuture[bool], have_met: Iterable[tuple[StepControl, GroupInfo]]) -> None:
        """Let the round of an epoch begin early.

        :param answer: is to know whether it does, as soon as it has a group; never, if its search is over already
        :param have_met: rounds that wait for their triggers, and their groups
        """
        self._allowed[epoch] = answer
        for step, group in have_met:
            self.note_group(step, group)

    def note_group(self, step: StepControl | None, group: GroupInfo) -> None:
        """Begin a round that has a group now, if it may."""
        answer = self._answer_of(step)
        if step is None or answer is None:
            return
        begins = not step.done() and not step.triggered and all_offer_early(group.gathered)
        if begins:
            step.allow_allreduce()
        answer.set_result(begins)

    def note_end(self, step: StepControl) -> None:
        """Know that a round is over, be it that it has found no group."""
        answer = self._answer_of(step)
        if answer is not None:
            answer.set_result(False)

    def _answer_of(self, step: StepControl | None) -> MPFuture[bool] | None:
        epoch = None if step is None else epoch_of(step.data_for_gather)
        return None if epoch is None else self._allowed.pop(epoch, None)
