"""The field of one option: a widget, what it shows for a value, and the value of what a person enters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivenb.compression import CODECS, missing_package
from hivenb.figures.predicted_traffic import encoded_size
from hivenb.options.checks import AGGREGATIONS, CODEC_FIELDS, FROZEN_PARAMETERS, MAY_BE_NONE
from hivenb.options.gradient_averager_choice import PowerSGD, power_sgd
from hivenb.options.options import FIELDS
from hivenb.options.outer_optimizer_choice import NESTEROV
from hivenb.view import words
from hivenb.view.display import require_ipywidgets
from hivenb.view.help import tooltip

#: Stands for a codec or an averager that was made in code.
OWN_OBJECT = "an object of your own"

#: What is sent in each epoch, whose codec is chosen.
SENT = ("grad_compression", "state_averaging_compression")

#: Ranks of PowerSGD to choose from.
_RANKS = (1, 4, 32)

#: What counts where a number is not given.
_INSTEAD = {"allreduce_timeout": "averaging_timeout", "next_chunk_timeout": "matchmaking_time"}

#: What hivenb counts in, so that a fraction of it means nothing.
_WHOLE = ("samples", "epochs", "pieces")

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
    if name in CODEC_FIELDS:
        return _codec(name, [math.prod(shape) for shape in shapes])
    if name == "grad_averager_factory":
        return _averager(name, shapes)
    if name == "outer_optimizer":
        return _outer_optimizer(name)
    if name == "robust_aggregation":
        return _rule(name, AGGREGATIONS)
    if name == "frozen_parameters":
        return _rule(name, FROZEN_PARAMETERS)
    info = FIELDS[name]
    return _number(name) if info.unit is not None or isinstance(info.default, float) else _switch(name)


def _rule(name: str, rules: Mapping[str, str]) -> Field:
    menu = _menu(name, [(label, rule) for rule, label in rules.items()])
    return Field(menu, str, lambda entry: entry)


def _switch(name: str) -> Field:
    widgets = require_ipywidgets()
    box = widgets.Checkbox(
        description=FIELDS[name].label,
        indent=False,
        layout=widgets.Layout(width="auto", margin="0 24px 0 2px"),
        **tooltip(about(name)),
    )
    return Field(box, bool, lambda entry: entry)


def _number(name: str) -> Field:
    widgets = require_ipywidgets()
    info = FIELDS[name]
    kind = int if info.unit in _WHOLE else float
    text = widgets.Text(
        description=info.label if info.unit is None or info.unit in info.label else f"{info.label}, {info.unit}",
        placeholder=f"as {FIELDS[_INSTEAD[name]].label}" if name in _INSTEAD else "",
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
        if entry == "" and name in MAY_BE_NONE:
            return None
        try:
            return kind(entry)
        except ValueError:
            return entry

    return Field(text, entry, value, is_written=True)


def _codec(name: str, sizes: Sequence[int]) -> Field:
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


def _outer_optimizer(name: str) -> Field:
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
        style={"description_width": "76px" if name in SENT else "120px"},
        layout=widgets.Layout(width="auto", margin="1px 24px 1px 2px"),
        **tooltip(about(name)),
    )


def _with_bytes(size: float | None, label: str) -> str:
    return f"{words.size(size)}: {label}" if size else label


def about(name: str) -> str:
    """What an option does, in a sentence or two, and how code calls it."""
    everywhere = " All peers of a run need the same, and change together." if FIELDS[name].swarm_wide else ""
    return f"{FIELDS[name].help}{everywhere} ({name})"
