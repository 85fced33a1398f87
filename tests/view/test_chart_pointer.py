"""What a pointer over the charts is told, and what becomes of the choice by what it asks for."""

from __future__ import annotations

import html
import json
import math
from itertools import pairwise
from typing import Any

import pytest

from hivenb.history import History
from hivenb.view.chart_panel import ChartPanel, as_csv
from hivenb.view.charts.drawing import ChartImage
from hivenb.view.charts.panels import ChartChoice
from hivenb.view.charts.pointer import ChartPointer, changed, download, facts, script


def told(history: History, **look: Any) -> dict[str, Any]:
    """As the page reads it."""
    choice = ChartChoice(**look)
    picture = ChartImage(dpi=60).drawn(history.snapshot(), choice)[1]
    return json.loads(json.dumps(facts(picture, choice), allow_nan=False))


def panel(history: History, title: str, **look: Any) -> dict[str, Any]:
    return next(one for one in told(history, **look)["panels"] if one["title"] == title)


def lines(history: History, title: str, **look: Any) -> dict[str, Any]:
    return {line["word"]: line for line in panel(history, title, **look)["lines"]}


class TestFacts:
    def test_values_are_those_of_the_history(self, training: History) -> None:
        validation = lines(training, "Loss")["validation"]
        series = training.snapshot().series["val_loss"]
        assert validation["x"] == pytest.approx(series.times, abs=1e-3)
        assert validation["y"] == pytest.approx(series.values, rel=1e-4)
        own = lines(training, "Loss")["training"]
        assert len(own["x"]) == len(own["y"]) == len(own["trend"]) <= 240
        assert own["x"][-1] == pytest.approx(29.9), "the last one is there"

    def test_panels_lie_side_by_side_inside_of_the_picture(self, training: History) -> None:
        boxes = [one["box"] for one in told(training)["panels"]]
        assert len(boxes) == 7
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= 1
            assert 0 <= top < bottom <= 1
        assert boxes[0][2] < boxes[1][0]
        assert boxes[0][3] < boxes[2][1]

    def test_a_mark_has_its_whole_text_and_all_that_it_stands_for(self, training: History) -> None:
        long = "one word after the other " * 9
        training.mark("option", long, time=1015.1)
        events = [event for mark in panel(training, "Loss")["marks"] for event in mark["events"]]
        assert [(event["number"], event["text"]) for event in events] == [
            (1, "started"),
            (3, "float16 gradients"),
            (4, long),
        ]
        assert events[1]["at"] == pytest.approx(15.0)
        (several,) = [mark for mark in panel(training, "Loss")["marks"] if len(mark["events"]) > 1]
        assert [event["number"] for event in several["events"]] == [3, 4]

    def test_odd_values_become_nothing(self) -> None:
        history = History()
        for i, value in enumerate((1.0, math.nan, math.inf, 2.0)):
            history.record("loss", value, time=float(i))
        assert lines(history, "Loss")["training"]["y"] == [1.0, None, None, 2.0]
        assert told(History())["panels"][0]["lines"] == []

    def test_a_long_run_is_told_in_few_words(self, training: History) -> None:
        for i in range(20_000):
            training.record("loss", 1.0 + i % 7, epoch=30 + i // 100, time=1030.0 + i / 10)
        assert len(json.dumps(told(training))) < 40_000

    def test_in_words_it_says_the_latest_values(self, training: History) -> None:
        words = told(training)["alt"]
        assert "Loss: training 0." in words
        assert "Peers: 3 peers." in words
        assert "Memory: nothing yet." in words
        assert "from 10 s to 20 s" in told(training, window=(10.0, 20.0))["alt"]
        assert "training" not in told(training, hidden=frozenset({"Loss/training"}))["alt"]


class TestChoice:
    def test_a_window_cuts_all_charts_and_their_limits(self, training: History) -> None:
        whole, part = panel(training, "Loss"), panel(training, "Loss", window=(20.0, 29.0))
        assert part["across"] == [20.0, 29.0]
        assert part["whole"] == whole["across"]
        assert part["up"][1] < whole["up"][1] / 2, "the wild beginning is not seen"
        assert min(part["lines"][0]["x"]) == pytest.approx(19.9, abs=0.11), "one point more: the line goes to the edge"
        assert part["marks"] == []
        whole_trend = dict(zip(whole["lines"][0]["x"], whole["lines"][0]["trend"], strict=True))
        for x, trend in zip(part["lines"][0]["x"], part["lines"][0]["trend"], strict=True):
            assert trend == pytest.approx(whole_trend.get(x, trend)), "smoothed as before"

    @pytest.mark.parametrize("window", [(500.0, 600.0), (0.0, 2.0), (29.0, 31.0)])
    def test_any_window_can_be_drawn(self, training: History, window: tuple[float, float]) -> None:
        assert ChartImage(dpi=50).png(training.snapshot(), window=window).startswith(b"\x89PNG")

    def test_series_are_switched_off(self, training: History) -> None:
        off = frozenset({"Loss/training"})
        found = lines(training, "Loss", hidden=off)
        assert (found["training"]["hidden"], found["validation"]["hidden"]) == (True, False)
        assert found["training"]["legend"], "its name is still there to switch it on"
        png = ChartImage(dpi=60).png
        everything = frozenset({"Loss/training", "Loss/validation"})
        assert len({png(training.snapshot(), hidden=hidden) for hidden in (frozenset(), off, everything)}) == 3
        assert panel(training, "Loss", hidden=off)["up"] != panel(training, "Loss")["up"]

    def test_smoothing_is_chosen(self, training: History) -> None:
        trends = [lines(training, "Loss", smoothing=word)["training"]["trend"] for word in ("none", "some", "strong")]
        assert trends[0] is None
        some, strong = (sum(abs(b - a) for a, b in pairwise(t)) for t in trends[1:])
        assert strong < some
        png = ChartImage(dpi=60).png
        assert len({png(training.snapshot(), smoothing=word) for word in ("none", "some", "strong")}) == 3

    def test_messages_of_the_page_change_it(self, training: History) -> None:
        snapshot = training.snapshot()
        zoomed = changed(ChartChoice(), {"zoom": ["time", 5.0, 15.0]}, snapshot)
        assert zoomed.window == (5.0, 15.0)
        assert changed(zoomed, {"zoom": None}, snapshot) == ChartChoice()
        by_epochs = changed(ChartChoice(), {"zoom": ["epochs", 2.0, 5.0]}, snapshot)
        assert by_epochs.window == pytest.approx((6.0, 15.0), abs=0.2)
        narrow = changed(ChartChoice(), {"zoom": ["time", 10.0, 10.1]}, snapshot).window
        assert narrow == pytest.approx((9.05, 11.05))
        assert changed(ChartChoice(), {"width": 470}, snapshot).width == 470
        assert changed(ChartChoice(), {"width": 10**9}, snapshot).width == 900, "no page can ask for all of memory"
        assert changed(ChartChoice(), {"width": -5}, snapshot).width == 360
        off = changed(ChartChoice(), {"toggle": "Loss/training"}, snapshot)
        assert off.hidden == {"Loss/training"}
        assert changed(off, {"toggle": "Loss/training"}, snapshot) == ChartChoice()

    def test_it_is_saved_as_a_table(self, training: History) -> None:
        rows = as_csv(training.snapshot(), ChartChoice(window=(10.0, 12.0), hidden=frozenset({"Loss/validation"})))
        head, *points = rows.splitlines()
        assert head == "chart,series,seconds,value,low,high"
        assert len([row for row in as_csv(training.snapshot(), ChartChoice()).splitlines() if "validation" in row]) == 6
        hidden = as_csv(training.snapshot(), ChartChoice(hidden=frozenset({"Loss/validation"})))
        assert hidden == as_csv(training.snapshot(), ChartChoice()), "what is switched off is in it as well"
        assert "Peers,,10.000,3,3,3" in points
        assert len([row for row in points if row.startswith("Loss,training")]) in (20, 21)
        with_epochs = as_csv(training.snapshot(), ChartChoice(axis="epochs")).splitlines()
        assert with_epochs[0].endswith(",epochs")
        assert next(row for row in with_epochs if row.startswith("Loss,training,15.000")).endswith(",5")


class TestWidgets:
    def test_what_the_page_asks_for_is_drawn(self, training: History) -> None:
        asked: list[int] = []
        panel = ChartPanel(lambda: asked.append(1))
        panel.update(training.snapshot())
        before = panel.image.value
        gate = panel.pointer.widgets[-1]
        gate.value = json.dumps({"zoom": ["time", 5.0, 15.0], "number": "1"})
        assert panel.image.value is before, "not on the thread that brings the message"
        assert asked == [1]
        panel.refresh()
        assert panel.image.value != before
        assert panel.choice.window == (5.0, 15.0)
        gate.value = json.dumps({"zoom": None, "number": "2"})
        panel.refresh()
        assert panel.image.value == before

    def test_facts_come_with_each_picture_and_cannot_break_out(self, training: History) -> None:
        training.mark("option", "</div><script>alert(1)</script>", time=1020.0)
        panel = ChartPanel(lambda: None)
        panel.update(training.snapshot())
        value = panel.pointer.widgets[1].value
        assert "<script>" not in value
        found = json.loads(
            html.unescape(value.removeprefix('<div class="hivenb-under-pointer">').removesuffix("</div>"))
        )
        assert found["panels"][0]["marks"]
        panel.update(training.snapshot(), at_once=True)
        assert panel.pointer.widgets[1].value is value, "nothing is sent while nothing changes"
        panel.close()
        assert "&quot;closed&quot;:true" in panel.pointer.widgets[1].value

    def test_files_are_given_to_the_page_and_not_kept(self, training: History, monkeypatch) -> None:
        panel = ChartPanel(lambda: None)
        panel.update(training.snapshot())
        given = panel.widget.children[0].children[-1]
        assert given.value == ""
        panel.csv.click()
        panel.refresh()
        assert 'download="hivenb-charts.csv"' in given.value
        panel.png.click()
        panel.refresh()
        assert 'download="hivenb-charts.png"' in given.value
        monkeypatch.setattr(panel, "_kept_until", 0.0)
        panel.refresh()
        assert given.value == ""

    def test_only_widgets_that_every_front_end_has_are_used(self) -> None:
        pointer = ChartPointer(lambda: None)
        assert {widget._model_module for widget in pointer.widgets} == {"@jupyter-widgets/controls"}
        assert 'onerror="' in script()
        assert script().count('"') == 6, "nothing inside of an attribute ends it"
        assert 'href="data:text/csv;base64,YSxi"' in download("a.csv", "text/csv", b"a,b", 1)
        assert download("a.csv", "text/csv", b"", 1) != download("a.csv", "text/csv", b"", 2), "asked for once more"
