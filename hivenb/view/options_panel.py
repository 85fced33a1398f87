"""The switches: what a person can change about collaborative training, in words, also while it trains.

Those that are rarely needed are a widget of their own, for another place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hivenb.figures.predicted_traffic import epoch_bytes
from hivenb.options.options import FIELDS
from hivenb.view import words
from hivenb.view.closed_dashboard import close
from hivenb.view.dashboard_state import DashboardState, OptionsState
from hivenb.view.display import require_ipywidgets
from hivenb.view.help import with_help
from hivenb.view.option_fields import OWN_OBJECT, Field, Shapes, about, field
from hivenb.view.style import heading, note, trouble

if TYPE_CHECKING:
    from hivenb.options.options import Options

#: The group of those on which all peers of a run have to agree.
_SHARED = "all peers"

#: What the panel offers, group by group, each in the order in which one thing builds on another.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "overlap": ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging"),
    "memory": ("offload_optimizer", "reuse_grad_buffers"),
    "compression": ("grad_compression", "state_averaging_compression"),
    _SHARED: (
        "target_batch_size",
        "average_state_every",
        "grad_averager_factory",
        "use_local_updates",
        "outer_optimizer",
    ),
    "rounds": (
        "matchmaking_time",
        "averaging_timeout",
        "allreduce_timeout",
        "next_chunk_timeout",
        "robust_aggregation",
        "outer_fragments",
    ),
    "other": (
        "roll_back",
        "average_buffers",
        "frozen_parameters",
        "load_state_compression",
        "load_state_timeout",
        "shutdown_timeout",
        "performance_ema_alpha",
    ),
    "peer": ("keep_state_every", "client_mode", "auxiliary", "verbose"),
}

#: The groups of those that are needed now and then, in a tab of their own.
RARER = ("rounds", "other", "peer")

_HEADINGS = {
    "overlap": "Overlap training and averaging",
    "memory": "Memory",
    "compression": "Compression of what is sent",
    _SHARED: "The same for all peers",
    "rounds": "Rounds",
    "other": "Newcomers, goodbyes and speed",
    "peer": "This peer",
}
_WIDTHS = {"overlap": "250px", "memory": "220px", "rounds": "360px", "peer": "180px"}
_WIDTH = "260px"

Change = Callable[[str, Any], None]


class OptionsPanel:
    """A switch or a choice for each option that it shows.

    :param change: called with an option's name and its new value when a person changes one; the front end's
        handlers call it, so it must return at once
    :param shapes: of the model's tensors, from which follows what each codec sends
    :param buffers: bytes of its buffers
    """

    def __init__(self, change: Change, shapes: Shapes = (), buffers: int = 0) -> None:
        widgets = require_ipywidgets()
        self._change, self._shapes, self._buffers = change, shapes, buffers
        self._shown: dict[str, Any] = {}
        self._wrong: dict[str, Any] = {}
        self._locked = widgets.HTML(layout=widgets.Layout(display="none", margin="0 2px"))
        # three lines in any case, so that what is below stays where it is
        self._traffic = widgets.HTML(layout=widgets.Layout(margin="0 2px", min_height="54px"))
        self._fields: dict[str, Field] = {}
        wrapped = {"flex_flow": "row wrap", "align_content": "flex-start", "overflow": "visible", "min_width": "0"}
        self.widget = widgets.HBox(
            [self._group(group) for group in SHOWN if group not in RARER],
            layout=widgets.Layout(flex="1 1 260px", margin="0 0 0 10px", **wrapped),
        )
        self.rarer = widgets.HBox([self._group(group) for group in RARER], layout=widgets.Layout(**wrapped))

    def update(self, now: DashboardState) -> None:
        """Show this state."""
        options = now.options
        wanted = options.pending or options.in_force
        for name in self._fields:
            if name not in self._wrong or not self._wrong[name].value:
                self._show(name, getattr(wanted, name))
        self._lock(options.locked)
        self._tell_traffic(wanted, now.status.num_peers or 1 + now.local.count.there)

    @property
    def controls(self) -> Mapping[str, Any]:
        """The widget of each option."""
        return {name: one.widget for name, one in self._fields.items()}

    def is_written(self, name: str) -> bool:
        """Whether anything can be entered for an option, so that what is wrong is said at its field."""
        return name in self._wrong

    def mark_wrong(self, name: str, words: str) -> None:
        """Say at a field what is wrong with what was written into it; nothing when empty.

        :param name: of the option
        """
        if name in self._wrong:
            self._wrong[name].value = trouble(words)
            self._wrong[name].layout.display = "block" if words else "none"

    def close(self) -> None:
        """Take the switches away."""
        for control in self.controls.values():
            control.disabled = True
        parts, self.widget.children = self.widget.children, []
        for part in parts:
            close(part)

    def _group(self, group: str) -> Any:
        widgets = require_ipywidgets()
        rows = [widgets.HTML(heading(_HEADINGS[group]), layout=widgets.Layout(margin="0"))]
        if group == _SHARED:
            rows.append(self._locked)
        rows += [self._row(name) for name in SHOWN[group]]
        if group == "compression":
            rows.append(self._traffic)
        width = _WIDTHS.get(group, _WIDTH)
        return widgets.VBox(
            rows, layout=widgets.Layout(flex=f"1 1 {width}", min_width="0", margin="0 6px 0 0", overflow="visible")
        )

    def _row(self, name: str) -> Any:
        widgets = require_ipywidgets()
        one = self._fields[name] = field(name, self._shapes)
        self._shown[name] = one.widget.value
        one.widget.observe(self._on_change(name), names="value")
        if one.is_written:
            self._wrong[name] = widgets.HTML(layout=widgets.Layout(display="none", margin="0 2px"))
            return with_help(one.widget, about(name), self._wrong[name])
        return with_help(one.widget, about(name))

    def _tell_traffic(self, options: Options, peers: int) -> None:
        text = _expected(self._shapes, self._buffers, options, peers) if self._shapes else ""
        self._traffic.value = note(text) if text else ""

    def _lock(self, reason: str | None) -> None:
        words = "" if reason is None else f"Not to be changed here: {reason}."
        if self._locked.value != (shown := note(words) if words else ""):
            self._locked.value = shown
            self._locked.layout.display = "block" if words else "none"
        for name, control in self.controls.items():
            if FIELDS[name].swarm_wide:
                control.disabled = reason is not None

    def _show(self, name: str, value: Any) -> None:
        entry = self._fields[name].entry(value)
        if self._shown[name] != entry:
            # Noted first, so that the observer can tell this write from a person's.
            self._shown[name] = entry
            self._fields[name].show(entry)

    def _on_change(self, name: str) -> Callable[[Any], None]:
        def changed(change: Any) -> None:
            entry = change["new"]
            if entry != self._shown[name]:
                self._shown[name] = entry
                if entry != OWN_OBJECT:
                    self._change(name, self._fields[name].value(entry))

        return changed


def waiting(options: OptionsState, state: str = "training") -> str:
    """From when on the pending options count, in a sentence; empty if none are pending.

    :param state: of the run
    """
    pending, epoch = options.pending, options.pending_epoch
    names = () if pending is None else options.in_force.difference(pending)
    own = [FIELDS[name].label for name in names if not FIELDS[name].swarm_wide]
    shared = [FIELDS[name].label for name in names if FIELDS[name].swarm_wide]
    at_all = "At one of the next epochs, at all peers" if epoch is None else f"At epoch {epoch:,}, at all peers"
    soon = {"starting": "At the first batch", "stopping": "Once it has stopped"}.get(state, "At the next batch")
    parts = ((soon, own), (soon if state == "stopping" else at_all, shared))
    return " ".join(f"{when}: {', '.join(labels)}." for when, labels in parts if labels)


def _expected(shapes: Shapes, buffers: int, options: Options, peers: int) -> str:
    """What an epoch will send, in a sentence; empty where it cannot be told."""
    together = max(peers, 2)
    sent = epoch_bytes(shapes, options, together, buffers)
    period = "an epoch" if options.average_state_every == 1 else f"every {options.average_state_every} epochs"
    gradients = f"{words.size(sent.gradients)} of gradients" if sent.gradients else ""
    parameters = f"{words.size(sent.parameters)} of parameters {period}" if sent.parameters else ""
    if gradients and period != "an epoch":
        gradients += " an epoch"
    known = " and ".join(part for part in (gradients, parameters) if part)
    each = f"Each of {peers} peers" if peers > 1 else "With a second peer, each"
    return f"{each} sends about {known}, and receives as much." if known else ""


def together(before: Options, after: Options, asked: str) -> str:
    """What changed besides the option that was asked for, in a sentence; empty if nothing did."""
    other = {name: new for name, (_, new) in before.difference(after).items() if name != asked}
    parts = []
    for verb, on in (("Also switched on", True), ("Also switched off", False)):
        labels = [FIELDS[name].label for name, new in other.items() if bool(new) is on]
        if labels:
            parts.append(f"{verb}: {', '.join(labels)}.")
    return " ".join(parts)
