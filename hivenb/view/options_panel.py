"""The switches: what a person can change about collaborative training, in words, also while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hivenb.compression import CODECS, missing_package
from hivenb.options import FIELDS
from hivenb.round_size import encoded_size, epoch_bytes
from hivenb.view import words
from hivenb.view.display import require_ipywidgets
from hivenb.view.facts import Facts
from hivenb.view.style import heading, note, trouble

if TYPE_CHECKING:
    from hivenb.options import Options

#: The group of those on which all peers of a run have to agree, and of those that are rarely needed.
_SHARED, _MORE = "all peers", "more"

#: What the panel offers, group by group, each in the order in which one thing builds on another.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "overlap": ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging"),
    "memory": ("offload_optimizer", "reuse_grad_buffers"),
    "compression": ("grad_compression", "state_averaging_compression", "load_state_compression"),
    _SHARED: ("target_batch_size", "average_state_every", "use_local_updates"),
    "rounds": ("matchmaking_time", "averaging_timeout"),
    _MORE: (
        "allreduce_timeout",
        "next_chunk_timeout",
        "load_state_timeout",
        "shutdown_timeout",
        "performance_ema_alpha",
        "client_mode",
        "auxiliary",
        "verbose",
    ),
}

#: Those that are written as a number.
NUMBERS = {
    name: int if name in ("target_batch_size", "average_state_every") else float
    for names in SHOWN.values()
    for name in names
    if FIELDS[name].unit is not None or name == "performance_ema_alpha"
}

_HEADINGS = {
    "overlap": "Overlap training and averaging",
    "memory": "Memory",
    "compression": "Compression of what is sent",
    _SHARED: "The same for all peers",
    "rounds": "Rounds",
    _MORE: "More: timeouts, its part in rounds",
}
_WIDTHS = {"overlap": "235px", "memory": "200px", "compression": "290px", _SHARED: "290px", "rounds": "290px"}
_CODEC_OBJECT = "an object of your own"

Change = Callable[[str, Any], None]


class OptionsPanel:
    """A switch or a choice for each option that it shows.

    :param change: called with an option's name and its new value when a person changes one; the front end's
        handlers call it, so it must return at once
    :param sizes: numbers in each tensor of the model, from which follows what each codec sends
    """

    def __init__(self, change: Change, sizes: Sequence[int] = ()) -> None:
        widgets = require_ipywidgets()
        self._change, self._sizes = change, tuple(sizes)
        self._shown: dict[str, Any] = {}
        self._wrong: dict[str, Any] = {}
        self._locked = widgets.HTML(layout=widgets.Layout(display="none", margin="0 2px"))
        self._traffic = widgets.HTML(layout=widgets.Layout(margin="0 2px"))
        self._remark = widgets.HTML(layout=widgets.Layout(flex="1 1 100%", margin="2px 0"))
        self.controls: dict[str, Any] = {}
        parts = [self._group(group) for group in SHOWN if group != _MORE]
        more = widgets.Accordion([self._group(_MORE)], layout=widgets.Layout(flex="1 1 100%", min_width="0"))
        more.set_title(0, _HEADINGS[_MORE])
        more.selected_index = None
        self.widget = widgets.HBox(
            [*parts, self._remark, more],
            layout=widgets.Layout(
                flex="1 1 260px",
                min_width="0",
                margin="4px 0 0 10px",
                flex_flow="row wrap",
                align_content="flex-start",
            ),
        )

    def update(self, facts: Facts, remark: str) -> None:
        """Show these facts.

        :param facts: of the run
        :param remark: what else to say about the switches, such as what was switched on together
        """
        wanted = facts.pending or facts.options
        for name, control in self.controls.items():
            if name not in self._wrong or not self._wrong[name].value:
                self._show(name, control, getattr(wanted, name))
        self._lock(facts.locked)
        self._tell_traffic(wanted, facts.status.num_peers)
        waiting = "" if facts.pending is None else _waiting(facts.options, facts.pending, facts.pending_epoch)
        text = " ".join(part for part in (waiting, remark) if part)
        self._remark.value = note(text) if text else ""

    def mark_wrong(self, name: str, words: str) -> None:
        """Say at a field what is wrong with what was written into it; nothing when empty.

        :param name: of the option
        """
        if name in self._wrong:
            self._wrong[name].value = trouble(words)
            self._wrong[name].layout.display = "block" if words else "none"

    def close(self) -> None:
        """Grey the switches out."""
        for control in self.controls.values():
            control.disabled = True

    def _group(self, group: str) -> Any:
        widgets = require_ipywidgets()
        rows = []
        if group != _MORE:  # whose heading is that of its fold
            rows.append(widgets.HTML(heading(_HEADINGS[group]), layout=widgets.Layout(margin="0")))
        if group == _SHARED:
            rows.append(self._locked)
        for name in SHOWN[group]:
            control = self.controls[name] = _control(name, self._sizes)
            self._shown[name] = control.value
            control.observe(self._on_change(name), names="value")
            rows.append(control)
            if name in NUMBERS:
                self._wrong[name] = widgets.HTML(layout=widgets.Layout(display="none", margin="0 2px"))
                rows.append(self._wrong[name])
        if group == "compression":
            rows.append(self._traffic)
        width = _WIDTHS.get(group, "auto")
        return widgets.VBox(rows, layout=widgets.Layout(flex=f"1 1 {width}", min_width="0"))

    def _tell_traffic(self, options: Options, peers: int) -> None:
        text = _expected(self._sizes, options, peers) if self._sizes else ""
        self._traffic.value = note(text) if text else ""

    def _lock(self, reason: str | None) -> None:
        words = "" if reason is None else f"Not to be changed here: {reason}."
        if self._locked.value != (shown := note(words) if words else ""):
            self._locked.value = shown
            self._locked.layout.display = "block" if words else "none"
        for name in SHOWN[_SHARED]:
            self.controls[name].disabled = reason is not None

    def _show(self, name: str, control: Any, value: Any) -> None:
        if name in SHOWN["compression"]:
            names = [known for _, known in control.options]
            value = value if value in names else _CODEC_OBJECT
            if value not in names:
                control.options = (*control.options, (_CODEC_OBJECT, _CODEC_OBJECT))
        elif name in NUMBERS:
            value = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        else:
            value = bool(value)
        if self._shown[name] != value:
            # Noted first, so that the observer can tell this write from a person's.
            self._shown[name] = value
            control.value = value

    def _on_change(self, name: str) -> Callable[[Any], None]:
        def changed(change: Any) -> None:
            if change["new"] != self._shown[name]:
                self._shown[name] = change["new"]
                if change["new"] != _CODEC_OBJECT:
                    self._change(name, _read(name, change["new"]))

        return changed


def _waiting(now: Options, then: Options, epoch: int | None) -> str:
    names = now.difference(then)
    own = [FIELDS[name].label for name in names if not FIELDS[name].swarm_wide]
    shared = [FIELDS[name].label for name in names if FIELDS[name].swarm_wide]
    at_all = "At one of the next epochs, at all peers" if epoch is None else f"At epoch {epoch:,}, at all peers"
    parts = (("At the next batch", own), (at_all, shared))
    return " ".join(f"{when}: {', '.join(labels)}." for when, labels in parts if labels)


def _expected(sizes: Sequence[int], options: Options, peers: int) -> str:
    """What an epoch will send, in a sentence; empty where it cannot be told."""
    together = max(peers, 2)
    sent = epoch_bytes(sizes, options, together)
    period = "an epoch" if options.average_state_every == 1 else f"every {options.average_state_every} epochs"
    gradients = f"{words.size(sent.gradients)} of gradients" if sent.gradients else ""
    parameters = f"{words.size(sent.parameters)} of parameters {period}" if sent.parameters else ""
    if gradients and period != "an epoch":
        gradients += " an epoch"
    known = " and ".join(part for part in (gradients, parameters) if part)
    return f"Each of {together} peers sends about {known}, and receives as much." if known else ""


def _read(name: str, value: Any) -> Any:
    """The value that was written, as a number where it is one; the check of the options says what is wrong with it."""
    if name not in NUMBERS:
        return value
    if value == "" and FIELDS[name].default is None:
        return None
    try:
        return NUMBERS[name](value)
    except ValueError:
        return value


def together(before: Options, after: Options, asked: str) -> str:
    """What changed besides the option that was asked for, in a sentence; empty if nothing did."""
    other = {name: new for name, (_, new) in before.difference(after).items() if name != asked}
    parts = []
    for verb, on in (("Also switched on", True), ("Also switched off", False)):
        labels = [FIELDS[name].label for name, new in other.items() if bool(new) is on]
        if labels:
            parts.append(f"{verb}: {', '.join(labels)}.")
    return " ".join(parts)


def _control(name: str, sizes: Sequence[int]) -> Any:
    if name in NUMBERS:
        return _number(name)
    return _choice(name, sizes) if FIELDS[name].group == "compression" else _switch(name)


def _number(name: str) -> Any:
    widgets = require_ipywidgets()
    label, unit = FIELDS[name].label, FIELDS[name].unit
    return widgets.Text(
        description=label if unit is None or unit in label else f"{label}, {unit}",
        placeholder="as set by others" if FIELDS[name].default is None else "",
        continuous_update=False,
        style={"description_width": "218px"},
        layout=widgets.Layout(width="auto", margin="1px 2px"),
        **_tooltip(widgets, name),
    )


def _switch(name: str) -> Any:
    widgets = require_ipywidgets()
    return widgets.Checkbox(
        description=FIELDS[name].label,
        indent=False,
        layout=widgets.Layout(width="auto", margin="0 2px"),
        **_tooltip(widgets, name),
    )


def _choice(name: str, sizes: Sequence[int]) -> Any:
    widgets = require_ipywidgets()
    codecs = [
        (f"{words.size(encoded_size(sizes, info.name))}: {info.label}" if sizes else info.label, info.name)
        for info in CODECS.values()
        if missing_package(info.name) is None
    ]
    return widgets.Dropdown(
        description=FIELDS[name].label,
        options=codecs,
        style={"description_width": "158px"},
        layout=widgets.Layout(width="auto", margin="1px 2px"),
        **_tooltip(widgets, name),
    )


def _tooltip(widgets: Any, name: str) -> dict[str, str]:
    everywhere = " All peers of a run need the same, and change together." if FIELDS[name].swarm_wide else ""
    text = f"{FIELDS[name].help}{everywhere} ({name})"
    # ipywidgets 7 knows the tooltip of a control as its description_tooltip.
    key = "tooltip" if hasattr(widgets.DOMWidget, "tooltip") else "description_tooltip"
    return {key: text}
