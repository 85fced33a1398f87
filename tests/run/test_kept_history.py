"""The history that a run keeps in a file, and what another run of its name makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import hivenb
from hivenb.errors import TrainingError
from hivenb.figures.earlier_history import whole as whole_of
from hivenb.figures.history import History
from hivenb.run import kept_history
from hivenb.run.kept_history import KeptHistory, folder_of

START = 1_800_000_000.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_history, "WRITE_EVERY", 0.02)


def filled(history: History | None = None, values: int = 50, start: float = START) -> History:
    history = History() if history is None else history
    history.mark("run", "started", time=start)
    for number in range(values):
        history.record("loss", 1 / (number + 1), epoch=number // 5, samples=8 * number, time=start + number)
        history.record("bytes_sent", 1000.0 * number, epoch=number // 5, samples=8 * number, time=start + number)
    history.mark("option", "float16 gradients", time=start + values)
    return history


def keep(folder: Path | None, history: History | None = None, model: str = "Model") -> KeptHistory:
    kept = KeptHistory(filled() if history is None else history, folder, "digits", model)
    kept.begin()
    kept.end()
    return kept


def another(folder: Path, model: str = "Model") -> KeptHistory:
    return KeptHistory(History(), folder, "digits", model)


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_a_run_has_left_is_what_the_next_one_shows_as_earlier(tmp_path: Path) -> None:
    keep(tmp_path / "runs")
    earlier = another(tmp_path / "runs").earlier()
    assert earlier is not None
    loss = earlier.series["loss"]
    assert (loss.epochs[-1], loss.samples[-1], loss.values[-1]) == (9, 392, pytest.approx(0.02, abs=0.01))
    assert loss.values.max() > 10 * loss.values.min()
    assert len(loss) > 10
    assert [event.text for event in earlier.events][1:] == ["earlier: float16 gradients"]
    assert earlier.events[0].text.startswith("earlier run, ")
    assert (earlier.started_at, earlier.events[0].time) == (START, 0.0)
    assert loss.times[0] >= 0
    assert another(tmp_path / "runs", "Other").earlier() is None


def test_a_history_that_follows_another_goes_on_where_that_ended(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    keep(tmp_path)
    keep(tmp_path, filled(start=START + 9000))
    history = History()
    history.begin_after(another(tmp_path).earlier())
    alone = whole_of(history.snapshot())
    assert alone.series["loss"].epochs[-1] == 0
    assert alone.last("loss") is not None
    filled(history, values=20, start=START + 90_000)
    present, whole = history.snapshot(), whole_of(history.snapshot())
    assert whole_of(history.snapshot()) is whole
    assert present.series["loss"].epochs[0] == 0
    loss = whole.series["loss"]
    assert (np.diff(loss.times) > 0).all()
    assert loss.times[-1] < 200
    assert (np.diff(loss.epochs) >= 0).all()
    assert loss.epochs[0] < 0
    assert loss.epochs[-1] == 3
    assert np.isnan(loss.values).sum() == 2
    assert (np.diff(whole.series["bytes_sent"].values[~np.isnan(whole.series["bytes_sent"].values)]) >= 0).all()
    assert whole.started_at + loss.times[-1] == pytest.approx(START + 90_019)
    assert [event.text for event in whole.events[-2:]] == ["started", "float16 gradients"]
    table = history.to_dataframe()
    assert table["earlier"].sum() == len(table) - 40
    assert (table[table["earlier"]]["time"] < 0).all()
    assert (table[~table["earlier"]]["time"] >= 0).all()


def test_a_file_grows_with_what_is_new_alone_and_ends_as_it_was_after_another_start(tmp_path: Path) -> None:
    history = filled()
    kept = keep(tmp_path, history)
    before = only(tmp_path).read_bytes()
    kept.begin()
    kept.end()
    assert only(tmp_path).read_bytes() == before
    history.record("loss", 5.0, epoch=11, samples=999, time=START + 60)
    kept.begin()
    kept.end()
    after = only(tmp_path).read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") + 1
    assert kept.earlier() is None  # its own is no earlier one


def test_a_long_run_has_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_history, "_BYTES_AT_ONE_PACE", 20_000)
    kept, history = KeptHistory(History(), tmp_path, "digits", "Model"), None
    history = kept._history
    for number in range(200):
        for part in range(100):
            history.record("loss", 1.0, epoch=number, samples=number, time=START + number + part / 100)
        kept._write()
    kept.end()
    os.close(kept._file or 0) if kept._file else None
    assert only(tmp_path).stat().st_size < 100_000


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path)
    path = only(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])  # as a kernel leaves it that is killed while it writes
    earlier = another(tmp_path).earlier()
    assert earlier is not None
    assert len(earlier.events) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "no JSON\n" + text,
        lambda text: text.replace("hivenb-history-1", "hivenb-history-99"),
        lambda text: text + '["point", "loss", "soon", 1.0, 1, 1]\n',
        lambda text: text + '["point", "loss", 1.0, 1.0, true, 1]\n',
        lambda text: text + '["point", "loss", 1e999, 1.0, 1, 1]\n',
        lambda text: text + '["event", "nonsense", 1.0, "text"]\n',
        lambda text: text + '{"point": 1}\n',
        lambda text: text + "[" * 100_000 + "\n",
        lambda text: "",
        lambda text: text + "\0\udcff\n",
    ],
)
def test_a_file_that_is_none_of_ours_is_left_out_with_a_line(
    spoil: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hivenb")
    keep(tmp_path)
    path = only(tmp_path)
    path.write_text(spoil(path.read_text()), errors="surrogateescape")
    assert another(tmp_path).earlier() is None
    assert [record.levelname for record in caplog.records if path.name in record.getMessage()] == ["INFO"]
    path.unlink()
    os.mkfifo(path)  # which a reader would wait at
    assert another(tmp_path).earlier() is None


def test_what_another_kernel_is_writing_is_left_to_it(tmp_path: Path, eventually: Callable[..., None]) -> None:
    one, other = KeptHistory(filled(), tmp_path, "digits", "Model"), KeptHistory(filled(), tmp_path, "digits", "Model")
    one.begin()
    other.begin()
    eventually(lambda: sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) == 2)
    assert another(tmp_path).earlier() is None
    one.end()
    other.end()
    assert all(json.loads(path.read_text().splitlines()[0])["run"] == "digits" for path in tmp_path.iterdir())
    assert another(tmp_path).earlier() is not None


def test_old_files_are_dropped_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_history, "KEPT", 3)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(6):
        keep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "notes.txt").is_file()


def test_a_folder_that_cannot_be_written_to_breaks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hivenb")
    (tmp_path / "file").write_text("in the way")
    kept = keep(tmp_path / "file" / "runs")
    kept.begin()
    kept.end()
    assert kept.earlier() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_where_histories_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_of("digits", False) is None
    assert folder_of("digits", True) is None
    assert folder_of("digits", tmp_path) != folder_of("others", tmp_path)
    assert folder_of("../../etc", tmp_path).parent == tmp_path  # type: ignore[union-attr]
    monkeypatch.setenv("HIVENB_HISTORY", str(tmp_path / "elsewhere"))
    assert folder_of("digits", True).parent == tmp_path / "elsewhere"  # type: ignore[union-attr]
    monkeypatch.delenv("HIVENB_HISTORY")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    places = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        places.append(folder_of("digits", True))
    assert places[0] != places[1]
    assert all((tmp_path / "state") in place.parents for place in places if place)
    with pytest.raises(TrainingError, match="keep_history=3"):
        folder_of("digits", 3)  # type: ignore[arg-type]


@pytest.mark.process
def test_a_run_shows_what_the_one_before_it_has_left(tmp_path: Path, swarm: hivenb.Swarm) -> None:
    def make(**kwargs: Any) -> hivenb.TrainingRun:
        options = hivenb.Options(target_batch_size=16)
        return hivenb.TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, options=options, **kwargs)

    first = make(keep_history=tmp_path)
    assert first.history.earlier is None
    assert list(tmp_path.iterdir()) == []
    first.start()
    first.wait(epochs=2)
    first.stop()
    second = make(keep_history=tmp_path)
    assert second.status.loss is None
    assert second.history.snapshot().series == {}
    assert second.history.earlier is not None
    assert len(second.history.earlier.series["loss"]) > 1
    assert [event.text for event in second.history.earlier.events][-1] == "earlier: stopped"
    assert make(keep_history=False).history.earlier is None


@pytest.mark.process
def test_a_run_shows_the_one_whose_place_it_takes(tmp_path: Path, swarm: hivenb.Swarm) -> None:
    """As when the cells are run again while a run trains."""

    def make() -> hivenb.TrainingRun:
        options = hivenb.Options(target_batch_size=16, run_id="again")
        model, data = tiny.PacedModel(), tiny.loader()
        return hivenb.TrainingRun(model, data, swarm=swarm, options=options, keep_history=tmp_path)

    first = make()
    first.start()
    first.wait(epochs=2)
    second = make()
    assert second.history.earlier is None, "it is being written"
    second.start()
    second.wait(epochs=1)
    assert second.history.earlier is not None
    assert "earlier: replaced by a newer one" in [event.text for event in second.history.earlier.events]
    assert len(second.history.earlier.series["loss"]) > 1
    seen = second.history.earlier
    second.stop()
    second.start()
    second.wait(epochs=1)
    assert second.history.earlier is seen
    epochs = second.history.snapshot().series["bytes_sent"].epochs.tolist()
    assert epochs == sorted(epochs), "where it goes on, from the first look after the start"
    assert epochs[-1] > 0
    second.stop()
