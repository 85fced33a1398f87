"""Who is here: a table of the run's peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hivenb.monitor import short_id
from hivenb.view import words
from hivenb.view.display import require_ipywidgets
from hivenb.view.facts import Facts
from hivenb.view.style import note, safe
from hivenb.view.text import NO_PEERS

if TYPE_CHECKING:
    from hivenb.engine.tracker import PeerInfo

#: A page that shows thousands of rows is of no use, and slow.
MAX_ROWS = 100


class PeersPanel:
    """A table of peers."""

    def __init__(self) -> None:
        widgets = require_ipywidgets()
        self.widget = widgets.HTML(layout=widgets.Layout(width="100%", overflow="auto", max_height="240px"))

    def update(self, facts: Facts) -> None:
        """Show the peers of these facts."""
        self.widget.value = peers_html(facts.peers)


def peers_html(peers: Sequence[PeerInfo]) -> str:
    """Peers as a table, or how to get some."""
    if not peers:
        return note(NO_PEERS)
    head = (
        '<tr><th>peer</th><th></th><th class="number">epoch</th><th class="number">samples</th>'
        '<th class="number">speed</th><th>last seen</th></tr>'
    )
    rows = [
        f'<tr><td title="{safe(peer.peer_id)}"><code>{safe(short_id(peer.peer_id))}</code></td>'
        f"<td>{_kind(peer)}</td>"
        f'<td class="number">{words.count(peer.epoch)}</td>'
        f'<td class="number">{words.count(peer.samples)}</td>'
        f'<td class="number">{safe(words.rate(peer.samples_per_second))}</td>'
        f"<td>{safe(words.ago(peer.age))}</td></tr>"
        for peer in peers[:MAX_ROWS]
    ]
    left_out = len(peers) - MAX_ROWS
    more = note(f"and {words.counted(left_out, 'more peer')}") if left_out > 0 else ""
    table = f'<table class="hivenb-table"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div style="overflow-x: auto">{table}</div>{more}'


def _kind(peer: PeerInfo) -> str:
    kinds = ["<b>this peer</b>"] if peer.is_self else []
    if peer.client_mode:
        kinds.append('<span title="connects to others, and cannot be connected to">client</span>')
    return ", ".join(kinds)
