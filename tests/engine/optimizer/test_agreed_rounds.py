"""When rounds are looked for, whom they wait for, and what becomes of those that fail; without a process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hivemind.averaging.control import AveragingStage
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from rounds_without_averagers import OWN, FakeRound, participant

from hivenb.engine.optimizer import scheduled_rounds
from hivenb.engine.optimizer.catch_up import VERIFIED_WITHIN, CatchingUp
from hivenb.engine.optimizer.scheduled_rounds import AgreedRounds, MissedRound, RoundOutcome
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.engine.trust.aggregation import NEXT_TO_NOTHING
from hivenb.engine.trust.reliability import RoundReport


def rounds_of(own: Any) -> AgreedRounds:
    return AgreedRounds(own, CatchingUp(own))


def report(peer: bytes, epoch: int) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=peer, epoch=epoch, samples_accumulated=0, samples_per_second=1.0, time=1.0, client_mode=False
    )


class TestLooking:
    def test_a_round_of_this_epoch_is_looked_for_when_it_is_about_to_end(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.look_for_gradients()
        rounds.take(wait=True)
        rounds.look_for_gradients()
        assert [one.epoch for one in own.grad_averager.scheduled] == [4], "once, and of this epoch"

    def test_the_state_is_averaged_at_the_beginning_of_the_next_one(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.look_for_state()
        rounds.take(wait=True)
        assert [one.epoch for one in own.state_averager.scheduled] == [5]

    @pytest.mark.parametrize("reason", ["early", "alone", "behind"])
    def test_none_is_looked_for_in_vain(self, reason: str) -> None:
        own = participant()
        if reason == "early":
            own.tracker.estimated_next_update_time += 60.0
        elif reason == "alone":
            own.tracker.global_progress.num_peers = 1
        else:
            own.is_synchronized_with_peers = lambda: False
        rounds = rounds_of(own)
        assert not rounds.is_due
        rounds.look_for_gradients()
        rounds.look_for_state()
        rounds.take(wait=True)
        assert own.grad_averager.scheduled == own.state_averager.scheduled == []

    @pytest.mark.parametrize("reason", ["another epoch", "one is under way", "one is over that was not applied"])
    def test_the_state_is_not_averaged_more_often_than_asked_for(self, reason: str) -> None:
        own = participant(average_state_every=3 if reason == "another epoch" else 1)
        own.state_averager.averaging_in_progress = reason == "one is under way"
        if reason == "one is over that was not applied":
            own.state_averager.finished_averaging_round.set()
        rounds = rounds_of(own)
        rounds.look_for_state()
        rounds.take(wait=True)
        assert own.state_averager.scheduled == []

    def test_one_that_was_not_looked_for_in_time_is_looked_for_when_it_is_due(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.be_ready_for_gradients()
        assert rounds.gradients.control is own.grad_averager.scheduled[0]

    def test_one_that_is_alone_by_now_gives_it_up(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.be_ready_for_gradients()
        own.tracker.global_progress.num_peers = 1
        rounds.be_ready_for_gradients()
        assert rounds.gradients.control is None
        assert own.grad_averager.scheduled[0].cancelled()

    @pytest.mark.parametrize(("peers", "retired", "failed"), [(1, False, False), (2, True, False), (2, False, True)])
    def test_that_none_began_is_a_failure_if_there_was_somebody(self, peers: int, retired: bool, failed: bool) -> None:
        own = participant()
        own.tracker.global_progress.num_peers, own.grad_averager.has_retired = peers, retired
        rounds = rounds_of(own)
        rounds.note_none_began()
        assert rounds.last == RoundOutcome(1, "given up before it began" if failed else None)


class TestWhoIsThere:
    def test_averagers_wait_for_those_who_can_come(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.see_swarm([report(b"a", 4), report(b"far behind", 2)], frozenset({b"dead"}))
        (state,), (gradients,) = own.state_averager.expected, own.grad_averager.expected
        assert gradients.of_round(4) == state.of_round(5) == {b"a"}
        assert gradients.gone == {b"dead"}
        assert own.grad_averager.given_up == [4], "searches of epochs that all others have ended"

    def test_nobody_looks_alone_for_a_round_of_the_state_that_all_others_have_had(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.see_swarm([report(b"a", 4), report(b"b", 5)], frozenset())
        rounds.see_swarm([report(b"a", 5), report(b"b", 5)], frozenset())
        assert own.state_averager.given_up_if_alone == [4, 5]
        assert own.grad_averager.given_up_if_alone == []

    def test_in_the_background_it_does(self) -> None:
        own = participant(delay_state_averaging=True)
        rounds_of(own).see_swarm([report(b"a", 5)], frozenset())
        assert own.state_averager.given_up_if_alone == [], "the others may look for it as well"

    def test_with_gradients_in_the_background_peers_report_an_epoch_more(self) -> None:
        own = participant(delay_grad_averaging=True, delay_optimizer_step=True, delay_state_averaging=True)
        rounds = rounds_of(own)
        rounds.see_swarm([report(b"a", 5)], frozenset())
        assert own.grad_averager.expected[0].of_round(4) == set(), "it has come in epoch 5"
        own.tracker.local_progress.epoch = 5
        rounds.see_swarm([report(b"a", 6)], frozenset())
        assert own.grad_averager.expected[1].of_round(5) == {b"a"}
        assert own.grad_averager.given_up == [4, 5]

    def test_one_that_is_far_ahead_draws_along_only_whoever_catches_up(self) -> None:
        own = participant()
        catching_up = CatchingUp(own)
        rounds = AgreedRounds(own, catching_up)
        reports = [report(b"slow", 4), report(b"quick", 5)]
        rounds.see_swarm(reports, frozenset())
        catching_up.begin()
        rounds.see_swarm(reports, frozenset())
        assert own.grad_averager.given_up == [4, 5]

    def test_a_group_of_chosen_size_is_left_alone(self) -> None:
        own = participant()
        own.grad_averager.group_size_is_fixed = True
        rounds_of(own).see_swarm([report(b"a", 9)], frozenset())
        assert own.grad_averager.given_up == own.grad_averager.expected == []

    def test_the_averager_of_gradients_is_told_what_each_has_reported_once(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        for epoch in (4, 4, 5):
            rounds.see_swarm([report(b"a", epoch)], frozenset())
        assert [(one.target_batch_size, one.told[b"a"].epoch) for one in own.grad_averager.told] == [(64, 4), (64, 5)]
        assert all(one.told[OWN].epoch == 4 for one in own.grad_averager.told), "and of what this peer has reported"
        assert own.state_averager.told == []

    def test_it_is_told_whether_the_line_is_long_when_that_has_changed(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        for seconds in (0.001, 0.001, 0.1, 0.2, 0.001):
            own.tracker.list.round_trip = seconds
            rounds.see_swarm([report(b"a", 4)], frozenset())
        assert own.grad_averager.lines == [False, True, False]

    def test_nobody_waits_for_who_has_missed_rounds_until_it_comes(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        missed = RoundReport(3, missed=frozenset({b"a"}), seconds=5.0)
        own.grad_averager.round_reports = [missed, replace(missed, epoch=4)]
        rounds.see_swarm([report(b"a", 4), report(b"b", 4)], frozenset())
        (state,), (gradients,) = own.state_averager.expected, own.grad_averager.expected
        assert gradients.of_round(4) == state.of_round(5) == {b"b"}
        assert gradients.excluded == {b"a"}
        assert not gradients.avoided, "it may come"
        assert [str(one) for one in rounds.excluded_peers] == [
            "missed 2 rounds in a row; asked again in 3 epochs and 80 s"
        ]
        own.grad_averager.round_reports = [RoundReport(4, took_part=frozenset({b"a"}))]
        rounds.see_swarm([report(b"a", 4), report(b"b", 4)], frozenset())
        assert own.grad_averager.expected[-1].of_round(4) == {b"a", b"b"}

    def test_after_a_return_everybody_is_waited_for_again(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        missed = RoundReport(3, missed=frozenset({b"a"}), refused=((b"b", "nan"),), seconds=5.0)
        own.grad_averager.round_reports = [missed, replace(missed, epoch=4)]
        rounds.see_swarm([report(b"a", 4), report(b"b", 4)], frozenset())
        assert {one.peer for one in rounds.excluded_peers} == {b"a", b"b"}
        rounds.begin_anew()
        own.grad_averager.round_reports = [replace(missed, epoch=5)]  # of the time before
        rounds.see_swarm([report(b"a", 5), report(b"b", 5)], frozenset())
        assert rounds.excluded_peers == ()
        own.grad_averager.round_reports = [replace(missed, epoch=6)]
        rounds.see_swarm([report(b"a", 6), report(b"b", 6)], frozenset())
        assert {one.peer for one in rounds.excluded_peers} == {b"b"}, "once"

    def test_one_that_was_blocked_by_hand_is_avoided(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        own.dht.blocked_peers.replace(frozenset({b"a"}))
        rounds.see_swarm([report(b"a", 4), report(b"b", 4)], frozenset())
        assert own.grad_averager.expected[0].of_round(4) == {b"b"}
        assert own.grad_averager.expected[0].avoided == {b"a"}
        assert [str(one) for one in rounds.excluded_peers] == ["blocked by hand"]

    def test_before_averagers_are_made_nobody_is_told(self) -> None:
        own = participant()
        del own.state_averager, own.grad_averager
        rounds_of(own).see_swarm([report(b"a", 4)], frozenset())


class TestOutcome:
    def begun(self, own: Any, ahead: int | None = None) -> tuple[AgreedRounds, FakeRound]:
        """A round of gradients that has begun, with another peer that is so many epochs ahead."""
        rounds = rounds_of(own)
        rounds.be_ready_for_gradients()
        if ahead is not None:
            rounds.attendance.call([report(b"a", own.local_epoch + ahead)])
        control = own.grad_averager.scheduled[0]
        control.stage = AveragingStage.RUNNING_ALLREDUCE
        return rounds, control

    def test_of_one_that_succeeds(self) -> None:
        rounds, control = self.begun(participant())
        control.set_result({b"a": None, b"b": None, b"c": None})
        assert rounds.average_gradients(control) == rounds.last == RoundOutcome(3)

    def test_with_nobody_there_is_none(self) -> None:
        rounds, _ = self.begun(participant())
        rounds.last = RoundOutcome(2)
        assert rounds.average_gradients(None) == rounds.last == RoundOutcome(1)

    def test_one_that_takes_too_long_has_failed(self) -> None:
        rounds, control = self.begun(participant())
        assert rounds.average_gradients(control) == RoundOutcome(1, "not done within averaging_timeout=0.2 s")
        assert not control.cancelled(), "its peers exchange data still"

    def test_one_that_fails_is_missed_if_the_others_have_gone_on(self) -> None:
        rounds, control = self.begun(participant(), ahead=1)
        control.set_exception(OSError("the daemon is gone"))
        with pytest.raises(MissedRound):
            rounds.average_gradients(control)

    def test_in_the_background_the_others_state_is_needed_instead(self) -> None:
        own = participant(delay_grad_averaging=True)
        catching_up = CatchingUp(own)
        rounds = AgreedRounds(own, catching_up)
        rounds.state.control = state = FakeRound()  # type: ignore[assignment]
        rounds.be_ready_for_gradients()
        rounds.attendance.call([report(b"a", 6)])
        (control,) = own.grad_averager.scheduled
        control.stage = AveragingStage.RUNNING_ALLREDUCE
        control.set_exception(OSError("the daemon is gone"))
        assert rounds.average_gradients(control) == RoundOutcome(1, "OSError('the daemon is gone')")
        assert catching_up.is_called_for
        assert state.weight == NEXT_TO_NOTHING

    def test_in_a_group_of_chosen_size_nothing_is_missed(self) -> None:
        own = participant()
        own.grad_averager.group_size_is_fixed = True
        rounds, control = self.begun(own, ahead=1)
        control.set_exception(OSError("the daemon is gone"))
        assert rounds.average_gradients(control).failed

    def test_one_whose_state_was_averaged_before_the_step_has_missed_it(self) -> None:
        own = participant()
        own.grad_averager.finds_nobody = True
        rounds, control = self.begun(own)
        rounds.state.control = state = FakeRound(AveragingStage.RUNNING_ALLREDUCE, 5)  # type: ignore[assignment]
        state.offers_early = True
        rounds.be_ready_for_gradients()
        rounds.begin_state_early()
        control.stage = AveragingStage.LOOKING_FOR_GROUP
        with pytest.raises(MissedRound):
            rounds.average_gradients(control)
        assert state.weight == 1.0, "what it has put in was of before the step, as the others' was"


@pytest.mark.parametrize(
    ("stage", "epoch", "has_group"),
    [
        (AveragingStage.AWAITING_TRIGGER, 4, True),
        (AveragingStage.LOOKING_FOR_GROUP, 4, False),
        (AveragingStage.AWAITING_TRIGGER, 3, False),
        (None, 4, False),
    ],
)
def test_a_group_that_has_met_for_this_epoch_waits_for_its_gradients(stage: Any, epoch: int, has_group: bool) -> None:
    rounds = rounds_of(participant())
    rounds.gradients.control = None if stage is None else FakeRound(stage, epoch)  # type: ignore[assignment]
    assert rounds.has_group is has_group


class TestThoseAhead:
    """Others report that they have ended this peer's epoch, and its round has a group all the same."""

    QUICK, LATE = PeerID(b"a quick one"), PeerID(b"as late as this one")

    def averaged_with(
        self, *peers: PeerID, epoch: int | None = 4, swarm_epoch: int = 5, has_left: bool = False
    ) -> AgreedRounds:
        """A round with these and with this peer is over, and the quick one may have left since its report."""
        own = participant()
        rounds = own.rounds = rounds_of(own)
        own.tracker.global_epoch = swarm_epoch
        here = [self.LATE] if has_left else [self.QUICK, self.LATE]
        infos = [SimpleNamespace(peer_id=one.to_base58(), is_self=False) for one in here]
        own.tracker.look = None

        def look() -> None:
            own.tracker.look = SimpleNamespace(
                taken_at=time.monotonic(), peers=infos, gone=frozenset(), uncounted=frozenset()
            )

        own.tracker.look_at_once = look
        rounds.see_swarm([report(self.QUICK.to_bytes(), 5), report(self.LATE.to_bytes(), 4)], frozenset())
        rounds.gradients.control = control = FakeRound(AveragingStage.AWAITING_TRIGGER, 4)  # type: ignore[assignment]
        assert not rounds._catching_up.has_missed_a_round
        rounds.note_who_is_ahead()
        control.set_result({PeerID(OWN): 4} | dict.fromkeys(peers, epoch))
        rounds.average_gradients(control)  # type: ignore[arg-type]
        return rounds

    def test_who_averages_with_them_knows_that_they_do_so_in_the_background(self) -> None:
        rounds = self.averaged_with(self.QUICK, self.LATE)
        assert rounds._catching_up.others_are_late
        assert rounds.gradients_ahead == -1

    @pytest.mark.parametrize("peers", [(), (LATE,)], ids=["alone", "with one that is late as well"])
    def test_a_round_without_them_is_a_missed_one(self, peers: tuple[PeerID, ...]) -> None:
        """They have given this peer up: its batch took too long."""
        with pytest.raises(MissedRound):
            self.averaged_with(*peers)

    def test_not_where_they_have_left_since(self) -> None:
        """What they have reported is no state that anybody has."""
        assert not self.averaged_with(self.LATE, has_left=True)._catching_up.others_are_late

    def test_clients_are_ahead_as_well_though_they_are_of_no_account_for_the_epoch_of_the_swarm(self) -> None:
        assert self.averaged_with(self.QUICK, self.LATE, swarm_epoch=4)._catching_up.others_are_late

    def test_so_is_one_of_another_epoch(self) -> None:
        """Plain hivemind does not say of which one it is."""
        with pytest.raises(MissedRound):
            self.averaged_with(self.QUICK, epoch=None)


