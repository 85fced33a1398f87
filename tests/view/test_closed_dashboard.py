"""What a closed dashboard leaves: real widgets, in the registry in which ipywidgets keeps them all."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ipywidgets
import pytest

from hivenb.errors import HivenbError
from hivenb.run.status import RunState
from hivenb.view import notebook_output
from hivenb.view.closed_dashboard import MAX_CLOSED
from hivenb.view.dashboard import MAX_LIVE, Dashboard

PNG = b"\x89PNG\r\n\x1a\n"


def registered() -> int:
    """How many widgets there are, as ipywidgets 8 or 7 knows."""
    newer = getattr(ipywidgets.widgets.widget, "_instances", None)
    return len(ipywidgets.Widget.widgets if newer is None else newer)


def everything_in(widget: Any) -> list[Any]:
    return [widget, *(one for child in getattr(widget, "children", ()) for one in everything_in(child))]


def is_gone(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("way", ["the dashboard", "the swarm"])
def test_closing_it_or_the_swarm_lets_go_of_the_run(scene: Any, way: str) -> None:
    run = type(scene)()  # the fixture's own would be kept by pytest
    run.history.record("loss", 1.0)
    dashboard = Dashboard(run)
    shown = dashboard.widget
    assert dashboard.run is run
    text = dashboard.text()
    (dashboard if way == "the dashboard" else run.swarm.observers).close()
    assert dashboard.run is run, "somebody keeps it"
    reference = weakref.ref(run)
    del run
    assert is_gone(reference), "nobody else does"
    assert dashboard.widget is shown, "the last picture stays"
    assert dashboard.text() == text
    assert repr(dashboard) == "Dashboard(run 'lightning_run')"
    with pytest.raises(HivenbError, match="is closed, and its run is gone"):
        _ = dashboard.run


def test_what_can_be_read_stays_and_what_can_be_pressed_goes(scene: Any) -> None:
    scene.history.record("loss", 1.0)
    scene.log_lines = ("the last line of the log",)
    dashboard = Dashboard(scene)
    before = everything_in(dashboard.widget)
    assert any(isinstance(one, ipywidgets.Button) for one in before)
    titles = [dashboard.widget.children[-1].get_title(index) for index in range(4)]
    dashboard.close()
    left = everything_in(dashboard.widget)
    (picture,) = [one for one in left if isinstance(one, ipywidgets.Image)]
    assert bytes(picture.value).startswith(PNG)
    words = "".join(one.value for one in left if isinstance(one, ipywidgets.HTML))
    assert "ready to start" in words
    assert "the last line of the log" in words
    assert "This dashboard is closed" in words
    assert "<details" not in words, "no question mark beside a field that is gone"
    assert all(isinstance(one, (ipywidgets.Box, ipywidgets.HTML, ipywidgets.Image)) for one in left)
    assert all(one.comm is not None for one in left), "they are in the page"
    assert all(one.comm is None for one in before if one not in left), "and the others are not"
    assert [dashboard.widget.children[-1].get_title(index) for index in range(4)] == titles


def test_fifty_of_them_cost_as_much_as_a_few(scene: Any) -> None:
    def cycle() -> None:
        made = Dashboard(scene)
        assert made.widget
        made.close()

    for _ in range(MAX_CLOSED):
        cycle()
    before = registered()
    for _ in range(50):
        cycle()
    assert registered() == before


def test_an_old_one_becomes_a_picture_where_it_was_displayed(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[tuple[bytes, bool]] = []

    def show_widget(widget: Any, text: str) -> Any:
        return lambda png, instead=False: pictures.append((png[: len(PNG)], instead))

    monkeypatch.setattr(notebook_output, "widgets_work", lambda: True)
    monkeypatch.setattr(notebook_output, "show_widget", show_widget)
    scene.set(state=RunState.TRAINING)  # so that nothing else is drawn
    monkeypatch.setattr("hivenb.view.dashboard.SavedPicture", Silent)
    old = Dashboard(scene)
    old._ipython_display_()
    widget = old.widget
    old.close()
    old._ipython_display_()
    for _ in range(MAX_CLOSED):
        assert pictures == []
        newer = Dashboard(scene)
        assert newer.widget
        newer.close()
    assert pictures == [(PNG, True)] * 2, "at both places"
    assert widget.comm is None
    assert old.widget is not widget, "as long as the run is there, it can be shown anew"
    old.close()


class Silent:
    """Draws nothing after cells."""

    def __init__(self, run: Any, show: Any) -> None:
        self.show = show

    def look(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_runs_that_have_ended_keep_the_newest_dashboards_only(scene: Any) -> None:
    runs = [type(scene)() for _ in range(MAX_LIVE + 2)]
    made = [Dashboard(run) for run in runs]
    at_work = [one for one in made if one.widget and one._view]
    assert at_work == made, "each may still be started"
    for run in runs:
        run.set(state=RunState.FINISHED)
    extra = Dashboard(scene)
    assert extra.widget
    assert [one._view is not None for one in made] == [False, False, True, True, True]
    for one in (*made, extra):
        one.close()
