"""Options side by side: figures from a history, and real trainings with a real peer."""

from __future__ import annotations

import math
import pickle
import time
from typing import Any

import pytest
import torch
from tiny import TinyModel, loader, parameters

import hivenb
from hivenb.errors import OptionsError
from hivenb.history import History, Snapshot
from hivenb.options import Options
from hivenb.run.comparison import outcome_of
from hivenb.view.comparison import ShownComparison

OPTIONS = Options(target_batch_size=256, matchmaking_time=2.0)


class SlowModel(TinyModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def told(stalls: list[float], bytes_per_epoch: int | None = 1000, validated: float | None = 0.25) -> Snapshot:
    """Epochs of two seconds each, of which training stood still for so long."""
    history = History()
    for epoch, stall in enumerate(stalls, start=1):
        now = 100.0 + 2.0 * epoch
        history.record("stalled_seconds", stall, epoch=epoch, time=now)
        history.record("group_size", 1 if epoch == 1 else 3, epoch=epoch, time=now)
        history.record("loss", 1.0 / epoch, epoch=epoch, time=now)
        history.record("memory", 1e6 * (5 - abs(epoch - 3)), epoch=epoch, time=now)
        if bytes_per_epoch is not None:
            history.record("bytes_sent", bytes_per_epoch * epoch, epoch=epoch, time=now)
    if validated is not None:
        history.record("val_loss", validated, time=100.0 + 2.0 * len(stalls))
    return history.snapshot()


class TestFigures:
    @pytest.mark.parametrize(("peers", "share"), [(1, 3.5 / 8), (3, 1.5 / 6), (7, 3.5 / 8)])
    def test_they_begin_where_all_peers_have_met(self, peers: int, share: float) -> None:
        outcome = outcome_of("some", OPTIONS, told([9.0, 2.0, 0.5, 0.0, 1.0]), peers)
        assert outcome.seconds_per_epoch == pytest.approx(2.0)
        assert outcome.stalled_share == pytest.approx(share)
        assert outcome.bytes_per_epoch == pytest.approx(1000)
        assert outcome.peak_memory == 5e6
        assert outcome.final_loss == 0.25

    def test_what_was_not_measured_is_said(self) -> None:
        outcome = outcome_of("some", OPTIONS, told([0.0] * 5, bytes_per_epoch=None, validated=None), 3)
        assert outcome.bytes_per_epoch is None
        assert outcome.final_loss == pytest.approx(0.2)
        assert "not measured" in str(ShownComparison((outcome,)))


def test_it_shows_itself_as_text_table_and_picture() -> None:
    outcomes = [outcome_of(name, OPTIONS, told([0.1] * 4), 3) for name in ("sync", "<b>evil</b>")]
    comparison = ShownComparison(tuple(outcomes))
    assert comparison["sync"] is outcomes[0]
    assert str(comparison).splitlines()[0].split() == [
        "options",
        "time/epoch",
        "stalled",
        "bytes/epoch",
        "memory",
        "final",
        "loss",
    ]
    bundle = comparison._repr_mimebundle_()
    assert "&lt;b&gt;evil" in bundle["text/html"]
    assert "<b>evil" not in bundle["text/html"]
    assert comparison.png().startswith(b"\x89PNG")
    assert "Comparison(sync" in repr(comparison)


@pytest.mark.parametrize(
    ("options", "epochs"), [({}, 4), ({"sync": "float16"}, 4), ({"sync": OPTIONS}, 1)], ids=["none", "no options", "1"]
)
def test_what_cannot_be_compared_is_refused(options: Any, epochs: int) -> None:
    with pytest.raises(OptionsError):
        hivenb.compare(options, TinyModel(), loader(), epochs=epochs)


@pytest.mark.process
@pytest.mark.slow
def test_two_real_trainings_from_the_same_start() -> None:
    model = SlowModel(optimizer=torch.optim.Adam, lr=0.05)
    before = parameters(model)
    options = {"plain": OPTIONS, "half precision": OPTIONS.replace(grad_compression="float16")}
    data = (loader(256, 8, shuffle=True), loader(64, 8, seed=1))
    comparison = hivenb.compare(options, model, data, epochs=4, local_peers=1, accelerator="cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True)), "it stays as it is"
    assert [outcome.name for outcome in comparison.outcomes] == ["plain", "half precision"]
    for outcome in comparison.outcomes:
        assert outcome.seconds_per_epoch > 0
        assert 0 <= outcome.stalled_share <= 1
        assert math.isfinite(outcome.final_loss)
        assert 2 in outcome.snapshot.series["group_size"].values, "the other peer was there"
    frame = comparison.to_dataframe()
    assert list(frame.index) == ["plain", "half precision"]
    again = pickle.loads(pickle.dumps(comparison))
    assert again["plain"].snapshot.last("loss") == comparison["plain"].snapshot.last("loss")
    assert again["half precision"].options == options["half precision"]
