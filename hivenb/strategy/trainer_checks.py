"""What of a Trainer and its module does not go with the steps of a swarm, said before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from hivenb.engine.averagers.lazy_tensors import lazy_tensors, no_values
from hivenb.engine.optimizer.torch_optimizers import find_obstacle
from hivenb.options.options import Options

#: Why a module that steps by hand is not trained so.
SUMS_BY_HAND = (
    "reuse_grad_buffers=True does not go with manual optimization: gradients are summed in the model, weighed by "
    "samples, and how many backward passes of yours make a step is not known. Leave out reuse_grad_buffers, or train "
    "with automatic optimization"
)

#: What to do where something is to be trained later.
LATER = (
    "Give the optimizer all that will be trained from the beginning, with requires_grad=True, and freeze what is to "
    "come later in on_train_start: what has no gradient stays as it is at all peers, until it is unfrozen at one of "
    "them. Or stop, unfreeze it, and start again, at all peers"
)


def check_trainer(trainer: Any, module: Any, optimizers: Sequence[Any], options: Options) -> None:
    """Refuse what cannot train with a swarm.

    :param optimizers: those that ``configure_optimizers`` returned
    :param options: with which it is to be trained
    :raises MisconfigurationException: with the reason, and what to do instead
    """
    if [type(one).__name__ for one in optimizers] == ["_MockOptimizer"]:  # which each of Lightning's packages has
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_optimizers returned None, and without an optimizer the swarm has no "
            "step to make; return one"
        )
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"configure_optimizers gave {len(optimizers)} optimizers; HivemindStrategy supports one, with as many "
            "parameter groups as you like"
        )
    for callback in trainer.callbacks:
        _check_callback(callback)
    _check_values(module, optimizers[0])
    obstacle = find_obstacle(optimizers[0], module.modules(), bool(options.offload_optimizer))
    if obstacle is not None:
        raise MisconfigurationException(obstacle)
    if options.reuse_grad_buffers and not module.automatic_optimization:
        raise MisconfigurationException(SUMS_BY_HAND)
    if getattr(getattr(trainer, "_accelerator_connector", None), "_layer_sync", None) is not None:
        raise MisconfigurationException(
            "sync_batchnorm=True needs a process group, and peers of a swarm have none: they come and go, and each "
            "computes its batches by itself. Leave it out: the statistics that BatchNorm keeps are averaged with the "
            "parameters (average_buffers=True); for small batches a layer without statistics of the batch, such as "
            "GroupNorm, does as well"
        )


def _check_values(module: Any, optimizer: Any) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    for name in lazy_tensors(module):
        if id(tensors[name]) in trained or not isinstance(tensors[name], torch.nn.Parameter):
            raise MisconfigurationException(no_values(module, name))


def _check_callback(callback: Any) -> None:
    kinds = {kind.__name__ for kind in type(callback).__mro__}  # each of Lightning's packages has its own of them
    if "BaseFinetuning" in kinds:
        raise MisconfigurationException(
            f"{type(callback).__name__} adds parameters to the optimizer while training, and what peers average is "
            f"laid down when it begins. {LATER}"
        )
    if "StochasticWeightAveraging" in kinds:
        raise MisconfigurationException(
            "StochasticWeightAveraging sets a learning rate of its own at a time of its own, which the swarm's step "
            "does not know of; use lightning.pytorch.callbacks.WeightAveraging, or a scheduler_fn and no weight "
            "averaging"
        )


def check_still_frozen(module: Any, unfrozen: Sequence[Any]) -> None:
    """Refuse to go on where parameters were unfrozen that peers do not average.

    :param module: that is trained
    :param unfrozen: those that were frozen when training began, and are not any more
    :raises MisconfigurationException: with the name of the first one, and what to do instead
    """
    if not unfrozen:
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    raise MisconfigurationException(
        f"{names.get(id(unfrozen[0]), 'A parameter')} was frozen (requires_grad=False) when training began, and is not "
        f"any more; of such parameters there are {len(unfrozen)}. Peers average only what was to be trained from the "
        f"beginning. {LATER}"
    )
