"""Who is here, who has gone without a goodbye, and since when, from one look at the swarm after another."""

from __future__ import annotations

from dataclasses import replace

from hivenb.engine.network.addresses import Reach
from hivenb.engine.progress.peer_reports import Look, PeerInfo
from hivenb.swarm.members import MAX_ABSENT, MemberList, Presence

OWN = PeerInfo("own", 3, 10, 100.0, False, 0.1, True)
OTHER = PeerInfo("other", 3, 30, 300.0, False, 0.1, False)


def presences(member_list: MemberList) -> dict[str, Presence]:
    return {member.peer.peer_id: member.presence for member in member_list.members}


def look(member_list: MemberList, at: float, *peers: PeerInfo, gone: str | None = None) -> None:
    member_list.update(Look(at, peers, frozenset() if gone is None else frozenset([gone])), 1000, {})


def test_one_that_has_gone_is_not_counted_listed_or_not_until_it_is_back():
    member_list = MemberList()
    look(member_list, 0.0, OWN, OTHER)
    assert [peer.peer_id for peer in member_list.present] == ["own", "other"]
    look(member_list, 3.0, OWN, replace(OTHER, age=3.0), gone="other")
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.GONE}
    assert [peer.peer_id for peer in member_list.present] == ["own"]
    look(member_list, 23.0, OWN)
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.GONE}
    assert [member.peer.age for member in member_list.members] == [0.1, 23.0]
    look(member_list, 30.0, OWN, OTHER)
    look(member_list, 32.0, OWN, OTHER)
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.HERE}
    assert {m.peer.peer_id: m.here_for for m in member_list.members} == {"own": 32.0, "other": 2.0}


def test_who_has_gone_may_be_found_out_between_two_answers_of_the_dht():
    member_list = MemberList()
    look(member_list, 5.0, OWN, OTHER)
    before = [(m.peer, m.samples, m.here_for) for m in member_list.members]
    look(member_list, 5.0, OWN, OTHER)
    assert [(m.peer, m.samples, m.here_for) for m in member_list.members] == before, "the same look says nothing new"
    look(member_list, 5.0, OWN, OTHER, gone="other")
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.GONE}


def test_a_peer_that_says_goodbye_is_away_and_here_again_when_it_returns():
    member_list = MemberList()
    look(member_list, 0.0, OWN, OTHER)
    look(member_list, 4.0, OWN, OTHER)
    assert {member.here_for for member in member_list.members} == {4.0}
    look(member_list, 5.0, OWN)
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.AWAY}
    look(member_list, 8.0, OWN, OTHER)
    look(member_list, 9.0, OWN, OTHER)
    assert {m.peer.peer_id: m.here_for for m in member_list.members} == {"own": 9.0, "other": 1.0}


def test_one_that_reports_seldom_is_here_as_long_as_nobody_says_otherwise():
    """A peer of plain hivemind, or one whose batches take long: it is asked, and answers."""
    member_list = MemberList()
    for age in range(60):
        look(member_list, float(age), OWN, replace(OTHER, age=float(age)))
        assert presences(member_list) == {"own": Presence.HERE, "other": Presence.HERE}


def test_epochs_between_two_looks_count_by_the_time_between_them_and_not_between_two_updates():
    member_list = MemberList()
    look(member_list, 0.0, OWN, OTHER)
    for _ in range(10):
        look(member_list, 0.0, OWN, OTHER)
    # eight epochs of 1000 samples at 400 a second
    look(member_list, 20.0, replace(OWN, epoch=11, samples=0), replace(OTHER, epoch=11, samples=0))
    assert sum(member.samples for member in member_list.members) == 8000


def test_those_here_come_first_and_those_who_put_in_more_before_others():
    member_list = MemberList()
    small = replace(OTHER, peer_id="small", samples=1)
    left = replace(OTHER, peer_id="left", samples=900)
    member_list.update(Look(0.0, (OWN, OTHER, small, left)), 1000, {"small": "Ann"})
    member_list.update(Look(1.0, (OWN, OTHER, small)), 1000, {"small": "Ann"})
    members = member_list.members
    assert [m.peer.peer_id for m in members] == ["other", "own", "small", "left"]
    assert [m.samples for m in members] == [30, 10, 1, 900]
    assert [m.name for m in members] == ["", "", "Ann", ""]
    assert sum(m.share for m in members) == 1.0


def test_after_the_run_the_contributions_stay_and_presence_is_unknown():
    member_list = MemberList()
    look(member_list, 0.0, OWN, OTHER)
    member_list.stop_watching()
    assert set(presences(member_list).values()) == {Presence.UNKNOWN}
    assert member_list.present == ()
    assert member_list.members[0].samples == 30
    look(member_list, 100.0, OWN)
    assert presences(member_list) == {"own": Presence.HERE, "other": Presence.AWAY}


def test_those_who_left_are_remembered_within_bounds():
    member_list = MemberList()
    for now in range(MAX_ABSENT + 30):
        look(member_list, float(now), OWN, replace(OTHER, peer_id=f"{now}"))
    assert len(member_list.members) == MAX_ABSENT + 2


def test_how_a_peer_is_connected_is_what_was_seen_or_what_it_says_of_itself():
    member_list = MemberList()
    client = replace(OTHER, peer_id="client", client_mode=True)
    seen = {"own": Reach.RELAYED, "other": Reach.DIRECTLY, "client": Reach.DIRECTLY}
    member_list.update(Look(0.0, (OWN, OTHER, client, replace(OTHER, peer_id="afar"))), 1000, {}, routes=seen)
    assert {m.peer.peer_id: m.route for m in member_list.members} == {
        "own": Reach.RELAYED,
        "other": Reach.DIRECTLY,
        "client": Reach.NOT,  # it has connected itself, and nobody can connect to it
        "afar": Reach.UNKNOWN,
    }


def test_why_no_round_waits_for_a_peer_is_remembered_as_long_as_it_holds():
    member_list = MemberList()
    member_list.update(Look(0.0, (OWN, OTHER)), 1000, {}, {"other": "missed 2 rounds in a row"})
    assert {m.peer.peer_id: m.why_excluded for m in member_list.members} == {
        "own": "",
        "other": "missed 2 rounds in a row",
    }
    look(member_list, 1.0, OWN, OTHER)
    assert not any(m.why_excluded for m in member_list.members)