class TestTheStateBeforeTheStep:
    OFFERING: ClassVar = [
        ({}, True),
        ({"delay_state_averaging": True}, False),
        ({"delay_grad_averaging": True}, False),
        ({"delay_optimizer_step": True}, False),
        ({"use_local_updates": True}, False),
        ({"auxiliary": True}, False),
    ]

    @staticmethod
    def offers_of(own: Any) -> list[bool]:
        """Whether the rounds of the state are offered early for which a peer looks."""
        rounds = rounds_of(own)
        rounds.look_for_state()
        rounds.take(wait=True)
        return [one.offers_early for one in own.state_averager.scheduled]

    @pytest.mark.parametrize(("options", "offers"), OFFERING)
    def test_is_offered_where_it_is_there_by_then(self, options: dict[str, Any], offers: bool) -> None:
        own = participant(**options)
        assert self.offers_of(own) == [offers]
        assert own.state_averager.was_made_ready == offers

    @pytest.mark.parametrize("take_long", [False, True])
    def test_is_offered_on_a_short_line_if_rounds_take_long(self, take_long: bool) -> None:
        own = participant()
        own.tracker.list.round_trip, own.state_averager.rounds_take_long = 0.01, take_long
        assert self.offers_of(own) == [take_long]

    @pytest.mark.parametrize("costs_little", [False, True])
    @pytest.mark.parametrize("sends_exactly", [False, True])
    def test_is_offered_on_a_short_line_if_it_costs_little_and_leaves_no_difference(
        self, sends_exactly: bool, costs_little: bool
    ) -> None:
        own = participant()
        own.tracker.list.round_trip = 0.001
        own.grad_averager.sends_exactly, own.state_averager.costs_little_early = sends_exactly, costs_little
        assert self.offers_of(own) == [sends_exactly and costs_little]

    @pytest.mark.parametrize("round_trip", [0.001, 0.2])
    @pytest.mark.parametrize("sends_exactly", [False, True])
    def test_is_not_offered_where_peers_step_differently_with_the_same_gradients(
        self, sends_exactly: bool, round_trip: float
    ) -> None:
        """Their parameters would differ for as long as their moments do; what a codec makes of gradients, always."""
        for differ in (True, False):
            own = participant()
            own.tracker.list.round_trip, own.state_averager.rounds_take_long = round_trip, True
            own.grad_averager.sends_exactly, own.state_averager.peers_step_differently = sends_exactly, differ
            assert self.offers_of(own) == [not (sends_exactly and differ)]

    @pytest.mark.parametrize("delay", ["delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging"])
    def test_a_round_in_the_background_says_nothing_of_what_one_takes_that_is_waited_for(self, delay: str) -> None:
        for is_delayed in (True, False):
            own = participant(**{delay: is_delayed})
            self.offers_of(own)
            assert own.state_averager.is_waited_for is not is_delayed

    def test_is_not_offered_where_its_bytes_would_delay_the_gradients(self) -> None:
        own = participant()
        own.state_averager.may_begin_early = False
        assert self.offers_of(own) == [False]

    def test_is_not_offered_where_peers_average_gradients_in_several_groups(self) -> None:
        own = participant()
        own.state_averager.group_size_is_fixed = True
        assert self.offers_of(own) == [False]

    @pytest.mark.parametrize("offers", [True, False])
    def test_is_exchanged_beside_the_gradients_if_it_was_offered(self, offers: bool) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(AveragingStage.AWAITING_TRIGGER, 5)  # type: ignore[assignment]
        state.offers_early = offers
        rounds.begin_state_early()
        assert own.state_averager.exchanged_early == ([state] if offers else [])
        assert rounds.state.control is (None if offers else state), "the step holds it"

    def test_stays_to_come_when_its_round_has_begun_by_itself(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.look_for_state()
        rounds.take(wait=True)
        (state,) = own.state_averager.scheduled
        state.begins_early, state.triggered = Future(), True
        rounds.look_for_state()
        assert len(own.state_averager.scheduled) == 1, "there is no second one in the epoch"
        rounds.be_ready_for_gradients()
        rounds.begin_state_early()
        assert own.state_averager.exchanged_early == [state]

    def test_is_there_before_gradients_are_sent(self) -> None:
        own = participant(averaging_timeout=20.0)
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(AveragingStage.RUNNING_ALLREDUCE, 5)  # type: ignore[assignment]
        state.begins_early, state.triggered = Future(), True
        threading.Timer(0.1, state.begins_early.set_result, [True]).start()
        threading.Timer(0.2, state.set_result, [{}]).start()
        rounds.be_ready_for_gradients()
        assert state.done(), "on a slow line, one would keep the other waiting"
        assert rounds.state.control is state, "the step takes it over"

    def test_is_not_waited_for_if_its_group_does_not_begin_early(self) -> None:
        own = participant(averaging_timeout=20.0)
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(AveragingStage.AWAITING_TRIGGER, 5)  # type: ignore[assignment]
        state.begins_early = Future()
        state.begins_early.set_result(False)
        rounds.be_ready_for_gradients()
        assert not state.done()

    def test_is_waited_for_in_vain_by_whoever_has_just_come_for_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduled_rounds, "MET_WITHIN", 0.1)
        own = participant(averaging_timeout=20.0)
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(epoch=5)  # type: ignore[assignment]
        state.begins_early = Future()
        rounds.be_ready_for_gradients()
        assert rounds.state.control is state

    def test_has_to_have_met_by_then_where_it_takes_next_to_no_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduled_rounds, "MET_WITHIN", 1000.0)
        own = participant(averaging_timeout=20.0)
        own.tracker.list.round_trip = 0.001
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(epoch=5)  # type: ignore[assignment]
        state.begins_early = Future()
        rounds.be_ready_for_gradients()  # at once
        assert rounds.state.control is state

    def test_is_waited_for_by_whoever_leaves(self) -> None:
        own = participant(averaging_timeout=20.0)
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(AveragingStage.RUNNING_ALLREDUCE, 5)  # type: ignore[assignment]
        state.begins_early, state.triggered = Future(), True
        threading.Timer(0.1, state.set_result, [{}]).start()
        rounds.leave(wait=False)
        assert state.done(), "it writes nothing any more into what is to be replaced"
        assert rounds.state.control is None

    def test_of_one_that_is_alone_is_not(self) -> None:
        own = participant()
        own.tracker.global_progress.num_peers = 1
        rounds = rounds_of(own)
        rounds.state.control = state = FakeRound(epoch=5)  # type: ignore[assignment]
        state.offers_early = True
        rounds.begin_state_early()
        assert own.state_averager.exchanged_early == []


