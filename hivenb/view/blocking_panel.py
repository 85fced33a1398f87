"""A list of peers and a button that blocks one of them, or no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivenb.swarm.peer_id import short_id
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.display import require_ipywidgets
from hivenb.view.help import tooltip, with_help

_TOOLTIP = (
    "this peer answers a blocked one nothing, asks it for nothing and waits for it in no round; the others go on as "
    "before: swarm.block(peer_id), swarm.unblock(peer_id)"
)

#: A list of thousands is of no use.
MAX_OFFERED = 100


class BlockingPanel:
    """Blocks peers by hand.

    :param change: called with a peer's id and whether it is to be blocked; the front end's handlers call it, so it
        must return at once
    """

    def __init__(self, change: Callable[[str, bool], None]) -> None:
        widgets = require_ipywidgets()
        self._change = change
        self._blocked: frozenset[str] = frozenset()
        self._is_closed = False
        self.peers = widgets.Dropdown(
            options=[("", "")],
            description="block a peer",
            style={"description_width": "auto"},
            layout=widgets.Layout(width="260px", margin="2px 28px 2px 0"),
            **tooltip(_TOOLTIP),
        )
        self.button = widgets.Button(description="Block", disabled=True, layout=widgets.Layout(width="90px"))
        self.peers.observe(lambda change: self._label(), names="value")
        self.button.on_click(self._on_click)
        self.widget = widgets.HBox(
            [with_help(self.peers, _TOOLTIP), self.button],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", overflow="visible"),
        )

    def update(self, now: DashboardState) -> None:
        """Offer the peers of this moment."""
        self._blocked = frozenset(now.blocked)
        names = {member.peer.peer_id: member.name for member in now.members if not member.peer.is_self}
        ids = dict.fromkeys([*now.blocked, *names])
        offered = [("", ""), *((_label_of(one, names.get(one, "")), one) for one in list(ids)[:MAX_OFFERED])]
        if tuple(offered) != tuple(self.peers.options):
            chosen = self.peers.value
            self.peers.options = offered
            self.peers.value = chosen if chosen in ids else ""
        self.peers.disabled = self._is_closed or not now.standing.swarm_is_open
        self._label()

    def close(self) -> None:
        """Grey it out."""
        self._is_closed = self.peers.disabled = self.button.disabled = True

    def _label(self) -> None:
        is_blocked = self.peers.value in self._blocked
        self.button.description = "Unblock" if is_blocked else "Block"
        self.button.disabled = self.peers.disabled or not self.peers.value

    def _on_click(self, button: Any) -> None:
        if self.peers.value and not self._is_closed:
            self._change(self.peers.value, self.peers.value not in self._blocked)


def _label_of(peer_id: str, name: str) -> str:
    return f"{name} {short_id(peer_id)}".strip()
