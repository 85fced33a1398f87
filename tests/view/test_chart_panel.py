"""The picture in the dashboard: at a pace that leaves the core to the training, and at once when somebody asks."""

from __future__ import annotations

from collections.abc import Callable

from hivenb.history import History
from hivenb.view import chart_panel
from hivenb.view.chart_panel import ChartPanel


def test_pictures_keep_a_pace_that_what_they_cost_decides(
    training: History, monkeypatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(chart_panel, "_DRAWING_SHARE", 0.02)
    panel = ChartPanel(lambda: None)
    panel.update(training.snapshot())
    first = panel.image.value
    training.record("loss", 9.0, time=1031.0)
    panel.update(training.snapshot())
    assert panel.image.value is first, "too early"

    def follows() -> bool:
        panel.update(training.snapshot())
        return panel.image.value is not first

    eventually(follows)
    assert panel.drawn_version == training.version


def test_what_a_person_chooses_and_the_end_of_a_run_are_shown_at_once(training: History) -> None:
    chosen: list[int] = []
    panel = ChartPanel(lambda: chosen.append(1))
    panel.update(training.snapshot())
    for choose in (
        lambda: setattr(panel.axis, "value", "epochs"),
        lambda: setattr(panel.log, "value", True),
        lambda: setattr(panel.dark, "value", True),
    ):
        before = panel.image.value
        choose()
        panel.update(training.snapshot())
        assert panel.image.value is not before
    assert len(chosen) == 3
    before = panel.image.value
    training.record("loss", 9.0, time=1031.0)
    panel.update(training.snapshot(), at_once=True)
    assert panel.image.value is not before
    before = panel.image.value
    panel.update(training.snapshot(), at_once=True)
    assert panel.image.value is before, "nothing has changed"
