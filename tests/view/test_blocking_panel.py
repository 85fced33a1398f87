from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from hivenb.view.dashboard_state import DashboardState
from hivenb.view.peers_panel import BlockingPanel, PeersPanel, peers_html

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


def words_of(html: str) -> str:
    """What a reader sees of it."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


@pytest.fixture
def shown(scene: Any, members: Any) -> DashboardState:
    scene.members = members
    return DashboardState.of(scene)


def test_the_other_peers_are_offered_and_one_is_blocked_and_unblocked(shown: DashboardState, members: Any) -> None:
    asked: list[tuple[str, bool]] = []
    panel = BlockingPanel(lambda *what: asked.append(what))
    panel.update(shown)
    other = members[1].peer.peer_id
    assert panel.peers.options == (("", ""), ("Ann …her002", other)), "a peer cannot block itself"
    assert panel.button.disabled
    panel.button.click()
    assert asked == []
    panel.peers.value = other
    assert (panel.button.description, panel.button.disabled) == ("Block", False)
    panel.button.click()
    assert asked == [(other, True)]
    panel.update(replace(shown, blocked=(other,)))
    assert (panel.peers.value, panel.button.description) == (other, "Unblock")
    panel.button.click()
    assert asked == [(other, True), (other, False)]
    panel.close()
    panel.button.click()
    assert len(asked) == 2
    assert panel.peers.disabled


def test_who_knows_the_secret_bans_a_peer_by_two_clicks(shown: DashboardState, members: Any) -> None:
    banned: list[str] = []
    other, third = members[1].peer.peer_id, "12D3KooWthird003"
    shown = replace(shown, members=(*members, replace(members[1], peer=replace(members[1].peer, peer_id=third))))
    panel = BlockingPanel(lambda *what: None, banned.append)
    panel.update(shown)
    assert panel._helped_ban.layout.display == "none", "one that was invited can ban nobody"
    panel.update(replace(shown, can_ban=True))
    assert panel._helped_ban.layout.display == "flex"
    assert (panel.ban_button.description, panel.ban_button.disabled) == ("Ban", True)
    assert "for everybody and for good, where Block is for this peer alone" in panel._helped_ban.children[1].value
    panel.ban_button.click()
    panel.peers.value = other
    assert not panel.ban_button.disabled
    panel.ban_button.click()
    panel.update(replace(shown, can_ban=True))
    assert (banned, panel.ban_button.description) == ([], "Ban for everybody?")
    panel.peers.value = third
    assert panel.ban_button.description == "Ban", "another one, who is asked for anew"
    panel.ban_button.click()
    panel.ban_button.click()
    assert (banned, panel.ban_button.description) == ([third], "Ban")
    panel.close()
    panel.ban_button.click()
    panel.ban_button.click()
    assert banned == [third]


def test_an_order_that_changes_disturbs_nobody_who_chooses(shown: DashboardState, members: Any) -> None:
    """Members are in the order of what they have put in, which with peers that are alike changes each second."""
    banned: list[str] = []
    others = [replace(members[1], peer=replace(members[1].peer, peer_id=f"12D3KooWother{i:03}")) for i in range(120)]
    panel = BlockingPanel(lambda *what: None, banned.append)
    panel.update(now := replace(shown, members=(members[0], *others), can_ban=True))
    changes: list[Any] = []
    panel.peers.value = chosen = others[60].peer.peer_id
    panel.ban_button.click()
    panel.peers.observe(changes.append, names=["value", "_options_labels"])
    panel.update(replace(now, members=(*others[::-1], members[0])))
    assert changes == []
    panel.update(replace(now, members=(members[0], *others[:110])))
    assert (panel.peers.value, panel.ban_button.description) == (chosen, "Ban for everybody?")
    panel.ban_button.click()
    assert banned == [chosen]


def test_the_panel_of_peers_has_the_button(shown: DashboardState) -> None:
    asked: list[str] = []
    panel = PeersPanel(lambda count: None, ban=asked.append)
    panel.update(replace(shown, can_ban=True))
    other = panel.blocking.peers.options[1][1]
    panel.blocking.peers.value = other
    panel.blocking.ban_button.click()
    panel.blocking.ban_button.click()
    assert asked == [other]


def test_one_that_has_left_can_still_be_unblocked(shown: DashboardState) -> None:
    panel = BlockingPanel(lambda *what: None)
    panel.update(replace(shown, members=(), blocked=("12D3KooWgone0003",)))
    assert [value for _, value in panel.peers.options] == ["", "12D3KooWgone0003"]


def test_the_choice_stays_while_peers_come_and_go(shown: DashboardState, members: Any) -> None:
    panel = BlockingPanel(lambda *what: None)
    panel.update(shown)
    panel.peers.value = members[1].peer.peer_id
    third = replace(members[1], peer=replace(members[1].peer, peer_id="12D3KooWthird003"))
    panel.update(replace(shown, members=(*members, third)))
    assert panel.peers.value == members[1].peer.peer_id
    panel.update(replace(shown, members=members[:1]))
    assert panel.peers.value == ""


def test_why_no_round_waits_for_a_peer_is_said_and_is_no_html(shown: DashboardState, members: Any) -> None:
    html = peers_html([replace(members[1], why_excluded="missed 2 rounds in a row; asked again in 4 epochs")])
    assert "no round waits for it: missed 2 rounds in a row; asked again in 4 epochs" in words_of(html)
    html = peers_html([replace(members[1], why_excluded=EVIL)])
    assert "<script" not in html
    assert "<img" not in html
    panel = PeersPanel(lambda count: None, block=lambda *what: None)
    panel.update(replace(shown, members=(replace(members[1], name=EVIL, why_excluded=EVIL),)))
    assert "<script" not in panel._table.value
