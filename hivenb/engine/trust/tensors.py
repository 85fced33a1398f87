"""Tensors as others send them: what a message says of its tensor has to be what it carries.

hivemind's codecs believe it. The name of a type such as ``S1000000000`` makes gigabytes of a number of two bytes, and
with tables that are too short, a codec reads memory that is not its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hivemind.proto import runtime_pb2

from hivenb.errors import DamagedTensorError

#: Dimensions of a tensor at most, as many as numpy has.
MOST_DIMENSIONS = 64

#: Numbers of a tensor that has none of its own, were the dimensions without a length left out.
_MOST_IN_NOTHING = 2**48

_FLOATS = ("float16", "float32", "float64")
_WITH_BFLOAT16 = (*_FLOATS, "bfloat16")
_DIFFERENTIABLE = (*_WITH_BFLOAT16, "complex64", "complex128")
_INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_NUMPY_TYPES = (*_INTEGERS, *_FLOATS, "complex64", "complex128")
_PLAIN = {name: np.dtype(name).itemsize for name in _NUMPY_TYPES if hasattr(torch, name)}

#: Entries of the table of a codec of eight bits, and numbers that share a scale in ``blockwise8bit``.
_TABLE, _BLOCK = 256, 4096


def check_message(message: runtime_pb2.Tensor) -> None:
    """Refuse a message that is not what a codec of its type makes of a tensor of its size.

    :param message: as it was received; what it claims costs nothing here
    :raises DamagedTensorError: with what is wrong
    """
    if len(message.size) > MOST_DIMENSIONS:
        raise DamagedTensorError(f"it has {len(message.size)} dimensions, and {MOST_DIMENSIONS} are possible")
    count, buffer = math.prod(message.size), message.buffer
    if count == 0 and math.prod(max(1, length) for length in message.size) > _MOST_IN_NOTHING:
        raise DamagedTensorError(f"its size {tuple(message.size)} cannot be")
    if count > len(buffer):  # with each codec a number takes a byte at least
        raise DamagedTensorError(f"its size is {tuple(message.size)}, and it carries {len(buffer)} bytes")
    fitting = _LENGTHS[message.compression](message, count, buffer)
    if len(buffer) not in fitting:
        raise DamagedTensorError(
            f"{count} numbers of type {message.dtype[:20]!r} take {fitting[0]} bytes with its codec, and it carries "
            f"{len(buffer)}"
        )
    if message.requires_grad and message.dtype not in _DIFFERENTIABLE:
        raise DamagedTensorError(f"numbers of type {message.dtype[:20]!r} have no gradients")


def _require_type(message: runtime_pb2.Tensor, known: Any) -> None:
    if message.dtype not in known:
        raise DamagedTensorError(f"its type {message.dtype[:20]!r} is none that its codec can have")


def _plain(message: runtime_pb2.Tensor, count: int, buffer: bytes) -> tuple[int, ...]:
    if message.dtype == "bfloat16":
        return 4 * count, 2 * count  # in single precision, unless all are set to send it as it is
    _require_type(message, _PLAIN)
    return (_PLAIN[message.dtype] * count,)


def _half(message: runtime_pb2.Tensor, count: int, buffer: bytes) -> tuple[int, ...]:
    _require_type(message, _FLOATS)
    return (2 * count,)


def _scaled_half(message: runtime_pb2.Tensor, count: int, buffer: bytes) -> tuple[int, ...]:
    _require_type(message, _FLOATS)
    if count == 0 or not message.size:
        raise DamagedTensorError("it has no rows that could have been scaled")
    return (2 * count + 8 * (count // message.size[-1]),)


def _eight_bits(message: runtime_pb2.Tensor, count: int, buffer: bytes) -> tuple[int, ...]:
    _require_type(message, _WITH_BFLOAT16)
    _require_counts(buffer, _TABLE)
    return (8 + 4 * _TABLE + count,)


def _blockwise(message: runtime_pb2.Tensor, count: int, buffer: bytes) -> tuple[int, ...]:
    _require_type(message, _WITH_BFLOAT16)
    blocks = -(-count // _BLOCK)
    _require_counts(buffer, blocks, _TABLE)
    return (16 + 4 * (blocks + _TABLE) + count,)


def _require_counts(buffer: bytes, *expected: int) -> None:
    """Refuse a buffer that does not begin with these numbers, which are the lengths of its tables."""
    head = np.array(expected, dtype=np.int64).tobytes()
    if buffer[: len(head)] != head:
        raise DamagedTensorError(f"its tables have not the lengths {expected}")


_LENGTHS: dict[int, Callable[[runtime_pb2.Tensor, int, bytes], tuple[int, ...]]] = {
    runtime_pb2.NONE: _plain,
    runtime_pb2.FLOAT16: _half,
    runtime_pb2.MEANSTD_16BIT: _scaled_half,
    runtime_pb2.QUANTILE_8BIT: _eight_bits,
    runtime_pb2.UNIFORM_8BIT: _eight_bits,
    runtime_pb2.BLOCKWISE_8BIT: _blockwise,
}
