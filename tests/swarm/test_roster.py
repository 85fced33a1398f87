"""Who is here, who has gone without a goodbye, and since when, from one look at the swarm after another."""

from __future__ import annotations

from dataclasses import replace

from hivenb.engine.network.addresses import Reach
from hivenb.engine.progress.peer_reports import Look, PeerInfo
from hivenb.swarm.roster import MAX_ABSENT, Presence, Roster

OWN = PeerInfo("own", 3, 10, 100.0, False, 0.1, True)
OTHER = PeerInfo("other", 3, 30, 300.0, False, 0.1, False)


def presences(roster: Roster) -> dict[str, Presence]:
    return {member.peer.peer_id: member.presence for member in roster.members}


def look(roster: Roster, at: float, *peers: PeerInfo, gone: str | None = None) -> None:
    roster.update(Look(at, peers, frozenset() if gone is None else frozenset([gone])), 1000, {})


def test_one_that_has_gone_is_not_counted_listed_or_not_until_it_is_back():
    roster = Roster()
    look(roster, 0.0, OWN, OTHER)
    assert [peer.peer_id for peer in roster.present] == ["own", "other"]
    look(roster, 3.0, OWN, replace(OTHER, age=3.0), gone="other")
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.GONE}
    assert [peer.peer_id for peer in roster.present] == ["own"]
    look(roster, 23.0, OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.GONE}
    assert [member.peer.age for member in roster.members] == [0.1, 23.0]
    look(roster, 30.0, OWN, OTHER)
    look(roster, 32.0, OWN, OTHER)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.HERE}
    assert {m.peer.peer_id: m.here_for for m in roster.members} == {"own": 32.0, "other": 2.0}


def test_who_has_gone_may_be_found_out_between_two_answers_of_the_dht():
    roster = Roster()
    look(roster, 5.0, OWN, OTHER)
    before = [(m.peer, m.samples, m.here_for) for m in roster.members]
    look(roster, 5.0, OWN, OTHER)
    assert [(m.peer, m.samples, m.here_for) for m in roster.members] == before, "the same look says nothing new"
    look(roster, 5.0, OWN, OTHER, gone="other")
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.GONE}


def test_a_peer_that_says_goodbye_is_away_and_here_again_when_it_returns():
    roster = Roster()
    look(roster, 0.0, OWN, OTHER)
    look(roster, 4.0, OWN, OTHER)
    assert {member.here_for for member in roster.members} == {4.0}
    look(roster, 5.0, OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.AWAY}
    look(roster, 8.0, OWN, OTHER)
    look(roster, 9.0, OWN, OTHER)
    assert {m.peer.peer_id: m.here_for for m in roster.members} == {"own": 9.0, "other": 1.0}


def test_one_that_reports_seldom_is_here_as_long_as_nobody_says_otherwise():
    """A peer of plain hivemind, or one whose batches take long: it is asked, and answers."""
    roster = Roster()
    for age in range(60):
        look(roster, float(age), OWN, replace(OTHER, age=float(age)))
        assert presences(roster) == {"own": Presence.HERE, "other": Presence.HERE}


def test_epochs_between_two_looks_count_by_the_time_between_them_and_not_between_two_updates():
    roster = Roster()
    look(roster, 0.0, OWN, OTHER)
    for _ in range(10):
        look(roster, 0.0, OWN, OTHER)
    # eight epochs of 1000 samples at 400 a second
    look(roster, 20.0, replace(OWN, epoch=11, samples=0), replace(OTHER, epoch=11, samples=0))
    assert sum(member.samples for member in roster.members) == 8000


def test_those_here_come_first_and_those_who_put_in_more_before_others():
    roster = Roster()
    small = replace(OTHER, peer_id="small", samples=1)
    left = replace(OTHER, peer_id="left", samples=900)
    roster.update(Look(0.0, (OWN, OTHER, small, left)), 1000, {"small": "Ann"})
    roster.update(Look(1.0, (OWN, OTHER, small)), 1000, {"small": "Ann"})
    members = roster.members
    assert [m.peer.peer_id for m in members] == ["other", "own", "small", "left"]
    assert [m.samples for m in members] == [30, 10, 1, 900]
    assert [m.name for m in members] == ["", "", "Ann", ""]
    assert sum(m.share for m in members) == 1.0


def test_after_the_run_the_contributions_stay_and_presence_is_unknown():
    roster = Roster()
    look(roster, 0.0, OWN, OTHER)
    roster.stop_watching()
    assert set(presences(roster).values()) == {Presence.UNKNOWN}
    assert roster.present == ()
    assert roster.members[0].samples == 30
    look(roster, 100.0, OWN)
    assert presences(roster) == {"own": Presence.HERE, "other": Presence.AWAY}


def test_those_who_left_are_remembered_within_bounds():
    roster = Roster()
    for now in range(MAX_ABSENT + 30):
        look(roster, float(now), OWN, replace(OTHER, peer_id=f"{now}"))
    assert len(roster.members) == MAX_ABSENT + 2


def test_how_a_peer_is_connected_is_what_was_seen_or_what_it_says_of_itself():
    roster = Roster()
    client = replace(OTHER, peer_id="client", client_mode=True)
    seen = {"own": Reach.RELAYED, "other": Reach.DIRECTLY, "client": Reach.DIRECTLY}
    roster.update(Look(0.0, (OWN, OTHER, client, replace(OTHER, peer_id="afar"))), 1000, {}, routes=seen)
    assert {m.peer.peer_id: m.route for m in roster.members} == {
        "own": Reach.RELAYED,
        "other": Reach.DIRECTLY,
        "client": Reach.NOT,  # it has connected itself, and nobody can connect to it
        "afar": Reach.UNKNOWN,
    }


def test_why_no_round_waits_for_a_peer_is_remembered_as_long_as_it_holds():
    roster = Roster()
    roster.update(Look(0.0, (OWN, OTHER)), 1000, {}, {"other": "missed 2 rounds in a row"})
    assert {m.peer.peer_id: m.left_out for m in roster.members} == {"own": "", "other": "missed 2 rounds in a row"}
    look(roster, 1.0, OWN, OTHER)
    assert not any(m.left_out for m in roster.members)
