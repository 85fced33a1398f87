"""Tensors that peers send: parts of gradients and states, as each codec writes them."""

from __future__ import annotations

import contextlib
import math

import numpy as np
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2

from fuzzing.target import Choices, Target
from hivenb.engine.exchange import codecs
from hivenb.errors import DamagedTensorError, MissingDependencyError

codecs.install()  # as in each averager's process

with contextlib.suppress(ImportError):
    import bitsandbytes.functional  # noqa: F401 - takes seconds, of the first input otherwise

TYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "bool", "uint8", "complex64", "uint16",
    "", "O", "S1000000000", "(100000,100000)f4", "f4,f4", "load", "nn", "Tensor", "M8[s]", "float128", ">f4", "half",
)  # fmt: skip
LENGTHS = (0, 1, 2, 3, 4, 7, 8, 17, 256, 4096, 4097, 65536, 2**31 - 1, 2**31, 2**32 - 1)
NUMBERS = (0, 1, 2, 255, 256, 257, 4096, -1, -(2**63), 2**63 - 1, 2**31, 10**12)


def made_of(choices: Choices) -> runtime_pb2.Tensor:
    """A message with a tensor: one that a peer could send, or one with a few things that are wrong."""
    codec = choices.of(tuple(runtime_pb2.CompressionType.values()))
    size = [choices.of(LENGTHS[:8]) for _ in range(choices.number(4))]
    is_wrong = choices.now_and_then
    message = runtime_pb2.Tensor(compression=codec, dtype=choices.of(TYPES[:9]), requires_grad=is_wrong())
    message.buffer = _buffer(choices, message, math.prod(size))
    message.size.extend([choices.of(LENGTHS) for _ in range(choices.number(70))] if is_wrong() else size)
    if is_wrong():
        message.dtype = choices.of(TYPES)
    if is_wrong():
        message.buffer = message.buffer[: choices.number(256)] + choices.raw(16)
    if is_wrong():
        message.compression = choices.number(8)
    message.chunks = choices.number(3)
    return message


def _buffer(choices: Choices, message: runtime_pb2.Tensor, count: int) -> bytes:
    count = min(count, 10_000)
    width = {"float64": 8, "int64": 8, "complex64": 8, "bool": 1, "uint8": 1, "float16": 2, "uint16": 2}
    heads: dict[int, tuple[int, ...]] = {
        runtime_pb2.QUANTILE_8BIT: (256,),
        runtime_pb2.UNIFORM_8BIT: (256,),
        runtime_pb2.BLOCKWISE_8BIT: (-(-count // 4096), 256),
    }
    head = tuple(choices.of(NUMBERS) if choices.now_and_then() else one for one in heads.get(message.compression, ()))
    tables = sum(min(max(one, 0), 10_000) for one in head) * 4
    rest = {runtime_pb2.NONE: count * width.get(message.dtype, 4), runtime_pb2.FLOAT16: 2 * count}
    rest[runtime_pb2.MEANSTD_16BIT] = 2 * count + 8 * choices.number(8)
    carried = np.array(head, dtype=np.int64).tobytes() + bytes(tables) + bytes(rest.get(message.compression, count))
    return carried + (choices.raw(8) if choices.now_and_then() else b"")


def read(message: runtime_pb2.Tensor) -> None:
    """Read it as an averager does; what is accepted is what it says it is, and not much larger than what it carries."""
    is_codec = message.compression in runtime_pb2.CompressionType.values()
    try:
        tensor = deserialize_torch_tensor(message)
    except DamagedTensorError:
        return
    except MissingDependencyError:
        assert message.compression == runtime_pb2.BLOCKWISE_8BIT
        return
    except ValueError:
        if is_codec:
            raise
        return  # hivemind/compression/serialization.py knows no such codec
    assert is_codec
    assert tuple(tensor.shape) == tuple(message.size)
    assert tensor.dtype.is_floating_point or tensor.dtype.is_complex or not tensor.requires_grad
    assert tensor.nbytes <= 8 * len(message.buffer)
    tensor.sum()  # reads all of it


def feed_made(data: bytes) -> None:
    read(made_of(Choices(data)))


def feed_parsed(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        message = runtime_pb2.Tensor.FromString(data)
    except DecodeError:
        return
    read(message)


TARGETS = [
    Target("tensors", "tensors that peers send, with sizes, types and tables that do not fit", feed_made, 512),
    Target("tensor-bytes", "what peers send as tensors, as bytes", feed_parsed, 4096),
]
