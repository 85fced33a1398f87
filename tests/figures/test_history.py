"""The history: exact while small, bounded when large, safe between threads, unchanging for its readers."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest

from hivenb.errors import HivenbError, MissingDependencyError
from hivenb.history import MAX_EVENTS, MAX_SERIES, History


def test_keeps_every_value_while_there_is_room() -> None:
    history = History(capacity=8)
    for i in range(8):
        history.record("loss", i / 2, epoch=i, samples=32 * i, time=100.0 + i)
    series = history.snapshot().series["loss"]
    assert series.values.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert series.times.tolist() == list(range(8))
    assert series.epochs.tolist() == list(range(8))
    assert series.samples.tolist() == [32 * i for i in range(8)]
    assert np.array_equal(series.lows, series.values)
    assert np.array_equal(series.highs, series.values)


def test_merges_neighbours_and_keeps_mean_and_extremes() -> None:
    history = History(capacity=4)
    for i in range(8):
        history.record("loss", float(i), epoch=i, time=float(i))
    series = history.snapshot().series["loss"]
    assert series.values.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert series.lows.tolist() == [0, 2, 4, 6]
    assert series.highs.tolist() == [1, 3, 5, 7]
    assert series.times.tolist() == [1, 3, 5, 7], "a bucket has the time of its last value"
    assert series.epochs.tolist() == [1, 3, 5, 7]
    assert series.counts.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 1000, 12345])
@pytest.mark.parametrize("capacity", [2, 7, 64])
def test_always_spans_the_whole_run(count: int, capacity: int) -> None:
    values = np.sin(np.arange(count)) * np.arange(count)
    history = History(capacity=capacity)
    for i, value in enumerate(values):
        history.record("x", value, time=float(i))
    series = history.snapshot().series["x"]
    assert len(series) <= capacity + 2
    assert series.times[-1] == count - 1
    assert series.lows.min() == values.min()
    assert series.highs.max() == values.max()
    assert np.all(np.diff(series.times) > 0)
    assert np.all(series.lows <= series.values + 1e-9)
    assert np.all(series.values <= series.highs + 1e-9)


def test_the_last_value_is_exact_however_long_the_series() -> None:
    history = History(capacity=4)
    assert history.snapshot().last("loss") is None
    for i in range(1001):
        history.record("loss", float(i))
    assert history.snapshot().last("loss") == 1000.0


def test_a_value_that_is_not_a_number_shows_and_spoils_nothing() -> None:
    history = History(capacity=2)
    for value in (1.0, math.nan, 3.0, math.inf, 5.0):
        history.record("loss", value)
    series = history.snapshot().series["loss"]
    assert np.all(np.isfinite(series.values))
    assert series.lows.min() == 1.0
    assert series.highs.max() == 5.0
    history.record("loss", math.nan)
    assert math.isnan(history.snapshot().last("loss") or 0.0)


def test_memory_is_bounded_whatever_is_recorded() -> None:
    tracemalloc.start()
    try:
        history = History()
        for name in range(MAX_SERIES + 10):
            for i in range(100):
                history.record(f"metric {name}", i)
        for i in range(2000):
            history.mark("peer", f"peer {i} joined")
        begun, _ = tracemalloc.get_traced_memory()
        for _ in range(20_000):
            history.record("metric 0", 1.0)
        now, _ = tracemalloc.get_traced_memory()
        assert now - begun < 20_000, "its memory was taken at once"
        history.snapshot()
        rows = 2048 * 7 * 8
        _, peak = tracemalloc.get_traced_memory()
        assert peak < MAX_SERIES * rows + 3e6
        assert MAX_SERIES * rows * 2 < 20e6, "all series full, and a snapshot of them"
    finally:
        tracemalloc.stop()
    snapshot = history.snapshot()
    assert len(snapshot.events) == MAX_EVENTS
    assert snapshot.events[-1].text == "peer 1999 joined"
    assert len(snapshot.series) == MAX_SERIES


def test_a_series_too_many_is_said_once() -> None:
    history = History()
    for name in range(MAX_SERIES + 3):
        history.record(f"metric {name}", 1.0)
    texts = [event.text for event in history.snapshot().events]
    assert texts == [f"more than {MAX_SERIES} series: metric {MAX_SERIES} and others left out"]


def test_a_snapshot_is_cached_until_something_changes_and_never_changes_itself() -> None:
    history = History()
    history.record("loss", 1.0)
    first = history.snapshot()
    assert history.snapshot() is first
    version = history.version
    history.record("loss", 2.0)
    assert history.version > version
    assert first.series["loss"].values.tolist() == [1.0]
    assert history.snapshot().series["loss"].values.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        first.series["loss"].values[0] = 7
    with pytest.raises(TypeError):
        first.series["loss"] = first.series["loss"]  # type: ignore[index]


def test_a_series_that_did_not_change_is_not_copied_again() -> None:
    history = History()
    history.record("peers", 3)
    before = history.snapshot().series["peers"]
    history.record("loss", 1.0)
    assert history.snapshot().series["peers"] is before


def test_looking_at_a_growing_series_takes_no_memory() -> None:
    history = History(capacity=8)
    for value in range(4):
        history.record("loss", value)
    early = history.snapshot().series["loss"]
    history.record("loss", 4.0)
    later = history.snapshot().series["loss"]
    assert np.shares_memory(early.values, later.values)
    for value in range(5, 9):  # the ninth merges neighbours
        history.record("loss", value)
    assert early.values.tolist() == [0, 1, 2, 3]
    assert later.values.tolist() == [0, 1, 2, 3, 4]


def test_times_count_from_the_first_record() -> None:
    history = History()
    history.mark("run", "started", time=1000.0)
    history.record("loss", 1.0, time=1002.5)
    history.mark("option", "float16 gradients", time=1003.0)
    snapshot = history.snapshot()
    assert snapshot.started_at == 1000.0
    assert [event.time for event in snapshot.events] == [0.0, 3.0]
    assert snapshot.series["loss"].times.tolist() == [2.5]


def test_wrong_arguments_say_what_to_do() -> None:
    with pytest.raises(HivenbError, match=r"capacity=1.*use 2 or more"):
        History(capacity=1)
    with pytest.raises(HivenbError, match=r"'party'.*run, option, peer, round"):
        History().mark("party", "at eight")


def test_threads_lose_nothing() -> None:
    history = History(capacity=64)
    start = threading.Barrier(5)

    def write(name: str) -> None:
        start.wait(timeout=10)
        for i in range(2000):
            history.record(name, float(i))
            if i % 100 == 0:
                history.mark("round", f"{name} {i}")

    def read() -> None:
        start.wait(timeout=10)
        while any(thread.is_alive() for thread in writers):
            for series in history.snapshot().series.values():
                assert len(series.times) == len(series.values) == len(series.highs)

    failures: list[BaseException] = []
    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "a", "b")]
    for thread in writers:
        thread.start()
    try:
        read()
    except AssertionError as error:
        failures.append(error)
    for thread in writers:
        thread.join(timeout=30)
    assert not failures
    assert history.version == 4 * (2000 + 20)
    assert set(history.snapshot().series) == {"a", "b"}


def test_dataframe_is_long() -> None:
    pytest.importorskip("pandas")
    history = History()
    assert list(history.to_dataframe().columns) == ["time", "name", "value", "epoch", "samples", "earlier"]
    history.record("loss", 2.0, epoch=1, samples=64, time=10.0)
    history.record("val_loss", 3.0, epoch=1, samples=64, time=12.0)
    frame = history.to_dataframe()
    assert frame.to_dict("records") == [
        {"time": 0.0, "name": "loss", "value": 2.0, "epoch": 1, "samples": 64, "earlier": False},
        {"time": 2.0, "name": "val_loss", "value": 3.0, "epoch": 1, "samples": 64, "earlier": False},
    ]


def test_dataframe_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        History().to_dataframe()


@pytest.mark.process
def test_needs_only_numpy() -> None:
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'matplotlib', 'pandas', 'torch', 'lightning', 'hivemind'):\n"
        "    sys.modules[name] = None\n"
        "from hivenb.history import History\n"
        "h = History(); h.record('loss', 1.0); print(h.snapshot().last('loss'), h)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1.0 History(loss)\n", done.stderr
