"""The picture: a real PNG, equal for equal data and different for different data, whatever the style."""

from __future__ import annotations

import io
import math
import sys
import threading
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from hivenb.history import History
from hivenb.view.charts.drawing import ChartImage, DrawingSurface, Word, draw, surface_for
from hivenb.view.charts.panels import AXES, ChartChoice, panels, smoothed, time_shares, to_axis, with_gaps
from hivenb.view.empty_states import Situation
from hivenb.view.theme import DARK, LIGHT


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png))


def words_of(history: History, now: Situation = Situation(), **how: Any) -> list[Word]:  # noqa: B008
    choice = ChartChoice(**how)
    surface = surface_for(choice.width, 96)  # a pixel of it for each of the page
    draw(history.snapshot(), surface, choice, now)
    return surface.words


def texts(history: History, now: Situation = Situation(), **how: Any) -> list[str]:  # noqa: B008
    return [word.text for word in words_of(history, now, **how)]


@pytest.fixture
def whole(training: History) -> History:
    """The same run with all that a peer records."""
    for second in range(30):
        now, epoch = 1000.0 + second, second // 3
        training.record("memory", 5e8 + 1e6 * second, epoch=epoch, time=now)
        training.record("gpu_memory", 2e9, epoch=epoch, time=now)
        training.record("bytes_sent", 1.2e6 * epoch, epoch=epoch, time=now)
        training.record("bytes_received", 0.9e6 * epoch, epoch=epoch, time=now)
    for epoch in range(1, 10):
        training.record("stalled_seconds", 0.6, epoch=epoch, time=1000.0 + 3 * epoch)
        training.record("waiting_seconds", 0.3 * (epoch > 8), epoch=epoch, time=1000.0 + 3 * epoch)
    return training


def test_is_a_png_of_the_right_size(training: History) -> None:
    png = ChartImage(dpi=96).png(training.snapshot(), width=650)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert pixels(png).shape[:2] == (472, 650)


@pytest.mark.parametrize("width", [360, 468, 560, 650, 900])
@pytest.mark.parametrize("dark", [False, True])
def test_text_is_as_large_as_that_of_the_page_however_wide_the_picture_is(
    whole: History, width: int, dark: bool
) -> None:
    surface = surface_for(width)
    draw(whole.snapshot(), surface, ChartChoice(width=width, dark=dark))
    scale = width / surface.width  # pixels of the page for each of the picture
    sizes = {word.style.size * surface.point * scale for word in surface.words}
    assert min(sizes) > 11.9, "the page's notes are of 12 pixels"
    assert max(sizes) < 13.1, "and the rest of it is of 13"


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
    shown = texts(History(), Situation("ready"))
    assert any("press Start" in text for text in shown)
    assert any("send others the invite" in text for text in shown)


def test_says_the_latest_numbers_and_marks_events(training: History) -> None:
    shown = texts(training)
    for text in ("Loss", "Validation accuracy", "Peers", "Samples/s", "3 peers", "float16 gradients",
                 "peer joined", "started"):  # fmt: skip
        assert text in shown
    assert any(text.startswith("training 0.") for text in shown)
    assert any(text.endswith(" %") for text in shown)


def test_there_is_no_metric_panel_without_a_metric() -> None:
    history = History()
    history.record("loss", 1.0)
    history.record("group_size", 3.0)
    assert "Group size" not in texts(history)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("width", [360, 470, 650])
def test_nothing_lies_outside_of_the_picture_or_on_something_else(
    whole: History, axis: str, log: bool, width: int
) -> None:
    for event in range(12):
        whole.mark("option", f"a very long word for an option, number {event}", time=1000.0 + 2.7 * event)
        whole.mark("peer", f"peer {event} joined", time=1000.0 + 2.5 * event)
    found, surface = words_of(whole, axis=axis, log=log, width=width), surface_for(width, 96)
    for word in found:
        assert word.box.left >= 0
        assert word.box.bottom >= 0
        assert word.box.right <= surface.width
        assert word.box.top <= surface.height
    for i, word in enumerate(found):
        for other in found[i + 1 :]:
            assert not word.box.overlaps(other.box), f"{word.text} and {other.text}"


def test_all_charts_say_their_latest_figures(whole: History) -> None:
    shown = texts(whole)
    for text in ("Time", "Bytes/epoch", "Memory", "out 1.2 MB", "in 900 kB", "GPU 2.0 GB", "host 529 MB"):
        assert text in shown
    assert any(text.endswith("10 %") for text in shown), "averaging, and waiting"
    assert not any("no epoch yet" in text for text in shown)


