"""Who is here and who has put in what: a table of the run's peers, and a slider for those on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hivenb.engine.network.addresses import Reach
from hivenb.swarm.members import Presence
from hivenb.swarm.peer_id import short_id
from hivenb.view import formats
from hivenb.view.dashboard_state import DashboardState
from hivenb.view.empty_states import ANY_TIME, Situation, no_peers_listed
from hivenb.view.help import tooltip, with_help
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import note, safe, trouble

if TYPE_CHECKING:
    from hivenb.swarm.members import Member


# -- blocking panel --------------------------------------------------------------------------------------------------
#
# A list of peers, a button that blocks one of them, or no longer, and one that bans it from the swarm.


_BLOCK_TOOLTIP = (
    "this peer answers a blocked one nothing, asks it for nothing and waits for it in no round; the others go on as "
    "before: swarm.block(peer_id), swarm.unblock(peer_id)"
)

_BAN = "Ban"
_BAN_TOOLTIP = (
    "bans the peer from the swarm, for everybody and for good, where Block is for this peer alone; nobody new comes "
    "in by its invite, and yours is another one from then on. Those who came by the same invite stay. Press twice: "
    "swarm.ban(peer_id)"
)

#: A list of thousands is of no use.
MAX_OFFERED = 100


class BlockingPanel:
    """Blocks peers by hand, and bans them where that can be done.

    :param change: called with a peer's id and whether it is to be blocked; the front end's handlers call it, so it
        must return at once
    :param ban: called in the same way with the id of a peer that is to be banned
    """

    def __init__(self, change: Callable[[str, bool], None], ban: Callable[[str], None] = lambda peer_id: None) -> None:
        widgets = require_ipywidgets()
        self._change, self._ban = change, ban
        self._blocked: frozenset[str] = frozenset()
        #: who is banned by the next click
        self._to_be_banned = ""
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
        self.ban_button = widgets.Button(
            description=_BAN,
            disabled=True,
            layout=widgets.Layout(width="150px", margin="2px 28px 2px 12px"),
            **tooltip(_BAN_TOOLTIP),
        )
        self._helped_ban = with_help(self.ban_button, _BAN_TOOLTIP)
        self._helped_ban.layout.display = "none"
        self.peers.observe(lambda change: self._label(), names="value")
        self.button.on_click(self._on_click)
        self.ban_button.on_click(self._on_ban)
        self.widget = widgets.HBox(
            [with_help(self.peers, _BLOCK_TOOLTIP), self.button, self._helped_ban],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", overflow="visible"),
        )
        self.widget.add_class("hivenb-low")

    def update(self, now: DashboardState) -> None:
        """Offer the peers of this moment."""
        self._blocked = frozenset(now.blocked)
        names = {member.peer.peer_id: member.name for member in now.members if not member.peer.is_self}
        chosen = self.peers.value
        ids = dict.fromkeys([*now.blocked, *names])
        labels = {one: _label_of(one, names.get(one, "")) for one in ids}
        # by name: what they have put in changes their order with each look, and each change disturbs who chooses
        order = sorted(ids, key=lambda one: (one != chosen, one not in self._blocked, labels[one]))
        if (shown := "flex" if now.can_ban else "none") != self._helped_ban.layout.display:
            self._helped_ban.layout.display = shown
        offered = [("", ""), *((labels[one], one) for one in order[:MAX_OFFERED])]
        if set(offered) != set(self.peers.options):
            to_be_banned = self._to_be_banned
            self.peers.options = offered  # which chooses nothing for a moment
            self.peers.value = chosen if chosen in ids else ""
            self._to_be_banned = to_be_banned
        self.peers.disabled = self._is_closed or not now.header.swarm_is_open
        self._label()

    def close(self) -> None:
        """Grey it out."""
        self._is_closed = self.peers.disabled = self.button.disabled = self.ban_button.disabled = True

    def _label(self) -> None:
        is_blocked = self.peers.value in self._blocked
        self.button.description = "Unblock" if is_blocked else "Block"
        self.button.disabled = self.ban_button.disabled = self.peers.disabled or not self.peers.value
        if self._to_be_banned != self.peers.value:
            self._to_be_banned = ""
        self.ban_button.description = "Ban for everybody?" if self._to_be_banned else _BAN

    def _on_click(self, button: Any) -> None:
        if self.peers.value and not self._is_closed:
            self._change(self.peers.value, self.peers.value not in self._blocked)

    def _on_ban(self, button: Any) -> None:
        chosen = self.peers.value
        if not chosen or self._is_closed:
            return
        if self._to_be_banned == chosen:
            self._ban(chosen)
        self._to_be_banned = "" if self._to_be_banned == chosen else chosen
        self._label()


def _label_of(peer_id: str, name: str) -> str:
    return f"{name} {short_id(peer_id)}".strip()


# -- peers panel -----------------------------------------------------------------------------------------------------


#: A page that shows thousands of rows is of no use, and slow.
MAX_ROWS = 100

#: Peers on this machine that the slider offers.
MAX_LOCAL = 8

_TOOLTIP = (
    "further peers of this run as processes on this machine, which share its cores and memory: "
    "swarm.add_local_peers(1, run), swarm.remove_local_peers(1)"
)
_RESTART_TOOLTIP = (
    "start peers on this machine again when they die, three times a minute at most: "
    "swarm.add_local_peers(1, run, restart=True)"
)
#: What it means how one is connected.
_ROUTES = {
    Reach.DIRECTLY: "the two machines talk to each other without anybody in between",
    Reach.RELAYED: "nobody can connect to it: what is sent goes through a relay, and is encrypted",
    Reach.NOT: "connects to others, and cannot be connected to: in rounds, others carry its share",
}

_ABSENT_ROW = ' class="absent"'
#: Pixels of the bar of a peer that has put in everything.
_BAR = 72


class PeersPanel:
    """A slider for the peers on this machine, and a table of all.

    :param ask_for: called with the number of peers on this machine that a person wants; the front end's handlers
        call it, so it must return at once
    :param restart: called with whether those that die are to be started again; must return at once, too
    :param block: called in the same way with a peer's id, and whether it is to be blocked
    :param ban: called in the same way with the id of a peer that is to be banned
    """

    def __init__(
        self,
        ask_for: Callable[[int], None],
        restart: Callable[[bool], None] = lambda on: None,
        block: Callable[[str, bool], None] = lambda peer_id, is_blocked: None,
        ban: Callable[[str], None] = lambda peer_id: None,
    ) -> None:
        widgets = require_ipywidgets()
        self._ask_for, self._restart = ask_for, restart
        self._shown, self._restarts, self._is_closed = 0, False, False
        self.slider = widgets.IntSlider(
            max=MAX_LOCAL,
            continuous_update=False,
            description="peers on this machine",
            style={"description_width": "auto"},
            layout=widgets.Layout(width="380px", margin="2px 28px 2px 0"),
            **tooltip(_TOOLTIP),
        )
        self.slider.observe(self._on_slide, names="value")
        self.restart = widgets.Checkbox(
            description="start dead ones again",
            indent=False,
            layout=widgets.Layout(width="auto", margin="2px 28px 2px 12px"),
            **tooltip(_RESTART_TOOLTIP),
        )
        self.restart.observe(self._on_restart, names="value")
        self._remark = widgets.HTML(layout=widgets.Layout(margin="4px 0 0 16px"))
        self._trouble = widgets.HTML(layout=widgets.Layout(margin="0", display="none"))
        self._table = widgets.HTML(layout=widgets.Layout(margin="0", overflow="auto", max_height="240px"))
        row = widgets.HBox(
            [with_help(self.slider, _TOOLTIP), with_help(self.restart, _RESTART_TOOLTIP), self._remark],
            layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start", overflow="visible"),
        )
        self.blocking = BlockingPanel(block, ban)
        whole = [row, self._trouble, self._table, self.blocking.widget]
        self.widget = widgets.VBox(whole, layout=widgets.Layout(overflow="visible"))

    def update(self, now: DashboardState) -> None:
        """Show the peers as they are now."""
        self._table.value = peers_html(now.members, now.local.ids, now.situation)
        self._remark.value = local_html(now)
        self.blocking.update(now)
        self.slider.disabled = self.restart.disabled = self._is_closed or not now.header.swarm_is_open
        self._trouble.value = trouble(now.local.count.error)
        self._trouble.layout.display = "block" if now.local.count.error else "none"
        if self._shown != now.local.count.shown:
            # Noted first, so that the observer can tell this write from a person's.
            self._shown = now.local.count.shown
            self.slider.max = max(self.slider.max, self._shown)
            self.slider.value = self._shown

        if self._restarts != now.local.count.restarts:
            self._restarts = self.restart.value = now.local.count.restarts

    def close(self) -> None:
        """Grey the slider out."""
        self._is_closed = True
        self.slider.disabled = self.restart.disabled = True
        self.blocking.close()

    def _on_restart(self, change: Any) -> None:
        if change["new"] != self._restarts:
            self._restarts = change["new"]
            self._restart(change["new"])

    def _on_slide(self, change: Any) -> None:
        if change["new"] != self._shown:
            self._shown = change["new"]
            self._ask_for(change["new"])


def peers_html(members: Sequence[Member], local_ids: Mapping[str, int] | None = None, now: Situation = ANY_TIME) -> str:
    """Peers as a table, or how to get some.

    :param members: of the run
    :param local_ids: numbers of those on this machine, by their ids
    :param now: what decides what is said while there are none
    """
    if not members:
        return note(no_peers_listed(now))
    head = (
        '<tr><th>peer</th><th></th><th class="number" title="swarm epoch">epoch</th><th class="number extra">speed</th>'
        '<th title="of all samples that were put into the run">share</th><th class="number extra">samples</th>'
        '<th class="extra">here since</th><th>last seen</th></tr>'
    )
    rows = [_row(member, (local_ids or {}).get(member.peer.peer_id)) for member in members[:MAX_ROWS]]
    left_out = len(members) - MAX_ROWS
    more = note(f"and {formats.counted(left_out, 'more peer')}") if left_out > 0 else ""
    table = f'<table class="hivenb-table"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="hivenb-scroll">{table}</div>{more}'


def local_html(now: DashboardState) -> str:
    """What happens to the peers on this machine, in a sentence: each stage until the last of them trains."""
    ended = [f"local {number} has ended: {why}" for number, why in now.local.ended.items()]
    return "".join(note(safe(text)) for text in (_stage_of_local(now), *ended) if text)


def _stage_of_local(now: DashboardState) -> str:
    local = now.local.count
    if local.wanted < local.there:
        return f"removing {formats.counted(local.there - local.wanted, 'peer')} \N{HORIZONTAL ELLIPSIS}"
    starts = "its process starts, loads torch and joins the swarm \N{HORIZONTAL ELLIPSIS}"
    if local.wanted > local.there:
        return f"peer {local.there + 1} of {local.wanted}: {starts}"
    by_state = {
        state: [number for number, one in now.local.states.items() if one == state] for state in ("ready", "training")
    }
    if not now.status.state.is_active:
        kept, comes = by_state["training"], "comes" if local.returning == 1 else "come"
        if kept:
            return f"{_local(kept)}: trains on without this run, until it starts again or you remove it"
        if local.returning:
            return f"stopped with the run; {formats.counted(local.returning, 'peer')} {comes} back when it starts"
        return "ready; training begins with the run" if local.there and now.header.swarm_is_open else ""
    if local.returning:
        return f"peer {local.there + 1} of {local.shown}: {starts}"
    if now.status.state.value == "paused" and by_state["training"]:
        return f"{_local(by_state['training'])}: trains on while this run is paused"
    reported = {now.local.ids.get(member.peer.peer_id) for member in now.members}
    silent = {state: [one for one in numbers if one not in reported] for state, numbers in by_state.items()}
    if silent["ready"]:
        return f"{_local(silent['ready'])}: in the swarm, and waits until the run trains \N{HORIZONTAL ELLIPSIS}"
    if silent["training"]:
        stage = "in the swarm; downloads the parameters and makes its first batch"
        return f"{_local(silent['training'])}: {stage} \N{HORIZONTAL ELLIPSIS}"
    return ""


def _local(numbers: Sequence[int]) -> str:
    return f"local {', '.join(map(str, numbers))}"


def _row(member: Member, local_number: int | None) -> str:
    peer = member.peer
    is_there = member.presence in (Presence.HERE, Presence.UNKNOWN)
    name = f'<span class="name" title="{safe(member.name)}">{safe(member.name)}</span> ' if member.name else ""
    since = formats.ago(member.here_for) if member.presence is Presence.HERE else formats.ABSENT
    bar = f'<span class="share" style="width: {max(1, round(_BAR * member.share))}px"></span>'
    return (
        f"<tr{_ABSENT_ROW if not is_there else ''}>"
        f'<td title="{safe(peer.peer_id)}">{name}<code>{safe(short_id(peer.peer_id))}</code></td>'
        f"<td>{_kind(member, local_number)}</td>"
        f'<td class="number">{formats.count(peer.epoch)}</td>'
        f'<td class="number extra">{safe(formats.rate(peer.samples_per_second))}</td>'
        f"<td>{bar}{safe(formats.share(member.share))}</td>"
        f'<td class="number extra">{formats.count(member.samples)}</td>'
        f'<td class="extra">{safe(since)}</td>'
        f"<td>{safe(formats.presence(member))}</td></tr>{_reason(member)}"
    )


def _reason(member: Member) -> str:
    if not member.why_excluded:
        return ""
    return f'<tr class="reason"><td colspan="8">{note(f"no round waits for it: {member.why_excluded}")}</td></tr>'


def _kind(member: Member, local_number: int | None) -> str:
    kinds = ["<b>this peer</b>"] if member.peer.is_self else []
    if local_number is not None:
        kinds.append(f'<span title="on this machine">local {local_number}</span>')
    elif member.route is not Reach.UNKNOWN:
        kinds.append(f'<span title="{_ROUTES[member.route]}">{member.route.value}</span>')
    return ", ".join(kinds)
