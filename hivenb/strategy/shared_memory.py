"""How much memory a peer shares with the processes of its averagers, and whether there is so much."""

from __future__ import annotations

import torch

from hivenb.options.options import Options
from hivenb.system.environment import require_shared_memory

#: Bytes in which the processes of a peer answer each other: 64 KiB for each, and as many again when those are used up.
ANSWERS = 8 * 2**16


def shared_bytes(optimizer: torch.optim.Optimizer, options: Options) -> int:
    """Bytes that the averagers of a model share with this process at least: a copy of all that is trained.

    :param optimizer: of the model's parameters
    :param options: of the training
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    one_copy = sum(parameter.numel() * max(4, parameter.element_size()) for parameter in trained)
    if options.use_local_updates:
        return one_copy if options.outer_optimizer is None else 3 * one_copy  # its parameters and its momentum
    return 2 * one_copy


def require_room_for(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Refuse a model for which there is too little shared memory, before its averagers crash.

    :raises PlatformError: with how much there is
    """
    require_shared_memory(shared_bytes(optimizer, options) + ANSWERS)
