"""Options side by side: figures from a history, and real trainings with a real peer."""

from __future__ import annotations

import io
import math
import pickle
import re
import signal
from contextlib import nullcontext
from threading import Lock, Thread, main_thread
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from tiny import PacedModel, TinyModel, loader, parameters

import hivenb
from hivenb.errors import OptionsError, TrainingError
from hivenb.history import History, Snapshot
from hivenb.options import Options
from hivenb.run import comparison
from hivenb.run.comparison import ComparedTraining, Comparison, Outcome, Unfinished, outcome_of, run_each
from hivenb.run.monitor import MemoryUse
from hivenb.run.training import TrainingRun
from hivenb.system.process_tree import descendants
from hivenb.view import comparison as comparison_picture
from hivenb.view.charts.panels import Panel, as_chosen
from hivenb.view.comparison import InTerminal, ShownComparison
from hivenb.view.terminal import Terminal

OPTIONS = Options(target_batch_size=256, matchmaking_time=2.0)


#: Elements of the tensor that a training with half precision holds on to: 200 MB.
BALLAST = 50_000_000


class HeavyModel(PacedModel):
    """Takes a lot of memory with one of the options; fails with another, as a model may that does not suit them."""

    def on_train_start(self) -> None:
        if self.trainer.strategy.options.grad_compression == "float16":
            self.ballast = torch.ones(BALLAST)
        if self.trainer.strategy.options.grad_compression == "uniform8bit":
            raise RuntimeError("does not suit me")


def told(stalls: list[float], bytes_per_epoch: int | None = 1000, validated: float | None = 0.25) -> Snapshot:
    """Epochs of two seconds each, of which training stood still for so long."""
    history = History()
    for epoch, stall in enumerate(stalls, start=1):
        now = 100.0 + 2.0 * epoch
        history.record("stalled_seconds", stall, epoch=epoch, time=now)
        history.record("group_size", 1 if epoch == 1 else 3, epoch=epoch, time=now)
        history.record("loss", 1.0 / epoch, epoch=epoch, time=now)
        if bytes_per_epoch is not None:
            history.record("bytes_sent", bytes_per_epoch * epoch, epoch=epoch, time=now)
    if validated is not None:
        history.record("val_loss", validated, time=100.0 + 2.0 * len(stalls))
    return history.snapshot()


def figures(snapshot: Snapshot, peers: int = 3, name: str = "some") -> Outcome:
    return outcome_of(name, OPTIONS, snapshot, peers, MemoryUse())


class TestFigures:
    @pytest.mark.parametrize(("peers", "share"), [(1, 3.5 / 8), (3, 1.5 / 6), (7, 3.5 / 8)])
    def test_they_begin_where_all_peers_have_met(self, peers: int, share: float) -> None:
        outcome = figures(told([9.0, 2.0, 0.5, 0.0, 1.0]), peers)
        assert outcome.seconds_per_epoch == pytest.approx(2.0)
        assert outcome.stalled_share == pytest.approx(share)
        assert outcome.bytes_per_epoch == pytest.approx(1000)
        assert outcome.training_loss == pytest.approx(0.2), "beside the other loss, not instead of it"
        assert outcome.validation_loss == 0.25

    def test_what_was_not_measured_is_said(self) -> None:
        outcome = figures(told([0.0] * 5, bytes_per_epoch=None, validated=None))
        assert outcome.bytes_per_epoch is None
        assert outcome.validation_loss is None
        assert "not measured" in str(ShownComparison((outcome,)))
        assert "validation" not in str(ShownComparison((outcome,)))


def lines_of(comparison: ShownComparison, name: str, axis: str = "time") -> list[Any]:
    """What is drawn of a series, with its line."""
    entries = [(i, entry) for i, entry in enumerate(comparison.entries) if entry.snapshot is not None]
    return list(comparison_picture._lines(entries, name, axis))