class TestLeaving:
    def test_all_rounds_are_left(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        rounds.look_for_state()
        rounds.be_ready_for_gradients()
        rounds.leave()
        assert own.grad_averager.scheduled[0].cancelled()
        assert own.state_averager.scheduled[0].cancelled()
        assert rounds.gradients.control is rounds.state.control is None

    def test_what_looks_for_the_last_epochs_state_is_given_up_before_the_next_one(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        late = own.state_averager.schedule_step(gather=4, timeout=60.0)
        rounds.end_late_searches()
        assert late.cancelled()
        assert own.state_averager.waited == 1
        rounds.end_late_searches()
        assert own.state_averager.waited == 1, "nothing was to be waited for"

    def test_whoever_averages_with_others_does_not_follow_those_who_are_excluded(self) -> None:
        own = participant()
        rounds = rounds_of(own)
        stalled = RoundReport(3, stalled=frozenset({b"a"}), seconds=3.0)
        own.grad_averager.round_reports = [stalled, replace(stalled, epoch=4)]
        reports = [report(b"a", 9), report(b"b", 4)]
        assert rounds.see_swarm(reports, frozenset()) == frozenset(), "it may have itself to blame"
        assert rounds.attendance.newest_epoch == 9
        own.state_averager.round_reports = [RoundReport(4, took_part=frozenset({b"b"}))]
        assert rounds.see_swarm(reports, frozenset()) == {b"a"}
        assert rounds.attendance.newest_epoch == 4
        assert own.grad_averager.expected[-1].of_round(4) == {b"b"}
        assert rounds.see_swarm(reports[:1], frozenset()) == frozenset(), "nobody else is there any more"

    def test_an_epoch_of_which_nobody_sends_a_state_counts_for_nothing(self) -> None:
        own, claimed = participant(), PeerID(b"\x12\x20" + bytes(32))
        catching_up = CatchingUp(own)
        rounds = AgreedRounds(own, catching_up)
        info = PeerInfo(claimed.to_base58(), 10**9, 0, 1.0, False, 0.0, False)
        catching_up.claims.note_download(time.monotonic() - VERIFIED_WITHIN, 10**9, 4, [info])
        reports = [report(claimed.to_bytes(), 10**9), report(b"b", 4)]
        assert rounds.see_swarm(reports, frozenset()) == {claimed.to_bytes()}
        assert rounds.attendance.newest_epoch == 4
        assert "of which no peer sends a state" in rounds.reasons[claimed.to_base58()]
