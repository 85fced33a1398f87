"""The picture: a real PNG, equal for equal data and different for different data, whatever the style."""

from __future__ import annotations

import io
import math
import sys
import threading

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from hivenb.history import Event, History
from hivenb.view.charts import ChartImage, draw
from hivenb.view.panels import merged, smoothed, with_gaps


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png))


def texts(history: History) -> list[str]:
    figure = Figure(figsize=(7.4, 5.0), dpi=100)
    FigureCanvasAgg(figure)
    draw(history.snapshot(), figure)
    return [text.get_text() for axes in figure.axes if axes.get_visible() for text in axes.texts]


def test_is_a_png_of_the_right_size(training: History) -> None:
    png = ChartImage(width=7.4, height=5.0, dpi=100).png(training.snapshot())
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert pixels(png).shape[:2] == (500, 740)


def test_equal_data_gives_equal_bytes_and_other_data_other_pixels(training: History) -> None:
    chart = ChartImage(dpi=60)
    first = chart.png(training.snapshot())
    empty = chart.png(History().snapshot())
    assert chart.png(training.snapshot()) == first, "nothing is left over from the picture in between"
    training.record("loss", 5.0, time=1031.0)
    later = chart.png(training.snapshot())
    assert not np.array_equal(pixels(first), pixels(later))
    assert not np.array_equal(pixels(first), pixels(empty))


def test_says_what_to_do_while_there_is_nothing_to_see() -> None:
    shown = texts(History())
    assert any("press Start" in text for text in shown)
    assert any("send them the invite" in text for text in shown)


def test_says_the_latest_numbers_and_marks_events(training: History) -> None:
    shown = texts(training)
    for text in ("Loss", "Validation accuracy", "Peers", "Samples/s", "3 peers now", "float16 gradients",
                 "peer joined", "started"):  # fmt: skip
        assert text in shown
    assert any(text.startswith("training 0.") for text in shown)
    assert any(text.endswith(" %") for text in shown)


def test_there_is_no_metric_panel_without_a_metric() -> None:
    history = History()
    history.record("loss", 1.0)
    history.record("group_size", 3.0)
    assert "Group size" not in texts(history)


def test_nothing_lies_outside_of_the_picture(training: History) -> None:
    for event in range(12):
        training.mark("option", f"a very long word for an option, number {event}", time=1000.0 + 2.7 * event)
    figure = Figure(figsize=(7.4, 5.0), dpi=100)
    canvas = FigureCanvasAgg(figure)
    draw(training.snapshot(), figure)
    canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        for box in boxes:
            assert box.x0 >= 0
            assert box.y0 >= 0
            assert box.x1 <= 740
            assert box.y1 <= 500
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[i + 1 :]), axes.texts[i].get_text()


@pytest.mark.parametrize(
    "values", [[math.nan], [1.0], [1.0, math.nan, math.inf], [0.0] * 50, [-3.0, -3.0], [1e30, 1e-30]]
)
def test_odd_values_are_drawn_all_the_same(values: list[float]) -> None:
    history = History()
    for name in ("loss", "val_loss", "val_acc", "peers", "samples_per_second"):
        for i, value in enumerate(values):
            history.record(name, value, time=float(i))
    assert ChartImage(dpi=50).png(history.snapshot()).startswith(b"\x89PNG")


def test_a_million_values_are_drawn_with_their_extremes() -> None:
    history = History(capacity=256)
    for i in range(20_000):
        history.record("loss", float(i % 7), time=i / 10)
    assert ChartImage(dpi=50).png(history.snapshot()).startswith(b"\x89PNG")


def test_text_from_elsewhere_is_not_read_as_mathematics() -> None:
    history = History()
    history.record("val_$\\frac$", 1.0)
    history.record("loss", 1.0)
    history.mark("option", "$\\broken{ $x_$")
    assert "$\\broken{ $x_$" in texts(history)
    assert ChartImage(dpi=50).png(history.snapshot()).startswith(b"\x89PNG")


def test_the_users_style_changes_nothing(training: History) -> None:
    plain = ChartImage(dpi=60).png(training.snapshot())
    wild = {"axes.grid": True, "text.color": "red", "font.family": "serif", "axes.facecolor": "black",
            "figure.facecolor": "black", "axes.prop_cycle": "cycler('color', ['red'])",
            "figure.constrained_layout.use": True, "axes.unicode_minus": False,
            "grid.color": "green"}  # fmt: skip
    with mpl.rc_context(wild):
        assert ChartImage(dpi=60).png(training.snapshot()) == plain


def test_draws_in_a_thread_without_pyplot(training: History) -> None:
    drawn: list[bytes] = []
    before = "matplotlib.pyplot" in sys.modules
    thread = threading.Thread(target=lambda: drawn.append(ChartImage(dpi=60).png(training.snapshot())))
    thread.start()
    thread.join(timeout=30)
    assert drawn
    assert ("matplotlib.pyplot" in sys.modules) is before


def test_smoothing_keeps_the_mean_and_ignores_gaps() -> None:
    values = np.full(200, 2.0)
    values[50] = np.nan
    assert np.allclose(smoothed(values), 2.0)
    short = np.arange(10.0)
    assert np.array_equal(smoothed(short), short)
    noisy = np.tile([0.0, 2.0], 100)
    assert np.ptp(smoothed(noisy)[20:-20]) < 0.5


def test_a_new_start_breaks_the_line() -> None:
    times = np.array([0.0, 1, 2, 60, 61])
    broken, values = with_gaps(times, np.arange(5), np.array([0.0, 58.0, 58.5, 70.0]))
    assert broken.tolist() == [0, 1, 2, 60, 60, 61]
    assert np.array_equal(values, [0, 1, 2, np.nan, 3, 4], equal_nan=True)


def test_marks_at_one_moment_share_their_words() -> None:
    events = [
        Event(1.0, "option", "a"),
        Event(1.1, "option", "b"),
        Event(1.2, "run", "resumed"),
        Event(9.0, "option", "c"),
    ]
    assert [event.text for event in merged(events, near=0.5)] == ["2 options changed", "resumed", "c"]
