"""What a message says of a tensor is believed no further than what it carries."""

from __future__ import annotations

import importlib.util
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2

from hivenb.engine.exchange import codecs
from hivenb.errors import DamagedTensorError

codecs.install()  # as in each averager's process

#: Enough for each codec to be worth while.
NUMBERS = torch.linspace(-1.0, 1.0, 4097)

CODECS = [
    pytest.param(
        value,
        marks=pytest.mark.skipif(
            "BLOCKWISE" in name and importlib.util.find_spec("bitsandbytes") is None,
            reason="bitsandbytes is not installed",
        ),
        id=name,
    )
    for name, value in runtime_pb2.CompressionType.items()
]
every_codec = pytest.mark.parametrize("codec", CODECS)


def sent(codec: int) -> runtime_pb2.Tensor:
    message = serialize_torch_tensor(NUMBERS, codec)
    assert message.compression == codec
    return message


@every_codec
@pytest.mark.parametrize(
    "damage",
    [
        lambda message: message.size.__setitem__(0, 4098),
        lambda message: message.size.__setitem__(0, 0),
        lambda message: message.size.append(2**32 - 1),
        lambda message: message.size.extend([1] * 64),
        lambda message: message.size.__delitem__(slice(None)),
        lambda message: setattr(message, "buffer", message.buffer + b"\0"),
        lambda message: setattr(message, "buffer", message.buffer[:-1]),
        lambda message: setattr(message, "buffer", b""),
        lambda message: setattr(message, "dtype", "S1000000"),
        lambda message: setattr(message, "dtype", "(1000,1000)f4"),
        lambda message: setattr(message, "dtype", "load"),
        lambda message: setattr(message, "dtype", ""),
    ],
    ids=[
        "longer",
        "empty",
        "huge",
        "deep",
        "scalar",
        "more",
        "less",
        "nothing",
        "texts",
        "arrays",
        "function",
        "no type",
    ],
)
def test_what_does_not_fit_is_refused(codec: int, damage: Callable[[runtime_pb2.Tensor], None]) -> None:
    message = sent(codec)
    assert deserialize_torch_tensor(message).shape == NUMBERS.shape
    damage(message)
    with pytest.raises(DamagedTensorError):
        deserialize_torch_tensor(message)


def test_a_number_of_a_type_of_gigabytes_takes_no_memory() -> None:
    message = runtime_pb2.Tensor(compression=runtime_pb2.FLOAT16, dtype="S500000000", size=[1], buffer=b"\0\0")
    tracemalloc.start()
    try:
        with pytest.raises(DamagedTensorError):
            deserialize_torch_tensor(message)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1_000_000


@pytest.mark.parametrize("codec", [one for one in CODECS if "8BIT" in one.id])
@pytest.mark.parametrize("count", [0, 1, 255, 257, -1, 2**31, -(2**63)])
def test_a_table_of_another_length_is_refused(codec: int, count: int) -> None:
    """With a shorter one, bitsandbytes reads memory beyond its end, and sends that on."""
    message = sent(codec)
    for place in range(2 if codec == runtime_pb2.BLOCKWISE_8BIT else 1):
        lengths = np.frombuffer(message.buffer[:16], dtype=np.int64).copy()
        lengths[place] = count
        damaged = runtime_pb2.Tensor.FromString(message.SerializeToString())
        damaged.buffer = lengths.tobytes() + message.buffer[16:]
        with pytest.raises(DamagedTensorError):
            deserialize_torch_tensor(damaged)


def test_integers_have_no_gradients() -> None:
    message = serialize_torch_tensor(torch.arange(3))
    message.requires_grad = True
    with pytest.raises(DamagedTensorError):
        deserialize_torch_tensor(message)


def test_a_tensor_of_nothing_has_lengths_that_can_be() -> None:
    message = serialize_torch_tensor(torch.zeros(3, 0, 5))
    assert deserialize_torch_tensor(message).shape == (3, 0, 5)
    message.size.extend([2**32 - 1] * 4)
    with pytest.raises(DamagedTensorError):
        deserialize_torch_tensor(message)


@every_codec
def test_what_it_says_can_be_long_and_is_not_repeated(codec: int) -> None:
    message = sent(codec)
    message.dtype = "x" * 10_000
    with pytest.raises(DamagedTensorError) as refused:
        deserialize_torch_tensor(message)
    assert len(str(refused.value)) < 300
    assert math.prod(message.size) == len(NUMBERS)
