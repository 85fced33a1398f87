"""The folder of a run: where its Trainer works, and where it keeps what another start needs to go on."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

import lightning


class RunFolder:
    """A folder that is there for as long as the run that owns it."""

    def __init__(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="hivenb-run-")
        self.path = Path(folder.name)
        #: what another start goes on from; ``None`` while there is nothing
        self.checkpoint: Path | None = None
        weakref.finalize(self, folder.cleanup)

    def keep_state(self, trainer: lightning.Trainer) -> None:
        """Write down all that another start needs to go on, if training has got as far as having any."""
        if trainer.global_step > 0:
            path = self.path / "resume.ckpt"
            trainer.save_checkpoint(path)
            self.checkpoint = path