class TestFewerPeers:
    """Than were asked for: the figures would be of something else."""

    @pytest.mark.process
    @pytest.mark.parametrize("dies", [True, False])
    def test_they_are_refused(self, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
        dead = SimpleNamespace(state="failed", number=2, last_words="killed")
        monkeypatch.setattr(TrainingRun, "local_peers", (dead,) if dies else ())
        monkeypatch.setattr(hivenb.Swarm, "add_local_peers", lambda *_, **__: ())
        monkeypatch.setattr(comparison, "EPOCHS_TO_MEET", 2)
        words = "plain: local peer 2 has ended: killed" if dies else "plain: the 3 peers have not met within 2 epochs"
        with pytest.raises(TrainingError, match=words):
            hivenb.compare({"plain": OPTIONS}, TinyModel(), loader(64), epochs=2, local_peers=2, accelerator="cpu")


class TestView:
    def test_it_shows_itself_as_text_table_and_picture(self) -> None:
        outcomes = [figures(told([0.1] * 4), name=name) for name in ("sync", "<b>evil</b>")]
        comparison = ShownComparison(tuple(outcomes))
        assert comparison["sync"] is outcomes[0]
        assert re.split("  +", str(comparison).splitlines()[0]) == [
            "options", "time/epoch", "stalled", "bytes/epoch", "memory", "training loss", "validation loss",
        ]  # fmt: skip
        png = comparison.png()
        shown = comparison.as_html(png)
        assert "&lt;b&gt;evil" in shown
        assert "<b>evil" not in shown
        assert png is not None
        assert png.startswith(b"\x89PNG")
        assert 'alt="Curves of the loss' in shown
        assert "Comparison(sync" in repr(comparison)

    def test_what_is_not_finished_is_shown_with_how_it_stands(self) -> None:
        waits, works = Unfinished("later", OPTIONS), Unfinished("now", OPTIONS, "epoch 3 of 20", told([0.1] * 4))
        comparison = ShownComparison((figures(told([0.1] * 4), name="sync"), works, waits))
        first, second, third = str(comparison).splitlines()[1:]
        assert re.match(r"sync +finished +2\.00 s", first)
        assert re.match(r"now +epoch 3 of 20 +.* 0\.250 +0\.250$", second)
        assert re.match(r"later +waits for its turn ", third)
        assert [outcome.name for outcome in comparison.outcomes] == ["sync"]
        assert list(comparison.to_dataframe().index) == ["sync"]
        assert ShownComparison((figures(told([0.1] * 4), name="32"),))[32].name == "32"
        with pytest.raises(KeyError, match=r"'now': epoch 3 of 20; finished: 'sync'"):
            comparison["now"]
        assert comparison.png() != ShownComparison(comparison.entries[:1]).png(), "a curve while it works"
        assert ShownComparison((waits,)).png() is None

    def test_there_is_a_table_before_anything_was_validated(self) -> None:
        (line,) = str(ShownComparison((Unfinished("a", OPTIONS, "opens a swarm"),))).splitlines()[1:]
        assert re.match(r"a +opens a swarm ", line)
        assert "opens a swarm" in ShownComparison((Unfinished("a", OPTIONS, "opens a swarm"),)).as_html(None)

    def test_a_training_keeps_its_colour_from_the_first_look_to_the_end(self) -> None:
        a, b, c = (figures(told([0.1] * 4), name=name) for name in "abc")
        working = ShownComparison((Unfinished("a", OPTIONS), b, Unfinished("c", OPTIONS)))
        (now,), then = lines_of(working, "loss"), lines_of(ShownComparison((a, b, c)), "loss")
        assert now.color == then[1].color
        assert len({(line.color, line.dashed) for line in then}) == 3
        assert f'stroke="{now.color}"' in working.as_html(None)

    def test_curves_are_smoothed_and_losses_of_two_kinds_are_not_mixed(self) -> None:
        history = History()
        for i in range(200):
            history.record("loss", 1.0 + i % 2, epoch=i // 20, time=100.0 + i)
        history.record("val_loss", 7.0, epoch=9, time=300.0)
        comparison = ShownComparison((Unfinished("a", OPTIONS, "works", history.snapshot()),))
        (loss,) = lines_of(comparison, "loss")
        assert loss.smooth
        seen = as_chosen(Panel("Loss", (loss,)), comparison_picture._CHOICE, np.array([])).lines[0]
        assert seen.trend is not None
        assert np.ptp(seen.trend[20:-20]) < 0.2, "not the zigzag"
        assert loss.points.values.max() == 2.0
        (validated,) = lines_of(comparison, "val_loss", "epochs")
        assert validated.points.values.tolist() == [7.0]
        with_validation = comparison.png()
        assert with_validation is not None
        size = Image.open(io.BytesIO(with_validation)).size
        one_row = Image.open(io.BytesIO(ShownComparison((figures(told([0.1], validated=None)),)).png() or b"")).size
        assert size[1] > 1.8 * one_row[1], "each kind in a row of its own"

    def test_a_terminal_says_how_it_goes_and_what_came_out(self) -> None:
        written = io.StringIO()
        live = InTerminal(Terminal(written, interval=0.0))
        live.show(
            ShownComparison((Unfinished("a", OPTIONS, "epoch 1 of 4", told([0.1] * 4)), Unfinished("b", OPTIONS)))
        )
        done = figures(told([0.1] * 4), name="a")
        live.show(ShownComparison((done, Unfinished("b", OPTIONS, "opens a swarm"))))
        live.finish(ShownComparison((done, Unfinished("b", OPTIONS, "interrupted (opens a swarm)"))))
        first, outcome, second, last = written.getvalue().splitlines()
        assert first == "a: epoch 1 of 4, training loss 0.250"
        assert outcome.startswith("a: time/epoch 2.00 s, stalled 5 %")
        assert second == "b: opens a swarm"
        assert last == "b: interrupted (opens a swarm)"


@pytest.mark.parametrize(
    ("options", "epochs"),
    [({}, 4), ({"sync": "float16"}, 4), ([OPTIONS, OPTIONS], 4), ({"sync": OPTIONS}, 1)],
    ids=["none", "no options", "no names", "1"],
)
def test_what_cannot_be_compared_is_refused(options: Any, epochs: int) -> None:
    with pytest.raises(OptionsError):
        hivenb.compare(options, TinyModel(), loader(), epochs=epochs)


class Counts(lightning.Callback):
    """Counts what it sees, as EarlyStopping does, in a model that it holds."""

    def __init__(self, model: Any) -> None:
        self.seen, self.model = 0, model


@pytest.fixture
def begins_with(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, list[float]]]:
    """What each training begins with, of which only is left what a comparison makes of it: what its callback has seen,
    whether that holds the model that is trained, and its first batches."""
    found = list[tuple[int, bool, list[float]]]()

    def run(model: Any, data: Any, *, callbacks: Any, **_: Any) -> Any:
        (train, validation), (callback,) = data, callbacks
        batches = [float(next(iter(loader))[0].sum()) for loader in (train, *validation)]
        found.append((callback.seen, callback.model is model, batches))
        callback.seen += 1
        return SimpleNamespace(history=History(), start=int, stop=int, status=SimpleNamespace(epoch=0))

    monkeypatch.setattr(comparison, "Swarm", lambda *_, **__: nullcontext())
    monkeypatch.setattr(comparison, "TrainingRun", run)
    for name in ("_meet", "_follow", "_require_all"):
        monkeypatch.setattr(comparison, name, lambda *_: True)
    monkeypatch.setattr(comparison, "outcome_of", lambda name, *_: figures(told([0.1] * 4), name=name))
    return found


def own_random(seed: int) -> Any:
    """A loader with random numbers of its own."""
    dataset = loader(64).dataset
    return torch.utils.data.DataLoader(dataset, 8, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_no_training_begins_with_what_another_one_has_left(begins_with: Any) -> None:
    model, data = TinyModel(), (own_random(1), [own_random(2)])
    callback = Counts(model)
    training = ComparedTraining(model, data, 2, 0, 0, {"callbacks": [callback]})
    compared = run_each(training, {1: OPTIONS, 32: OPTIONS}, lambda now: None)
    assert [(seen, holds_it) for seen, holds_it, _ in begins_with] == [(0, True)] * 2
    assert begins_with[0] == begins_with[1], "the same batches"
    assert (callback.seen, callback.model) == (0, model)
    assert compared["32"].name == "32"
    assert str(ShownComparison(compared.entries)).splitlines()[1].startswith("1   "), "a number is a name"
    with pytest.raises(OptionsError, match="names that read the same: 1, 1"):
        run_each(training, {1: OPTIONS, "1": OPTIONS}, lambda now: None)


def test_a_callback_that_cannot_be_copied_is_named(begins_with: Any) -> None:
    callback = Counts(Lock())
    training = ComparedTraining(TinyModel(), loader(), 2, 0, 0, {"callbacks": callback})
    with pytest.raises(TrainingError, match=r"callbacks=<.*Counts .* cannot be copied .*\(TypeError: .*lock"):
        run_each(training, {"one": OPTIONS}, lambda now: None)
    assert begins_with == []


@pytest.mark.process
@pytest.mark.long
def test_real_trainings_from_the_same_start() -> None:
    model = HeavyModel(optimizer=torch.optim.Adam, lr=0.05)
    before = parameters(model)
    half = OPTIONS.replace(grad_compression="float16")
    options = {
        "plain": OPTIONS,
        "half precision": half,
        "fails": OPTIONS.replace(grad_compression="uniform8bit"),
        "again": OPTIONS,
    }
    data = (loader(256, 8, shuffle=True), loader(64, 8, seed=1))
    comparison = hivenb.compare(options, model, data, epochs=4, local_peers=1, accelerator="cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True)), "it stays as it is"
    assert [outcome.name for outcome in comparison.outcomes] == ["plain", "half precision", "again"]
    for outcome in comparison.outcomes:
        assert outcome.seconds_per_epoch > 0
        assert 0 <= outcome.stalled_share <= 1
        assert math.isfinite(outcome.training_loss)
        assert outcome.validation_loss is not None
        assert 2 in outcome.snapshot.series["group_size"].values, "the other peer was there"
    frame = comparison.to_dataframe()
    assert list(frame.index) == ["plain", "half precision", "again"]
    plain, heavy, again = (outcome.peak_memory for outcome in comparison.outcomes)
    assert heavy > max(plain, again) + 3 * BALLAST, "what one has taken is not counted with the next"
    (failed,) = comparison.unfinished
    assert failed.words.startswith("failed: ")
    assert failed.words.endswith("does not suit me")
    assert isinstance(failed.error, RuntimeError)
    pickled = pickle.loads(pickle.dumps(Comparison(comparison.outcomes)))
    assert pickled["plain"].snapshot.last("loss") == comparison["plain"].snapshot.last("loss")
    assert pickled["half precision"].options == half


@pytest.mark.process
@pytest.mark.slow
def test_what_is_finished_survives_an_interrupt() -> None:
    interrupter = Thread(target=signal.pthread_kill, args=(main_thread().ident, signal.SIGINT))
    seen: list[Comparison] = []

    def watch(now: Comparison) -> None:
        seen.append(now)
        at_work = now.unfinished[0]
        if at_work.name == "second" and at_work.words.startswith("epoch 1") and interrupter.ident is None:
            interrupter.start()

    training = ComparedTraining(PacedModel(), loader(256, 8), 20, 0, 0, {"accelerator": "cpu"})
    comparison = run_each(training, {"first": OPTIONS, "second": OPTIONS, "third": OPTIONS}, watch)
    assert [outcome.name for outcome in comparison.outcomes] == ["first"]
    assert comparison["first"].seconds_per_epoch > 0
    second, third = comparison.unfinished
    assert re.match(r"interrupted \(epoch \d+ of ", second.words)
    assert second.snapshot is not None
    assert second.snapshot.last("loss") is not None
    assert third.words == "not begun: interrupted before"
    works = [entry.words for now in seen for entry in now.entries if isinstance(entry, Unfinished)]
    assert "opens a swarm" in works
    assert len(seen) > 6, "it was told again and again"
    assert not descendants(), "the training at work was stopped"


@pytest.mark.process
def test_the_swarms_have_the_settings_that_were_given() -> None:
    names = []

    class Asking(TinyModel):
        def on_train_start(self) -> None:
            names.append(hivenb.Swarm.get("comparison: one").public_name)

    settings = {"public_name": "Ann"}
    comparison = hivenb.compare(
        {"one": OPTIONS}, Asking(), loader(), epochs=2, local_peers=0, swarm_settings=settings, accelerator="cpu"
    )
    assert [outcome.name for outcome in comparison.outcomes] == ["one"]
    assert names == ["Ann"]


def test_a_setting_that_no_swarm_has_is_refused() -> None:
    with pytest.raises(TypeError, match="no setting line_rate"):
        hivenb.compare({"one": OPTIONS}, TinyModel(), loader(), epochs=2, swarm_settings={"line_rate": 1e6})


@pytest.mark.process
def test_if_all_fail_the_first_error_is_raised() -> None:
    class Wrong(TinyModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("there is nothing to learn")

    training = ComparedTraining(Wrong(), loader(), 2, 0, 0, {"accelerator": "cpu"})
    with pytest.raises(RuntimeError, match="nothing to learn"):
        run_each(training, {"one": OPTIONS, "other": OPTIONS}, lambda now: None)
