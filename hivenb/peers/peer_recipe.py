"""All that another process needs to become a peer of a run, packed."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch.utils.data import DataLoader

from hivenb.engine.averaging.lazy_tensors import lazy_tensors, no_values
from hivenb.errors import LocalPeerError
from hivenb.options.options import Options
from hivenb.peers.followed_run import FollowedRun, pack_options

#: Trainer arguments that belong to the run in the notebook alone: one set of log files and checkpoints, and its end.
#: How many passes or batches it is to train is for peers to know as well: schedules are made of that.
_NOT_FOR_PEERS = (
    "callbacks",
    "logger",
    "enable_checkpointing",
    "default_root_dir",
    "max_time",
    "profiler",
    "min_epochs",
    "min_steps",
)


@dataclass(frozen=True)
class PeerRecipe:
    """All that another process needs to become a peer of a run.

    :param model: the LightningModule, on the CPU
    :param data: training data; peers do not validate
    :param options: those of the run
    :param initial_peers: what leads into the swarm: multiaddresses, or an invite
    :param trainer_kwargs: keyword arguments of the Trainer
    :param seed: of this peer's own random numbers
    :param has_logger: whether the run has a logger, which its model may use
    """

    model: Any
    data: Any
    options: Options
    initial_peers: tuple[str, ...]
    trainer_kwargs: dict[str, Any]
    seed: int
    has_logger: bool = False

    def for_trainer(self) -> dict[str, Any]:
        """Keyword arguments of the Trainer as they are in the process of the peer.

        Their ``default_root_dir`` is a new folder, which whoever calls this removes.

        :returns: those of the run, without validation, and with a logger that writes nothing if the run has one
        """
        # Not above: see _as_before_training. Made here, as one that is packed arrives without its experiment.
        from lightning.pytorch.loggers.logger import DummyLogger

        folder = tempfile.mkdtemp(prefix="hivenb-peer-")
        # for modules that write beside what a logger writes
        folders = dict.fromkeys(("save_dir", "log_dir", "root_dir"), property(lambda _: folder))
        logger = {"logger": type("NoLogger", (DummyLogger,), folders)()} if self.has_logger else {}
        return {**self.trainer_kwargs, **logger, "default_root_dir": folder, "limit_val_batches": 0}


def make_recipe(run: FollowedRun, initial_peers: tuple[str, ...], seed: int) -> bytes:
    """A run's model, data and options, packed for a process that does not share this one's ``__main__``.

    :param run: the run to take part in
    :param initial_peers: what leads into the swarm: multiaddresses, or an invite
    :param seed: of the peer's own random numbers
    :returns: a pickled :class:`PeerRecipe`
    :raises OptionsError: if the options cannot be packed
    :raises LocalPeerError: if the model or the data cannot be packed
    """
    pack_options(run.options)
    data = run.data[0] if isinstance(run.data, tuple) else run.data  # a pair, and a list is none
    try:
        return cloudpickle.dumps(
            PeerRecipe(
                model=copy.deepcopy(run.model).cpu(),
                data=_as_before_training(data),
                options=run.options,
                initial_peers=initial_peers,
                trainer_kwargs=_for_peers(run.trainer_kwargs),
                seed=seed,
                has_logger=bool(run.trainer_kwargs.get("logger")),
            )
        )
    except Exception as e:
        if lazy := lazy_tensors(run.model):
            raise LocalPeerError(f"the model cannot be sent to another process: {no_values(run.model, lazy[0])}") from e
        raise LocalPeerError(
            f"the model or the data cannot be sent to another process ({type(e).__name__}: {e}); keep open files, "
            "locks and generators out of them"
        ) from e


def _for_peers(trainer_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the Trainer of a peer, with the same schedule as that of the run."""
    kept = {name: value for name, value in trainer_kwargs.items() if name not in _NOT_FOR_PEERS}
    if trainer_kwargs.get("max_time") is not None and kept.get("max_epochs", -1) is None:
        kept["max_epochs"] = -1  # what Lightning takes None for beside max_time, and without it for 1,000
    return kept


def _as_before_training(data: Any) -> Any:
    """The same data without what the Trainer of this process has put there, which cannot be packed."""
    # Not above: a run has imported it, and whoever opens a swarm alone, such as a relay, spares the seconds it takes.
    import lightning
    from lightning.pytorch.utilities import CombinedLoader

    if isinstance(data, lightning.LightningDataModule):
        data = copy.copy(data)
        data.trainer = None
    elif isinstance(data, DataLoader):
        data = copy.copy(data)
        data._iterator = None  # with persistent_workers, those that are at work
    elif isinstance(data, (CombinedLoader, list, tuple, dict)):
        held = data if isinstance(data, CombinedLoader) else CombinedLoader(data, "max_size_cycle")
        made = CombinedLoader(held.iterables, held._mode)
        made.flattened = [_as_before_training(part) for part in made.flattened]
        data = made if isinstance(data, CombinedLoader) else made.iterables
    return data
