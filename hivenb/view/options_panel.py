"""The switches: what a person can change about collaborative training, in words, also while it trains.

Those that are rarely needed are a widget of their own, for another place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivenb.compression import CODECS, missing_package
from hivenb.figures.predicted_traffic import encoded_size, epoch_bytes
from hivenb.options.choices import NESTEROV, PowerSGD, power_sgd
from hivenb.options.kinds import Count, OneOf
from hivenb.options.options import FIELDS
from hivenb.view import formats
from hivenb.view.closed_dashboard import close
from hivenb.view.dashboard_state import DashboardState, OptionsState
from hivenb.view.help import tooltip, with_help
from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import heading, note, trouble

if TYPE_CHECKING:
    from hivenb.options.options import Options


# -- option fields ---------------------------------------------------------------------------------------------------
#
# The field of one option: a widget, what it shows for a value, and the value of what a person enters.


#: Stands for a codec or an averager that was made in code.
OWN_OBJECT = "an object of your own"

#: Ranks of PowerSGD to choose from.
_RANKS = (1, 4, 32)

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Field:
    """One option in the panel.

    :param widget: with the entry as its ``value``
    :param entry: what the widget should hold for a value of the option
    :param value: what an entry says; the check of the options says what is wrong with it
    :param is_written: whether anything can be entered, and not only what is offered
    """

    widget: Any
    entry: Callable[[Any], Any]
    value: Callable[[Any], Any]
    is_written: bool = False

    def show(self, entry: Any) -> None:
        """Put an entry into the widget; one that is not on its menu is put there, too."""
        if entry == OWN_OBJECT and entry not in (key for _, key in self.widget.options):
            # First, since a changed menu selects its first line, and that is not to look like a person's choice.
            self.widget.options = ((OWN_OBJECT, OWN_OBJECT), *self.widget.options)
        self.widget.value = entry


def field(name: str, shapes: Shapes = ()) -> Field:
    """Make the field of an option.

    :param name: of the option
    :param shapes: of the model's tensors, from which follows what each codec sends; none if unknown
    """
    return _MAKERS[FIELDS[name].kind.control](name, shapes)


def _switch(name: str, shapes: Shapes) -> Field:
    widgets = require_ipywidgets()
    box = widgets.Checkbox(
        description=FIELDS[name].label,
        indent=False,
        layout=widgets.Layout(width="auto", margin="0 24px 0 2px"),
        **tooltip(about(name)),
    )
    return Field(box, bool, lambda entry: entry)


def _number(name: str, shapes: Shapes) -> Field:
    widgets = require_ipywidgets()
    info = FIELDS[name]
    number = int if isinstance(info.kind, Count) else float
    text = widgets.Text(
        description=info.label if info.unit is None or info.unit in info.label else f"{info.label}, {info.unit}",
        placeholder=info.instead or "",
        continuous_update=False,
        style={"description_width": "initial"},
        layout=widgets.Layout(width="auto", margin="1px 24px 1px 2px"),
        **tooltip(about(name)),
    )

    text.add_class("hivenb-number")
    if text.placeholder:
        text.add_class("hivenb-wide")

    def entry(value: Any) -> str:
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    def value(entry: str) -> Any:
        if entry == "" and info.kind.takes_none:
            return None
        try:
            return number(entry)
        except ValueError:
            return entry

    return Field(text, entry, value, is_written=True)


def _choice(name: str, shapes: Shapes) -> Field:
    kind = FIELDS[name].kind
    choices = kind.choices if isinstance(kind, OneOf) else {}
    return Field(_menu(name, [(label, choice) for choice, label in choices.items()]), str, lambda entry: entry)


def _codec(name: str, shapes: Shapes) -> Field:
    sizes = [math.prod(shape) for shape in shapes]
    known = [info for info in CODECS.values() if missing_package(info.name) is None]
    menu = _menu(name, [(_with_bytes(encoded_size(sizes, info.name), info.label), info.name) for info in known])
    offered = {info.name for info in known}

    def entry(codec: Any) -> str:
        return codec if isinstance(codec, str) and codec in offered else OWN_OBJECT

    return Field(menu, entry, lambda entry: entry)


def _averager(name: str, shapes: Shapes) -> Field:
    offered = {f"power_sgd_{rank}": PowerSGD(rank) for rank in _RANKS}
    numbers = sum(math.prod(shape) for shape in shapes)

    def label(one: PowerSGD) -> str:
        title = f"PowerSGD, rank {one.averager_rank}"
        if not numbers:
            return title
        percent = 100 * sum(size for shape in shapes for size in one.sent_sizes(shape)) / numbers
        return f"{percent:.0f} %: {title}" if percent >= 9.95 else f"{percent:.1f} %: {title}"

    menu = _menu(name, [("all-reduce", "none"), *((label(one), key) for key, one in offered.items())])

    def entry(factory: Any) -> str:
        told = power_sgd(factory)
        return "none" if factory is None else next((key for key, one in offered.items() if one == told), OWN_OBJECT)

    return Field(menu, entry, lambda key: offered[key].factory() if key in offered else None)


def _outer_optimizer(name: str, shapes: Shapes) -> Field:
    menu = _menu(name, [("none", "none"), ("Nesterov's momentum, as DiLoCo", NESTEROV)])

    def entry(chosen: Any) -> str:
        return "none" if chosen is None else NESTEROV if chosen == NESTEROV else OWN_OBJECT

    return Field(menu, entry, lambda key: None if key == "none" else key)


def _menu(name: str, choices: Sequence[tuple[str, str]]) -> Any:
    widgets = require_ipywidgets()
    return widgets.Dropdown(
        description=FIELDS[name].label,
        options=choices,
        # those of codecs are short, and what they offer is long
        style={"description_width": "76px" if _is_in(_SENT, name) else "120px"},
        layout=widgets.Layout(width="auto", margin="1px 24px 1px 2px"),
        **tooltip(about(name)),
    )


#: What makes a field, by the control of its kind.
_MAKERS: Mapping[str, Callable[[str, Shapes], Field]] = {
    "switch": _switch,
    "number": _number,
    "menu": _choice,
    "codec": _codec,
    "averager": _averager,
    "outer optimizer": _outer_optimizer,
}


def _with_bytes(size: float | None, label: str) -> str:
    return f"{formats.size(size)}: {label}" if size else label


def about(name: str) -> str:
    """What an option does, in a sentence or two, and how code calls it."""
    everywhere = " All peers of a run need the same, and change together." if FIELDS[name].swarm_wide else ""
    return f"{FIELDS[name].help}{everywhere} ({name})"


# -- options panel ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Switches that stand together.

    :param heading: above them
    :param width: of each, at least
    :param is_rarer: whether they are needed now and then, and are in a tab of their own
    """

    heading: str
    width: str = "260px"
    is_rarer: bool = False


