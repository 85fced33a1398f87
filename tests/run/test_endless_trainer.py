from __future__ import annotations

from typing import Any

import lightning
import pytest
import tiny

from hivenb.run.endless_trainer import trainer_without_end


class Watched(lightning.Callback):
    def __init__(self, batches: int):
        self.batches, self.seen = batches, 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen += 1
        assert (trainer.max_steps, trainer.max_epochs) == (4, 2)
        trainer.should_stop = self.seen == self.batches


@pytest.mark.parametrize("batches", [21, 40])
def test_a_trainer_goes_on_after_its_end_until_it_is_told_to_stop(batches: int) -> None:
    watched = Watched(batches)
    trainer = trainer_without_end(max_steps=4, max_epochs=2, callbacks=[watched], **tiny.QUIET)
    trainer.fit(tiny.TinyModel(), tiny.loader(64, 8))
    assert watched.seen == batches


def test_it_goes_on_from_where_it_was_after_more_passes_than_it_was_to_make(tmp_path: Any) -> None:
    """Lightning refuses to with an error."""
    for batches in (40, 12):
        watched = Watched(batches)
        trainer = trainer_without_end(max_steps=4, max_epochs=2, callbacks=[watched], **tiny.QUIET)
        path = tmp_path / "last.ckpt"
        trainer.fit(tiny.TinyModel(), tiny.loader(64, 8), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
        assert watched.seen == batches
