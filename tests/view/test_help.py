"""Help beside each field: there in the page's own elements, whatever the version of ipywidgets does with tooltips."""

from __future__ import annotations

from typing import Any

import ipywidgets

from hivenb.options import FIELDS
from hivenb.view.chart_panel import ChartPanel
from hivenb.view.help import help_html
from hivenb.view.options_panel import OptionsPanel, shown
from hivenb.view.peers_panel import PeersPanel


def helped(widget: Any) -> dict[str, str]:
    """The page's help for each field in a widget, by the field's label."""
    found = {}
    children = getattr(widget, "children", ())
    if "hivenb-helped" in getattr(widget, "_dom_classes", ()):
        field, mark, *_ = children
        assert isinstance(mark, ipywidgets.HTML)
        found[field.description] = mark.value
    for child in children:
        found |= helped(child)
    return found


def test_each_option_says_what_it_does_in_elements_of_the_page() -> None:
    panel = OptionsPanel(lambda name, value: None)
    marks = helped(panel.widget) | helped(panel.rarer)
    assert len(marks) == len(panel.controls) == sum(map(len, shown().values()))
    for name, control in panel.controls.items():
        html = marks[control.description]
        assert html.count(f"({name})") == 2, "as a title for a pointer, and as text for a finger and a keyboard"
        assert 'data-lm-suppress-shortcuts="true"' in html
    assert FIELDS["auxiliary"].help[:20] in marks[FIELDS["auxiliary"].label]


def test_what_all_peers_share_is_said_to_be_so() -> None:
    assert "All peers of a run need the same" in helped(OptionsPanel(lambda *_: None).widget)["local updates"]


def test_the_slider_for_peers_has_help() -> None:
    assert "share its cores" in helped(PeersPanel(lambda count: None).widget)["peers on this machine"]


def test_what_can_be_chosen_about_the_charts_has_help() -> None:
    assert set(helped(ChartPanel(lambda: None).widget)) == {"smoothing", "log scale", "dark"}


def test_help_is_text_and_nothing_else() -> None:
    html = help_html("<script>alert('x')</script>\" <b>")
    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("<details") == 1
