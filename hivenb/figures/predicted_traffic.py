"""How much one peer sends in an epoch, worked out beforehand from the model, the codecs and the number of peers.

All-reduce by parts, as hivemind does it: each of n peers sends the others their parts of its tensors, which is a share
of (n - 1) / n of them, and sends the n - 1 others the average of its own part, which is as much again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivenb.compression import CODECS, SIZE_ADAPTIVE_THRESHOLD
from hivenb.options.choices import sent_sizes

if TYPE_CHECKING:
    from hivenb.options.options import Options


@dataclass(frozen=True)
class EpochBytes:
    """What one peer sends in an epoch, and receives as well, in bytes.

    :param gradients: ``None`` where it cannot be told, as with a codec of the user's own
    :param parameters: with the averaged statistics of the optimizer, and the module's buffers; where they are averaged
      in every epoch only
    """

    gradients: float | None
    parameters: float | None


def tensor_shapes(model: Any) -> tuple[tuple[int, ...], ...]:
    """Of each tensor that is trained and averaged; none of a layer that is made later.

    :param model: a ``torch.nn.Module``
    """
    from torch.nn.parameter import is_lazy

    return tuple(tuple(one.shape) for one in model.parameters() if one.requires_grad and not is_lazy(one))


def buffer_bytes(model: Any) -> int:
    """Bytes of a model's buffers as peers exchange them, which is without compression.

    :param model: a ``torch.nn.Module``
    """
    from hivenb.engine.averaging.extensions.buffers import averaged_numbers

    singles, doubles = averaged_numbers(model)
    return 4 * singles + 8 * doubles


def encoded_size(sizes: Sequence[int], codec: Any) -> float | None:
    """Bytes of tensors as a codec sends them.

    :param sizes: numbers in each
    :param codec: an option's value
    :returns: ``None`` for a codec that has no name
    """
    if not isinstance(codec, str):
        return None
    if codec == "size_adaptive":
        small = sum(size for size in sizes if size < SIZE_ADAPTIVE_THRESHOLD)
        large = sum(sizes) - small
        return CODECS["float16"].bytes_per_parameter * small + CODECS["uniform8bit"].bytes_per_parameter * large
    return CODECS[codec].bytes_per_parameter * sum(sizes)


def epoch_bytes(shapes: Sequence[Sequence[int]], options: Options, peers: int, buffers: int = 0) -> EpochBytes:
    """What one peer sends in an epoch.

    :param shapes: of the tensors
    :param options: that all peers have
    :param peers: of the run, none of them in client mode
    :param buffers: what :func:`buffer_bytes` gave
    """
    share = 2 * (peers - 1) / peers
    sent = sent_sizes(shapes, options.grad_averager_factory)
    gradients = None if sent is None else encoded_size(sent, options.grad_compression)
    if options.use_local_updates:
        gradients = 0.0
    sizes = [math.prod(shape) for shape in shapes]
    statistics = encoded_size(sizes, options.state_averaging_compression)
    # with an outer optimizer, peers send the differences of parameters as they send gradients
    of_parameters = options.state_averaging_compression if options.outer_optimizer is None else options.grad_compression
    parameters = encoded_size(sizes, of_parameters)
    if parameters is not None and options.outer_optimizer is not None:
        parameters /= options.outer_fragments
    if parameters is not None and statistics is not None:
        parameters += len(options.average_opt_statistics) * statistics + buffers * options.average_buffers
    return EpochBytes(
        None if gradients is None else share * gradients, None if parameters is None else share * parameters
    )
