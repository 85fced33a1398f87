"""What a run is made of, looked at before anything begins: beginners mix these things up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hivenb.errors import OptionsError, TrainingError
from hivenb.options.options import DEFAULT_RUN_ID, Options
from hivenb.swarm.swarm import Swarm

_OF_A_MODULE = ("training_step", "configure_optimizers")


def check_arguments(model: Any, swarm: Any, options: Any, trainer_kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot become a run.

    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :raises TrainingError: if there is a strategy among them, or the model or the swarm is something else
    :raises OptionsError: if the options are something else than :class:`hivenb.Options`
    """
    if "strategy" in trainer_kwargs:
        raise TrainingError(
            f"strategy={trainer_kwargs['strategy']!r} cannot be given to a TrainingRun: it trains with "
            "HivemindStrategy, set up by options=. Use lightning.Trainer directly for another one"
        )
    if isinstance(model, type):
        raise TrainingError(f"model is the class {model.__name__}; give one of its instances: {model.__name__}(...)")
    if not isinstance(model, torch.nn.Module) or not all(hasattr(model, name) for name in _OF_A_MODULE):
        raise TrainingError(
            f"model has to be a LightningModule, with training_step and configure_optimizers, and is a "
            f"{type(model).__name__}"
        )
    if not isinstance(swarm, Swarm):
        raise TrainingError(f"swarm={swarm!r} is no swarm; {_how_to_open(swarm)}")
    if not isinstance(options, Options):
        raise OptionsError(
            f"options has to be a hivenb.Options, and is {options!r}; write hivenb.Options(target_batch_size=...)"
        )


def in_invited_run(options: Options, swarm: Swarm) -> Options:
    """The same options, in the run that the invite has named, unless they name another one."""
    if swarm.invited_to is None or options.run_id != DEFAULT_RUN_ID:
        return options
    return options.replace(run_id=swarm.invited_to)


def _how_to_open(swarm: Any) -> str:
    if isinstance(swarm, str):
        return "join the one that an invite leads to with swarm=hivenb.Swarm.join(...)"
    return "open one with swarm=hivenb.Swarm()"
