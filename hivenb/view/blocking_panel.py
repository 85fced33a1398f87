"""A list of peers, a button that blocks one of them, or no longer, and one that puts it out of the swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivenb.swarm.peer_id import short_id
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.display import require_ipywidgets
from hivenb.view.help import tooltip, with_help

_BLOCK_TOOLTIP = (
    "this peer answers a blocked one nothing, asks it for nothing and waits for it in no round; the others go on as "
    "before: swarm.block(peer_id), swarm.unblock(peer_id)"
)

_DOOR = "Show the door"
_BAN_TOOLTIP = (
    "puts the peer out of the swarm, for everybody and for good, where Block is for this peer alone; nobody new comes "
    "in by its invite, and yours is another one from then on. Those who came by the same invite stay. Press twice: "
    "swarm.show_the_door(peer_id)"
)

#: A list of thousands is of no use.
MAX_OFFERED = 100


class BlockingPanel:
    """Blocks peers by hand, and shows them the door where that can be done.

    :param change: called with a peer's id and whether it is to be blocked; the front end's handlers call it, so it
        must return at once
    :param show_out: called in the same way with the id of a peer that is to be put out
    """

    def __init__(
        self, change: Callable[[str, bool], None], show_out: Callable[[str], None] = lambda peer_id: None
    ) -> None:
        widgets = require_ipywidgets()
        self._change, self._show_out = change, show_out
        self._blocked: frozenset[str] = frozenset()
        #: who is put out by the next click
        self._doomed = ""
        self._is_closed = False
        self.peers = widgets.Dropdown(
            options=[("", "")],
            description="block a peer",
            style={"description_width": "auto"},
            layout=widgets.Layout(width="260px", margin="2px 28px 2px 0"),
            **tooltip(_BLOCK_TOOLTIP),
        )
        self.button = widgets.Button(
            description="Block", disabled=True, layout=widgets.Layout(width="90px", margin="3px 0 2px 12px")
        )
        self.door = widgets.Button(
            description=_DOOR,
            disabled=True,
            layout=widgets.Layout(width="150px", margin="2px 28px 2px 12px"),
            **tooltip(_BAN_TOOLTIP),
        )
        self._helped_door = with_help(self.door, _BAN_TOOLTIP)
        self._helped_door.layout.display = "none"
        self.peers.observe(lambda change: self._label(), names="value")
        self.button.on_click(self._on_click)
        self.door.on_click(self._on_door)
        self.widget = widgets.HBox(
            [with_help(self.peers, _BLOCK_TOOLTIP), self.button, self._helped_door],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", overflow="visible"),
        )
        self.widget.add_class("hivenb-low")

    def update(self, now: DashboardState) -> None:
        """Offer the peers of this moment."""
        self._blocked = frozenset(now.blocked)
        names = {member.peer.peer_id: member.name for member in now.members if not member.peer.is_self}
        ids = dict.fromkeys([*now.blocked, *names])
        if (shown := "flex" if now.can_show_the_door else "none") != self._helped_door.layout.display:
            self._helped_door.layout.display = shown
        offered = [("", ""), *((_label_of(one, names.get(one, "")), one) for one in list(ids)[:MAX_OFFERED])]
        if tuple(offered) != tuple(self.peers.options):
            chosen = self.peers.value
            self.peers.options = offered
            self.peers.value = chosen if chosen in ids else ""
        self.peers.disabled = self._is_closed or not now.standing.swarm_is_open
        self._label()

    def close(self) -> None:
        """Grey it out."""
        self._is_closed = self.peers.disabled = self.button.disabled = self.door.disabled = True

    def _label(self) -> None:
        is_blocked = self.peers.value in self._blocked
        self.button.description = "Unblock" if is_blocked else "Block"
        self.button.disabled = self.door.disabled = self.peers.disabled or not self.peers.value
        if self._doomed != self.peers.value:
            self._doomed = ""
        self.door.description = "Out for everybody?" if self._doomed else _DOOR

    def _on_click(self, button: Any) -> None:
        if self.peers.value and not self._is_closed:
            self._change(self.peers.value, self.peers.value not in self._blocked)

    def _on_door(self, button: Any) -> None:
        chosen = self.peers.value
        if not chosen or self._is_closed:
            return
        if self._doomed == chosen:
            self._show_out(chosen)
        self._doomed = "" if self._doomed == chosen else chosen
        self._label()


def _label_of(peer_id: str, name: str) -> str:
    return f"{name} {short_id(peer_id)}".strip()