def test_traffic_that_cannot_be_measured_is_called_that(training: History) -> None:
    assert "traffic cannot be" in texts(training)
    assert "traffic cannot be" not in texts(History())


def test_loss_is_drawn_against_epochs_or_samples(whole: History) -> None:
    png = ChartImage(dpi=60).png
    pictures = {axis: png(whole.snapshot(), axis=axis) for axis in AXES}
    assert len(set(pictures.values())) == 3
    assert "epoch 0" in texts(whole, axis="epochs")
    assert "sample 0" in texts(whole, axis="samples")
    assert {panel.axis for panel in panels(whole.snapshot(), "epochs")[0]} == {"epochs"}
    assert {panel.axis for row in panels(whole.snapshot(), "epochs")[1:] for panel in row} == {"time"}


def test_epochs_go_on_evenly_between_their_changes() -> None:
    history = History()
    for second in range(40):
        history.record("loss", 1.0, epoch=5 + second // 10, samples=32 * second, time=float(second))
    to_epochs = to_axis(history.snapshot(), "epochs")
    assert to_epochs(np.array([0.0, 5, 10, 25, 30])).tolist() == [5, 5.5, 6, 7.5, 8]
    assert 8.8 < to_epochs(np.array([39.0]))[0] <= 8.95
    assert to_axis(history.snapshot(), "samples")(np.array([10.0, 20.5])).tolist() == [320, 656]
    assert to_axis(History().snapshot(), "epochs")(np.array([3.0])).tolist() == [0]


def test_a_logarithmic_scale_has_round_numbers_and_no_place_for_zero(whole: History) -> None:
    assert ChartImage(dpi=60).png(whole.snapshot(), log=True) != ChartImage(dpi=60).png(whole.snapshot())
    assert {"0.5", "1", "2"} <= set(texts(whole, log=True))
    whole.record("loss", 0.0, time=1031.0)
    whole.record("loss", -1.0, time=1032.0)
    assert ChartImage(dpi=50).png(whole.snapshot(), log=True).startswith(b"\x89PNG")


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_ink_can_be_read_on_its_paper(whole: History, dark: bool, theme: Any) -> None:
    picture = pixels(ChartImage(dpi=60).png(whole.snapshot(), dark=dark))
    assert np.allclose(picture[0, 0, :3], mpl.colors.to_rgb(theme.paper), atol=0.01)
    for word in words_of(whole, dark=dark):
        assert contrast(word.style.color, theme.paper) > 4.5, word.text
    assert contrast(theme.ink, theme.paper) > 12
    assert contrast(theme.faint_ink, theme.paper) > 4.5


def contrast(one: str, other: str) -> float:
    """As the web's guidelines define it."""

    def luminance(color: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mpl.colors.to_rgb(color)]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_shares_of_time_add_up_and_leave_out_what_was_between_two_starts() -> None:
    history = History()
    history.mark("run", "started", time=0.0)
    for end, stalled, waited in ((10.0, 1.0, 0.0), (20.0, 5.0, 4.0), (130.0, 2.0, 0.0), (140.0, 99.0, 0.0)):
        if end == 130.0:
            history.mark("run", "resumed", time=120.0)
        history.record("stalled_seconds", stalled, time=end)
        history.record("waiting_seconds", waited, time=end)
    found = time_shares(history.snapshot())
    assert found is not None
    assert found.starts.tolist() == [0, 10, 120, 130]
    assert found.computing == pytest.approx([0.9, 0.5, 0.8, 0])
    assert found.averaging == pytest.approx([0.1, 0.1, 0.2, 1])
    assert found.waiting == pytest.approx([0, 0.4, 0, 0])
    assert time_shares(History().snapshot()) is None


def test_shares_of_a_long_run_are_exact() -> None:
    history = History(capacity=64)
    for epoch in range(10_000):
        history.record("stalled_seconds", 0.5 if epoch % 2 else 0.1, epoch=epoch, time=float(epoch))
        history.record("waiting_seconds", 0.1, epoch=epoch, time=float(epoch))
    found = time_shares(history.snapshot())
    assert found is not None
    assert 30 <= len(found.ends) <= 120
    assert np.allclose(found.averaging[1:-1], 0.2, atol=0.01)
    assert np.allclose(found.waiting[1:-1], 0.1, atol=0.01)


@pytest.mark.parametrize(
    "values", [[math.nan], [1.0], [1.0, math.nan, math.inf], [0.0] * 50, [-3.0, -3.0], [1e30, 1e-30]]
)
def test_odd_values_are_drawn_all_the_same(values: list[float]) -> None:
    history = History()
    for name in (
        "loss",
        "val_loss",
        "val_acc",
        "peers",
        "samples_per_second",
        "bytes_sent",
        "stalled_seconds",
        "memory",
    ):
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


def test_what_goes_on_in_a_pause_has_no_gap_there() -> None:
    every_second, none_meanwhile = np.arange(60.0), np.append(np.arange(20.0), np.arange(40.0, 60.0))
    pause = np.array([19.5, 39.5])
    assert np.isfinite(with_gaps(every_second, every_second, pause)[1]).all()
    assert np.isnan(with_gaps(none_meanwhile, none_meanwhile, pause)[1]).sum() == 1


def test_a_new_start_breaks_the_line() -> None:
    times = np.array([0.0, 1, 2, 60, 61])
    broken, values = with_gaps(times, np.arange(5), np.array([0.0, 58.0, 58.5, 70.0]))
    assert broken.tolist() == [0, 1, 2, 60, 60, 61]
    assert np.array_equal(values, [0, 1, 2, np.nan, 3, 4], equal_nan=True)


class Drawn(DrawingSurface):
    """Keeps what is drawn: arrays of places, nan where they break."""

    def __init__(self) -> None:
        super().__init__(6.5, 4.92, 100)
        self.spans: list[tuple[np.ndarray, np.ndarray, Any]] = []

    def line(self, x: Any, y: Any, color: str, **how: Any) -> None:
        self.spans.append((np.asarray(x, float), np.asarray(y, float), how["within"]))
        super().line(x, y, color, **how)

    def area(self, x: Any, low: Any, high: Any, color: str, **how: Any) -> None:
        x, low, high = np.broadcast_arrays(x, low, high)
        self.spans.append((np.asarray(x, float), low + high, how["within"]))
        super().area(x, low, high, color, **how)

    def crossing(self, share: float) -> int:
        """How many lines and areas have something at such a place of their panel's width."""
        found = 0
        for x, y, within in self.spans:
            at, known = within.left + share * within.width, np.isfinite(y)
            found += bool(np.any(known[1:] & known[:-1] & (x[:-1] < at) & (at < x[1:])))
        return found


@pytest.fixture
def stopped_for_a_while() -> History:
    history = History()
    history.mark("run", "started", time=0.0)
    history.mark("run", "stopped", time=30.0)
    history.mark("run", "resumed", time=63.5)
    for second in (*range(30), *range(60, 100)):
        # who watches the swarm begins before the training does
        for name in ("loss", "peers", "samples_per_second", "memory"):
            history.record(name, 2.0, time=float(second))
        if second % 3 == 2 and second != 62:
            history.record("stalled_seconds", 0.5, time=float(second))
            history.record("waiting_seconds", 0.25, time=float(second))
    return history


def test_nothing_is_drawn_where_the_run_stood_still(stopped_for_a_while: History) -> None:
    surface = Drawn()
    draw(stopped_for_a_while.snapshot(), surface, ChartChoice())
    assert surface.crossing(0.45) == 0
    assert surface.crossing(0.2) == surface.crossing(0.8) >= 6


def test_peers_are_not_drawn_on_after_the_end_of_a_run(stopped_for_a_while: History) -> None:
    stopped_for_a_while.mark("option", "changed while it stood still", time=200.0)
    surface = Drawn()
    draw(stopped_for_a_while.snapshot(), surface, ChartChoice())
    assert surface.crossing(0.75) == 0


def test_neighbours_are_not_taken_together_over_a_stop() -> None:
    history = History(capacity=4096)
    for second in (*range(1000), *range(2000, 3000)):
        if second in (0, 2000):
            history.mark("run", "started", time=float(second))
        history.record("stalled_seconds", 0.5, time=float(second))
    found = time_shares(history.snapshot())
    assert found is not None
    assert len(found.ends) <= 122
    assert not np.any((found.starts < 1500) & (found.ends > 1500))


def test_the_time_legend_says_each_word_with_its_number(whole: History) -> None:
    whole.record("stalled_seconds", 2.0, time=1032.0)
    whole.record("waiting_seconds", 1.1, time=1032.0)
    shown = texts(whole)
    for word in ("computing ", "averaging ", "waiting "):
        assert any(text.startswith(word) and text.endswith(" %") for text in shown), word


def test_a_spike_stays_a_peak() -> None:
    values = np.zeros(400)
    values[200] = 1.0
    smooth = smoothed(values)
    assert smooth.argmax() == 200
    around = smooth[195:206]
    assert np.all(np.diff(around[:6]) > 0)
    assert np.all(np.diff(around[5:]) < 0)


def test_nothing_is_averaged_over_a_stop() -> None:
    values = np.repeat([2.0, 0.0], 100)
    assert np.array_equal(smoothed(values, [100]), values)
