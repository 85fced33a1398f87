"""A peer that joins, or fell behind, knows it; a download that fails is repeated, and not for ever."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from rounds_without_averagers import FakeAverager, participant

from hivenb.engine.optimizer import catch_up as module
from hivenb.engine.optimizer.catch_up import LOAD_STATE_ATTEMPTS, CatchingUp, download_in_attempts
from hivenb.errors import SwarmError, UnbelievedStateError


class TestCalledFor:
    def at(self, epoch: int, **changes: Any) -> CatchingUp:
        """Of a peer at epoch 4, with the others at another one."""
        own = participant(**changes)
        own.tracker.global_epoch = epoch
        return CatchingUp(own)

    def test_when_the_others_have_ended_an_epoch_without_it(self) -> None:
        assert self.at(5).is_called_for
        assert not self.at(4).is_called_for
        assert not self.at(3).is_called_for

    @pytest.mark.parametrize("changes", [{"delay_grad_averaging": True}, {"auxiliary": True}, {"grad_averager": None}])
    def test_not_where_nobody_waits_for_its_gradients(self, changes: dict[str, Any]) -> None:
        assert not self.at(5, **changes).is_called_for

    def test_not_where_those_who_average_in_the_background_wait_for_its_gradients(self) -> None:
        for ahead, is_late in ((1, False), (2, True)):
            catching_up = self.at(4 + ahead)
            catching_up._participant.rounds.has_group = True
            assert catching_up.is_called_for is is_late
            assert catching_up.may_follow is not is_late

    def test_not_where_the_newest_state_of_the_others_is_of_this_epoch_still(self) -> None:
        """They have reported the next one, and have not averaged yet: this peer's gradients are waited for."""
        downloading = Downloading(4, 5, found=4, take_over=False)
        catching_up, own = downloading.catching_up, downloading.participant
        own.delay_grad_averaging = own.delay_optimizer_step = False
        own.grad_averager = FakeAverager()
        assert catching_up.is_called_for
        catching_up.take_over_state()
        assert own.local_epoch == 4
        assert not catching_up.is_called_for
        own.tracker.global_epoch = 6
        assert catching_up.is_called_for
        downloading.found = 6
        catching_up.take_over_state()
        own.tracker.global_epoch = 7
        assert catching_up.is_called_for, "once more"

    def test_not_where_the_swarm_averages_in_several_groups(self) -> None:
        own = participant()
        own.tracker.global_epoch, own.grad_averager.group_size_is_fixed = 5, True
        assert not CatchingUp(own).is_called_for

    def test_when_they_have_averaged_without_it_in_the_background_until_it_begins(self) -> None:
        catching_up = self.at(4, delay_grad_averaging=True)
        catching_up.was_excluded = True
        assert catching_up.is_called_for
        catching_up.begin()
        assert not catching_up.is_called_for

    def test_a_download_that_fails_takes_nothing_of_that_back(self) -> None:
        class Refused(Downloading):
            def download(self, timeout: float) -> None:
                raise UnbelievedStateError("no peer sends a state that can be believed")

        refused = Refused(5, 5, found=None, take_over=False)
        refused.catching_up.was_excluded = True
        with pytest.raises(UnbelievedStateError):
            refused.catching_up.take_over_state()
        assert refused.catching_up.is_called_for

    @pytest.mark.parametrize(("shares", "expected"), [(True, True), (False, False)])
    def test_nor_does_one_in_which_nobody_gives_anything(self, shares: bool, expected: bool) -> None:
        """As while all others begin anew; who is alone with helpers has nobody to wait for."""
        lacking = Downloading(5, 5, found=None, take_over=False)
        other = SimpleNamespace(is_self=False, client_mode=not shares, peer_id=b"other", epoch=5)
        lacking.participant.tracker.look = SimpleNamespace(peers=[other], gone=frozenset(), uncounted=frozenset())
        lacking.catching_up.was_excluded = True
        lacking.catching_up.take_over_state()
        assert lacking.catching_up.is_called_for is expected
        lacking.found = 5
        lacking.catching_up.take_over_state()
        assert not lacking.catching_up.is_called_for

    def test_who_gives_nothing_for_long_has_nothing_to_give(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as a helper, or one that shares no state."""
        lacking = Downloading(5, 5, found=None, take_over=False)
        other = SimpleNamespace(is_self=False, client_mode=False, peer_id=b"other", epoch=5)
        lacking.participant.tracker.look = SimpleNamespace(peers=[other], gone=frozenset(), uncounted=frozenset())
        lacking.catching_up.was_excluded = True
        lacking.catching_up.take_over_state()
        assert lacking.catching_up.is_called_for
        monkeypatch.setattr(module, "GIVEN_WITHIN", -1.0)
        lacking.catching_up.take_over_state()
        assert not lacking.catching_up.is_called_for

    def test_it_is_under_way_until_an_epoch_was_ended_with_the_others(self) -> None:
        catching_up = self.at(5)
        assert not catching_up.is_under_way
        catching_up.begin()
        assert catching_up.is_under_way
        catching_up.end()
        assert not catching_up.is_under_way

    def test_where_epochs_are_shorter_than_downloads_it_goes_on_with_what_it_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        catching_up = self.at(5)
        catching_up.begin()
        assert not catching_up.is_hopeless
        monkeypatch.setattr(module, "CATCHING_UP", -1.0)
        catching_up.begin()  # once more, since the first time
        assert catching_up.is_hopeless
        assert not catching_up.is_called_for


class Downloading:
    """An optimizer that downloads the state of the others, who are at epoch 1 or 5, or does not get any.

    :param own: its epoch
    :param others: theirs
    :param found: of the state that there is; ``None`` for none
    :param averager: of its state
    :param take_over: whether it downloads at once
    """

    def __init__(
        self, own: int, others: int, found: int | None, averager: FakeAverager | None = None, take_over: bool = True
    ):
        gradients = SimpleNamespace(cancel=lambda: None)
        rounds = SimpleNamespace(take=lambda wait: None, leave=lambda wait: None, has_group=False, gradients=gradients)
        self.participant = participant(
            local_epoch=own,
            state_averager=averager or FakeAverager(),
            rounds=rounds,
            begin_epoch=self.begin_epoch,
            delay_optimizer_step=True,
            delay_grad_averaging=True,
            load_state_timeout=1.0,
            grad_averager=None,
        )
        self.participant.tracker.global_epoch = others
        self.participant.tracker.pause_updates = contextlib.nullcontext
        self.participant.tracker.look = None
        own_averager = self.participant.state_averager
        own_averager.states_taken = 0
        own_averager.load_state_from_peers = self.download
        own_averager.give_up_searches = lambda: None
        self.found = found
        self.catching_up = CatchingUp(self.participant)
        if take_over:
            self.catching_up.take_over_state()

    def download(self, timeout: float) -> None:
        assert not self.participant.state_averager.pending_updates
        if self.found is not None:
            self.participant.state_averager.states_taken += 1
            self.participant.local_epoch = self.found

    def begin_epoch(self, epoch: int) -> None:
        self.participant.local_epoch = epoch


class TestNothingToBeHad:
    """With steps in the background, where all peers are one epoch behind those that have ended it."""

    def test_who_has_a_state_goes_on_at_the_epoch_of_the_others(self) -> None:
        assert Downloading(0, 1, found=0).participant.local_epoch == 1
        assert Downloading(4, 5, found=None).participant.local_epoch == 5

    def test_a_newcomer_does_not_take_what_it_began_with_for_it_and_tries_again(self) -> None:
        downloading = Downloading(0, 1, found=None)
        assert downloading.participant.local_epoch == 0
        assert downloading.catching_up.is_called_for
        assert not Downloading(0, 0, found=None).catching_up.is_called_for

    def test_who_has_a_state_goes_on_at_the_epoch_that_the_others_have_reached_during_the_download(self) -> None:
        late = Downloading(3, 4, found=4, take_over=False)
        other = SimpleNamespace(is_self=False, client_mode=False, peer_id=b"other", epoch=5)
        late.participant.tracker.look = SimpleNamespace(peers=[other], gone=frozenset(), uncounted=frozenset())
        late.catching_up.take_over_state()
        assert late.participant.local_epoch == 5

    def test_but_not_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CATCHING_UP", -1.0)
        assert not Downloading(0, 1, found=None).catching_up.is_called_for


class Slow(FakeAverager):
    """One whose step in the background is over at the third look."""

    def __init__(self) -> None:
        super().__init__()
        self.pending_updates.add("a step")

    def step(self, wait_for_delayed_updates: bool) -> None:
        super().step(wait_for_delayed_updates)
        if self.waited == 3:
            self.pending_updates.clear()


def test_a_step_that_is_under_way_is_waited_for_before_anything_is_downloaded() -> None:
    slow = Slow()
    assert Downloading(4, 5, found=5, averager=slow).participant.local_epoch == 5
    assert slow.waited == 3


class HasState:
    """An averager with a state of its own, which notes beyond which epoch it believes nobody."""

    newest_epoch: Any = None

    def __init__(self) -> None:
        self.believed: list[Any] = []

    def load_state_from_peers(self, **kwargs: Any) -> None:
        self.believed.append(self.newest_epoch and self.newest_epoch())


def test_what_is_downloaded_is_of_no_epoch_that_nobody_has_reached() -> None:
    """Of PowerSGD's state, too: whoever claims the latest one would be asked first, by everybody."""
    own = participant(state_averager=HasState(), grad_averager=HasState())
    own.tracker.look, own.tracker.global_epoch = None, 7
    CatchingUp(own)._download()
    assert own.state_averager.believed == own.grad_averager.believed == [7]


class TestAttempts:
    def failing(self, *errors: Exception) -> tuple[Any, list[int]]:
        """A download that fails so often, and the attempts."""
        attempts: list[int] = []

        def download() -> None:
            attempts.append(len(attempts))
            if len(attempts) <= len(errors):
                raise errors[len(attempts) - 1]

        return download, attempts

    def test_one_that_fails_is_repeated(self) -> None:
        download, attempts = self.failing(OSError("no answer"), TimeoutError())
        download_in_attempts(download, "Here")
        assert len(attempts) == 3

    def test_in_the_end_it_is_an_error_that_says_where_this_peer_is(self) -> None:
        download, attempts = self.failing(*[OSError("no answer")] * 99)
        with pytest.raises(SwarmError, match=r"^Here, but .* in 5 attempts\. Do all peers train the same") as raised:
            download_in_attempts(download, "Here")
        assert len(attempts) == LOAD_STATE_ATTEMPTS
        assert isinstance(raised.value.__cause__, OSError)

    def test_a_state_that_does_not_fit_is_downloaded_once_more_and_no_oftener(self) -> None:
        download, attempts = self.failing(SwarmError("it has 3 tensors"), SwarmError("it has 3 tensors"))
        with pytest.raises(SwarmError, match="it has 3 tensors"):
            download_in_attempts(download, "Here")
        assert len(attempts) == 2
