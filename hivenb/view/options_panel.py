"""The switches: what a person can change about collaborative training, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hivenb.compression import CODECS, missing_package
from hivenb.options import FIELDS
from hivenb.view.display import require_ipywidgets
from hivenb.view.facts import Facts
from hivenb.view.style import heading, note

if TYPE_CHECKING:
    from hivenb.options import Options

#: What the panel offers, group by group, each in the order in which one thing builds on another.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "overlap": ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging"),
    "memory": ("offload_optimizer", "reuse_grad_buffers"),
    "compression": ("grad_compression", "state_averaging_compression", "load_state_compression"),
}

_HEADINGS = {
    "overlap": "Overlap training and averaging",
    "memory": "Memory",
    "compression": "Compression of what is sent",
}
_WIDTHS = {"overlap": "235px", "memory": "200px", "compression": "290px"}
_CODEC_OBJECT = "an object of your own"

Change = Callable[[str, Any], None]


class OptionsPanel:
    """A switch or a choice for each option that it shows.

    :param change: called with an option's name and its new value when a person changes one; the front end's
        handlers call it, so it must return at once
    """

    def __init__(self, change: Change) -> None:
        widgets = require_ipywidgets()
        self._change = change
        self._shown: dict[str, Any] = {}
        self._remark = widgets.HTML(layout=widgets.Layout(flex="1 1 100%", margin="2px 0"))
        self.controls: dict[str, Any] = {}
        parts = []
        for group, names in SHOWN.items():
            rows = [widgets.HTML(heading(_HEADINGS[group]), layout=widgets.Layout(margin="0"))]
            for name in names:
                control = self.controls[name] = _choice(name) if group == "compression" else _switch(name)
                self._shown[name] = control.value
                control.observe(self._on_change(name), names="value")
                rows.append(control)
            parts.append(widgets.VBox(rows, layout=widgets.Layout(flex=f"1 1 {_WIDTHS[group]}", min_width="0")))
        self.widget = widgets.HBox(
            [*parts, self._remark],
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
        fixed = facts.status.state.is_active
        for name, control in self.controls.items():
            self._show(name, control, getattr(facts.options, name))
            control.disabled = fixed
        text = "While a run is active its options are fixed: stop it to change them." if fixed else remark
        self._remark.value = note(text) if text else ""

    def close(self) -> None:
        """Grey the switches out."""
        for control in self.controls.values():
            control.disabled = True

    def _show(self, name: str, control: Any, value: Any) -> None:
        if name in SHOWN["compression"]:
            names = [known for _, known in control.options]
            value = value if value in names else _CODEC_OBJECT
            if value not in names:
                control.options = (*control.options, (_CODEC_OBJECT, _CODEC_OBJECT))
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
                    self._change(name, change["new"])

        return changed


def together(before: Options, after: Options, asked: str) -> str:
    """What changed besides the option that was asked for, in a sentence; empty if nothing did."""
    other = {name: new for name, (_, new) in before.difference(after).items() if name != asked}
    parts = []
    for verb, on in (("Also switched on", True), ("Also switched off", False)):
        labels = [FIELDS[name].label for name, new in other.items() if bool(new) is on]
        if labels:
            parts.append(f"{verb}: {', '.join(labels)}.")
    return " ".join(parts)


def _switch(name: str) -> Any:
    widgets = require_ipywidgets()
    return widgets.Checkbox(
        description=FIELDS[name].label,
        indent=False,
        layout=widgets.Layout(width="auto", margin="0 2px"),
        **_tooltip(widgets, name),
    )


def _choice(name: str) -> Any:
    widgets = require_ipywidgets()
    codecs = [(info.label, info.name) for info in CODECS.values() if missing_package(info.name) is None]
    return widgets.Dropdown(
        description=FIELDS[name].label,
        options=codecs,
        style={"description_width": "158px"},
        layout=widgets.Layout(width="auto", margin="1px 2px"),
        **_tooltip(widgets, name),
    )


def _tooltip(widgets: Any, name: str) -> dict[str, str]:
    text = f"{FIELDS[name].help} ({name})"
    # ipywidgets 7 knows the tooltip of a control as its description_tooltip.
    key = "tooltip" if hasattr(widgets.DOMWidget, "tooltip") else "description_tooltip"
    return {key: text}
