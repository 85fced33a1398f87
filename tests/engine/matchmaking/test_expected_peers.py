"""How many peers a round waits for, by what they have reported."""

from __future__ import annotations

from hivemind.optim.progress_tracker import LocalTrainingProgress

from hivenb.engine.matchmaking.matchmaking import Attendance, AttendanceList, ExpectedPeers


def report(peer: bytes, epoch: int) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=peer, epoch=epoch, samples_accumulated=0, samples_per_second=1.0, time=1.0, client_mode=False
    )


class TestAttendanceList:
    def test_whoever_is_two_epochs_behind_has_to_catch_up_first(self) -> None:
        attendance = AttendanceList()
        assert attendance.call([report(b"a", 5), report(b"b", 4), report(b"c", 3)]) == {
            Attendance(b"a", 5, 5),
            Attendance(b"b", 4, 4),
        }
        assert attendance.call([]) == set()

    def test_it_remembers_since_when_each_has_been_there(self) -> None:
        attendance = AttendanceList()
        attendance.call([report(b"a", 3)])
        assert attendance.call([report(b"a", 4), report(b"b", 4)]) == {Attendance(b"a", 3, 4), Attendance(b"b", 4, 4)}

    def test_a_look_may_miss_one(self) -> None:
        attendance = AttendanceList()
        attendance.call([report(b"a", 3), report(b"b", 3)])
        attendance.call([report(b"b", 4)])
        assert attendance.call([report(b"a", 4)]) == {Attendance(b"a", 3, 4)}

    def test_whoever_comes_back_after_an_epoch_is_new(self) -> None:
        attendance = AttendanceList()
        attendance.call([report(b"a", 3), report(b"b", 3)])
        attendance.call([report(b"b", 5)])
        assert Attendance(b"a", 5, 5) in attendance.call([report(b"a", 5), report(b"b", 5)])

    def test_a_newcomer_has_been_there_since_the_state_it_begins_with(self) -> None:
        attendance = AttendanceList()
        attendance.call([report(b"a", 7), report(b"new", 0)])
        assert Attendance(b"new", 7, 7) in attendance.call([report(b"a", 7), report(b"new", 7)])

    def test_one_that_goes_back_to_an_earlier_state_can_come_to_its_rounds(self) -> None:
        attendance = AttendanceList()
        attendance.call([report(b"a", 7)])
        assert attendance.call([report(b"a", 6)]) == {Attendance(b"a", 6, 6)}


class TestExpectedPeers:
    @staticmethod
    def of(*attendances: tuple[int, int], ahead: int = 0, follows: int = 0) -> ExpectedPeers:
        """Peers named by their numbers."""
        present = frozenset(Attendance(bytes([n]), *one) for n, one in enumerate(attendances))
        return ExpectedPeers(present, ahead=ahead, follows=follows)

    def test_a_round_of_no_epoch_may_have_all(self) -> None:
        assert self.of((0, 3), (9, 9)).of_round(None) == {b"\0", b"\1"}

    def test_whoever_is_further_will_not_come(self) -> None:
        assert self.of((0, 4), (0, 5), (0, 6)).of_round(5) == {b"\0", b"\1"}

    def test_with_rounds_in_the_background_it_has_reported_the_next_epoch_already(self) -> None:
        assert self.of((0, 5), (0, 6), (0, 7), ahead=-1).of_round(5) == {b"\0", b"\1"}

    def test_whoever_came_after_the_epoch_whose_gradients_are_averaged_has_none(self) -> None:
        peers = self.of((0, 6), (6, 6), ahead=-1)
        assert peers.of_round(5) == {b"\0"}
        assert peers.of_round(6) == {b"\0", b"\1"}

    def test_the_round_of_states_has_the_number_of_the_next_epoch(self) -> None:
        assert self.of((0, 6), (6, 6), ahead=1, follows=1).of_round(7) == {b"\0", b"\1"}, "synchronous"
        assert self.of((0, 7), (7, 7), follows=1).of_round(7) == {b"\0"}, "in the background"
