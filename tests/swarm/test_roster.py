"""Who is here, who has gone without a goodbye, and since when, from reports as they are read once a second."""

from __future__ import annotations

from dataclasses import replace

from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.swarm.roster import MAX_ABSENT, QUIET, Presence, Roster

OWN = PeerInfo("own", 3, 10, 100.0, False, 0.1, True)
OTHER = PeerInfo("other", 3, 30, 300.0, False, 0.1, False)


def presences(roster: Roster) -> dict[str, Presence]:
    return {member.peer.peer_id: member.presence for member in roster.members}


def watch(roster: Roster, seconds: range, *peers: PeerInfo) -> None:
    for now in seconds:
        roster.update(peers, 1000, {}, now=float(now))


def test_a_peer_that_falls_silent_is_a_ghost_within_ten_seconds_and_is_not_counted():
    roster = Roster()
    watch(roster, range(5), OWN, OTHER)
    assert [peer.peer_id for peer in roster.present] == ["own", "other"]
    for age in range(1, 11):
        if presences(roster)["other"] is Presence.GHOST:
            break
        roster.update((OWN, replace(OTHER, age=float(age))), 1000, {}, now=4.0 + age)
    assert QUIET < age <= 10
    assert [peer.peer_id for peer in roster.present] == ["own"]
    watch(roster, range(20, 21), OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.GONE}


def test_a_peer_that_says_goodbye_is_away_and_here_again_when_it_returns():
    roster = Roster()
    watch(roster, range(5), OWN, OTHER)
    assert {member.here_for for member in roster.members} == {4.0}
    watch(roster, range(5, 8), OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.AWAY}
    watch(roster, range(8, 10), OWN, OTHER)
    assert {m.peer.peer_id: m.here_for for m in roster.members} == {"own": 9.0, "other": 1.0}


def test_a_peer_of_slow_batches_is_no_ghost():
    roster = Roster()
    roster.update((OWN, replace(OTHER, epoch=0, samples=0)), 1000, {}, now=0.0)
    for now in range(1, 20):  # its first batch
        roster.update((OWN, replace(OTHER, epoch=0, samples=0, age=float(now))), 1000, {}, now=float(now))
        assert presences(roster)["other"] is Presence.HERE
    for now in range(20, 80):  # one in 20 s
        roster.update((OWN, replace(OTHER, epoch=0, samples=now // 20, age=now % 20 + 0.01)), 1000, {}, now=float(now))
        assert presences(roster)["other"] is Presence.HERE
    for now in range(80, 130):
        roster.update((OWN, replace(OTHER, epoch=0, samples=3, age=now - 60.0)), 1000, {}, now=float(now))
    assert presences(roster)["other"] is Presence.GHOST


def test_one_that_was_silent_already_when_it_is_first_seen_is_a_ghost():
    roster = Roster()
    watch(roster, range(1), OWN, replace(OTHER, age=15.0))
    assert presences(roster)["other"] is Presence.GHOST


def test_this_process_is_never_a_ghost():
    roster = Roster()
    watch(roster, range(5), OWN)
    for now in range(5, 60):
        roster.update((replace(OWN, age=now - 4.0),), 1000, {}, now=float(now))
    assert presences(roster) == {"own": Presence.HERE}


def test_those_here_come_first_and_those_who_put_in_more_before_others():
    roster = Roster()
    small = replace(OTHER, peer_id="small", samples=1)
    left = replace(OTHER, peer_id="left", samples=900)
    roster.update((OWN, OTHER, small, left), 1000, {"small": "Ann"}, now=0.0)
    roster.update((OWN, OTHER, small), 1000, {"small": "Ann"}, now=1.0)
    members = roster.members
    assert [m.peer.peer_id for m in members] == ["other", "own", "small", "left"]
    assert [m.samples for m in members] == [30, 10, 1, 900]
    assert [m.name for m in members] == ["", "", "Ann", ""]
    assert sum(m.share for m in members) == 1.0


def test_after_the_run_the_contributions_stay_and_presence_is_unknown():
    roster = Roster()
    watch(roster, range(3), OWN, OTHER)
    roster.stop_watching()
    assert set(presences(roster).values()) == {Presence.UNKNOWN}
    assert roster.present == ()
    assert roster.members[0].samples == 30
    watch(roster, range(100, 102), OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.AWAY}


def test_those_who_left_are_remembered_within_bounds():
    roster = Roster()
    for now in range(MAX_ABSENT + 30):
        roster.update((OWN, replace(OTHER, peer_id=f"{now}")), 1000, {}, now=float(now))
    assert len(roster.members) == MAX_ABSENT + 2
