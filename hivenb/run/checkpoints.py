"""The folder of a run: where its Trainer works, and where it keeps what another start needs to go on."""

from __future__ import annotations

import errno
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch

from hivenb.engine.optimizer.checkpoint import epoch_to_go_on_at
from hivenb.errors import TrainingError
from hivenb.strategy.reused_model import LeftModel, Prints, edited_since, prints_of

#: Bytes: a disk that has fewer left when something could not be written is full.
_LEFT_ON_A_FULL_DISK = 1 << 20


class RunFolder:
    """A folder that is there for as long as the run that owns it."""

    def __init__(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="hivenb-run-")
        self.path = Path(folder.name)
        #: what another start goes on from; ``None`` while there is nothing
        self.checkpoint: Path | None = None
        self._left: Prints | None = None
        self._former: tuple[Path | None, int, Prints | None] = (None, 0, None)
        self._parameters: Mapping[str, weakref.ref[torch.nn.Parameter]] = {}
        weakref.finalize(self, folder.cleanup)

    def begin_at(self, checkpoint: str | Path | None, epoch: int, is_active: bool) -> int:
        """Let the next start go on from a file that a Trainer has written, be it of another session.

        :param checkpoint: the file; without one, the next start goes on from where the last one ended
        :param epoch: of the swarm, at which that was
        :param is_active: whether the run trains, so that it comes too late
        :returns: the swarm epoch from which the next start goes on
        :raises TrainingError: if it does, there is no such file, or it is something else
        """
        if not is_active:
            self._former = self.checkpoint, epoch, self._left
        if checkpoint is None:
            return epoch
        if is_active:
            raise TrainingError(
                f"the run trains, and cannot begin at checkpoint={str(checkpoint)!r}; stop it with run.stop() first"
            )
        if not Path(checkpoint).is_file():
            raise TrainingError(
                f"there is no file checkpoint={str(checkpoint)!r}; a Trainer writes one with callbacks=["
                "ModelCheckpoint(...)] and enable_checkpointing=True"
            )
        try:
            found = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)
            (_,) = found["optimizer_states"]
            begins_at = epoch_to_go_on_at(found)
        except Exception as error:
            raise TrainingError(
                f"checkpoint={str(checkpoint)!r} is none of a training with one optimizer: {type(error).__name__}"
            ) from error
        self.checkpoint, self._left = Path(checkpoint).resolve(), None
        return begins_at

    def go_on_from(self, other: RunFolder) -> None:
        """Let the next start go on from where another run has ended, whose folder goes with it."""
        if other.checkpoint is not None:
            self.checkpoint = Path(shutil.copy(other.checkpoint, self.path / "resume.ckpt"))

    def difference(self, model: torch.nn.Module) -> str | None:
        """In which tensor what is kept here differs from a model that is to go on with it; ``None`` if it fits."""
        if self.checkpoint is None:
            return None
        kept = torch.load(self.checkpoint, map_location="cpu", weights_only=False, mmap=True)["state_dict"]
        own = model.state_dict()
        for name in sorted({*kept, *own}):
            here, there = (tuple(one[name].shape) if name in one else None for one in (own, kept))
            if here != there:
                return f"{name} is {here or 'not there'} here and {there or 'not there'} in what the run has learned"
        return None

    def take_back(self, was_refused: bool = False) -> int:
        """Let the next start go on from where the last one was to: it failed before it had begun.

        :param was_refused: whether nothing has touched the model, so that what it was left with still counts
        :returns: the swarm epoch from which that goes on
        """
        self.checkpoint, epoch, left = self._former
        if was_refused:
            self._left = left
        return epoch

    def left_in(self, model: torch.nn.Module) -> LeftModel | None:
        """What another start goes on with instead of the checkpoint's weights: those that the model has.

        :returns: ``None`` if it goes on with the checkpoint's
        """
        if self._left is None:
            return None
        here, before = dict(model.named_parameters()), self._parameters
        replaced = frozenset(name for name, one in here.items() if name in before and before[name]() is not one)
        return LeftModel(edited_since(self._left, model), replaced)

    def note_model(self, model: torch.nn.Module, edited: Collection[str] = ()) -> None:
        """Know what training has left in a model, so that what somebody changes in it is seen.

        :param edited: names of the parameters that somebody has changed already, and no batch was trained with
        """
        self._parameters = {name: weakref.ref(one) for name, one in model.named_parameters()}
        self._left = {name: one for name, one in prints_of(model).items() if name not in edited}

    def keep_state(self, trainer: lightning.Trainer, progress: dict[str, Any] | None = None) -> None:
        """Write down all that another start needs to go on, if training has got as far as having any.

        :param progress: where in the data it was stopped; by default where Lightning's loop is now
        """
        if trainer.global_step > 0:
            path = self.path / "resume.ckpt"
            batches = trainer.fit_loop.epoch_loop.batch_progress
            passes: Any = trainer.fit_loop.epoch_progress.current  # Lightning declares it as less than it is
            if progress is not None:
                trainer.fit_loop.load_state_dict(progress)
            elif batches.is_last_batch and passes.completed == passes.started:  # its validation and hooks are over too
                batches.reset_on_run()  # with max_steps, Lightning would go on in the pass that is over
            self._require_room(lambda: trainer.save_checkpoint(path))
            self.checkpoint = path

    def _require_room(self, write: Callable[[], object]) -> None:
        """Write something here.

        :raises TrainingError: if there is no room for it on the disk
        """
        try:
            write()
        except (OSError, RuntimeError) as error:  # torch has an error of its own, which does not say why
            free = shutil.disk_usage(self.path).free
            if free > _LEFT_ON_A_FULL_DISK and getattr(error, "errno", None) != errno.ENOSPC:
                raise
            raise TrainingError(
                f"the disk is full at {self.path}, which has {free / 2**20:,.1f} MB left: what the run needs to go on "
                "with another start could not be kept. The model has its weights: run.model. Make room there, or name "
                "another folder for temporary files before Python starts: export TMPDIR=/some/folder"
            ) from error