#: The groups of those on which all peers of a run have to agree, of the codecs of what each epoch sends, and of what
#: may cost something that nobody would expect.
_SHARED, _SENT, _NOTED = "all peers", "compression", "overlap"

#: The groups in their order; what is in each, the declarations of the options say.
GROUPS: Mapping[str, Group] = {
    _NOTED: Group("Overlap training and averaging", "250px"),
    "memory": Group("Memory", "220px"),
    _SENT: Group("Compression of what is sent"),
    _SHARED: Group("The same for all peers"),
    "rounds": Group("Rounds", "360px", is_rarer=True),
    "other": Group("Newcomers, goodbyes and speed", is_rarer=True),
    "peer": Group("This peer", "180px", is_rarer=True),
}


def shown() -> dict[str, tuple[str, ...]]:
    """What the panel offers, group by group, each in the order in which one thing builds on another."""
    places = sorted((info.place.at, name) for name, info in FIELDS.items() if info.place is not None)
    return {group: tuple(name for _, name in places if _is_in(group, name)) for group in GROUPS}


def _is_in(group: str, name: str) -> bool:
    place = FIELDS[name].place
    return place is not None and place.group == group


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
        self._notes = widgets.HTML(layout=widgets.Layout(display="none", margin="0 2px"))
        # three lines in any case, so that what is below stays where it is
        self._traffic = widgets.HTML(layout=widgets.Layout(margin="0 2px", min_height="54px"))
        self._fields: dict[str, Field] = {}
        wrapped = {"flex_flow": "row wrap", "align_content": "flex-start", "overflow": "visible", "min_width": "0"}
        self.widget = widgets.HBox(
            [self._group(group, names) for group, names in shown().items() if not GROUPS[group].is_rarer],
            layout=widgets.Layout(flex="1 1 260px", margin="0 0 0 10px", **wrapped),
        )
        self.rarer = widgets.HBox(
            [self._group(group, names) for group, names in shown().items() if GROUPS[group].is_rarer],
            layout=widgets.Layout(**wrapped),
        )

    def update(self, now: DashboardState) -> None:
        """Show this state."""
        options = now.options
        wanted = options.pending or options.in_force
        for name in self._fields:
            if name not in self._wrong or not self._wrong[name].value:
                self._show(name, getattr(wanted, name))
        self._lock(options.locked)
        self._tell_notes(wanted)
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

    def _group(self, group: str, names: Sequence[str]) -> Any:
        widgets = require_ipywidgets()
        rows = [widgets.HTML(heading(GROUPS[group].heading), layout=widgets.Layout(margin="0"))]
        if group == _SHARED:
            rows.append(self._locked)
        rows += [self._row(name) for name in names]
        if group == _SENT:
            rows.append(self._traffic)
        if group == _NOTED:
            rows.append(self._notes)
        return widgets.VBox(
            rows,
            layout=widgets.Layout(
                flex=f"1 1 {GROUPS[group].width}", min_width="0", margin="0 6px 0 0", overflow="visible"
            ),
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

    def _tell_notes(self, options: Options) -> None:
        shown = "".join(note(text) for text in options.notes)
        if self._notes.value != shown:
            self._notes.value = shown
            self._notes.layout.display = "block" if shown else "none"

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
    at_all = (
        "At one of the next swarm epochs, at all peers" if epoch is None else f"At swarm epoch {epoch:,}, at all peers"
    )
    soon = {"starting": "At the first batch", "stopping": "Once it has stopped"}.get(state, "At the next batch")
    parts = ((soon, own), (soon if state == "stopping" else at_all, shared))
    return " ".join(f"{when}: {', '.join(labels)}." for when, labels in parts if labels)


def _expected(shapes: Shapes, buffers: int, options: Options, peers: int) -> str:
    """What an epoch will send, in a sentence; empty where it cannot be told."""
    together = max(peers, 2)
    sent = epoch_bytes(shapes, options, together, buffers)
    period = (
        "a swarm epoch" if options.average_state_every == 1 else f"every {options.average_state_every} swarm epochs"
    )
    gradients = f"{formats.size(sent.gradients)} of gradients" if sent.gradients else ""
    parameters = f"{formats.size(sent.parameters)} of parameters {period}" if sent.parameters else ""
    if gradients and period != "a swarm epoch":
        gradients += " a swarm epoch"
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
