"""Messages with parts of tensors: protobuf reads what hivenb writes, hivenb what protobuf writes, without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hivemind import compression
from hivemind.proto import averaging_pb2

from hivenb.engine.exchange.codecs import codec_of, corrected
from hivenb.engine.exchange.exact_tensors import ExactKey, SendsExactly
from hivenb.engine.exchange.part_messages import PartMessage, TensorPart, encoded

PLAIN, HALF = compression.NoCompression(), corrected(compression.Float16Compression())

#: Numbers in a part: none, few, one whose length takes three bytes, one of hivemind's parts, and one that is too long.
SIZES = (0, 1, 5, 40, 4096, 131_072, 600_000)

FIELDS: dict[str, Any] = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": b"a group", "weight": 2.5}


def info(tensor: torch.Tensor, key: Any = None) -> compression.CompressionInfo:
    return compression.CompressionInfo.from_tensor(tensor, key=key)


def message_of(tensor: torch.Tensor, codec: compression.CompressionBase) -> averaging_pb2.AveragingData:
    """What plain hivemind sends."""
    return averaging_pb2.AveragingData(tensor_part=codec.compress(tensor, info(tensor)), **FIELDS)


def received(data: bytes) -> PartMessage:
    message = PartMessage()
    message.ParseFromString(data)
    return message


def in_data(message: PartMessage, data: bytes) -> bool:
    """Whether the numbers of a message are those of the data that it was read from, and no copy of them."""
    numbers, whole = (np.frombuffer(one, dtype=np.uint8) for one in (message.tensor_part.buffer, data))
    return np.shares_memory(numbers, whole)


@pytest.mark.parametrize("codec", [PLAIN, HALF], ids=["plain", "half"])
@pytest.mark.parametrize("size", SIZES)
def test_protobuf_reads_what_is_written(size: int, codec: Any) -> None:
    tensor = torch.randn(size)
    written = PartMessage(encoded(codec, tensor, info(tensor)), **FIELDS).SerializeToString()
    assert averaging_pb2.AveragingData.FromString(written) == message_of(tensor, codec)


@pytest.mark.parametrize("codec", [PLAIN, HALF], ids=["plain", "half"])
@pytest.mark.parametrize("size", SIZES)
def test_what_protobuf_has_written_is_read(size: int, codec: Any) -> None:
    sent = message_of(torch.randn(size), codec)
    message = received(sent.SerializeToString())
    assert bytes(message.tensor_part.buffer) == sent.tensor_part.buffer
    assert (message.code, message.group_id, message.weight) == (sent.code, sent.group_id, sent.weight)
    part = message.tensor_part
    assert (list(part.size), part.dtype, part.compression) == ([size], "float32", sent.tensor_part.compression)
    assert received(message.SerializeToString()).head == message.head


@pytest.mark.parametrize("codec", [PLAIN, HALF], ids=["plain", "half"])
@pytest.mark.parametrize("size", SIZES[1:-1])
def test_numbers_stay_where_they_have_arrived(size: int, codec: Any) -> None:
    tensor = torch.randn(size)
    data = PartMessage(encoded(codec, tensor, info(tensor)), **FIELDS).SerializeToString()
    message = received(data)
    assert in_data(message, data)
    values = codec_of(message.tensor_part.compression).extract(message.tensor_part)
    assert torch.equal(values, tensor.half().float() if codec is HALF and size > 1 else tensor)
    assert values.data_ptr() % 8 == 0
    if codec is PLAIN:
        assert np.shares_memory(values.numpy(), np.frombuffer(data, dtype=np.uint8))


def test_what_is_sent_may_change_at_once() -> None:
    tensor = torch.zeros(100)
    part = encoded(PLAIN, tensor, info(tensor))
    tensor += 1.0
    assert part.buffer == bytes(400)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_each_type_arrives(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    message = received(PartMessage(encoded(PLAIN, tensor, info(tensor))).SerializeToString())
    values = codec_of(message.tensor_part.compression).extract(message.tensor_part)
    assert values.dtype is dtype
    assert torch.equal(values, tensor)


def test_a_codec_that_chooses_is_asked() -> None:
    small, large = torch.randn(9), torch.randn(10)
    codec = compression.SizeAdaptiveCompression(10, less=PLAIN, greater_equal=HALF)
    assert [len(encoded(codec, one, info(one)).buffer) for one in (small, large)] == [36, 20]
    exactly = SendsExactly(HALF)
    assert [len(encoded(exactly, large, info(large, key)).buffer) for key in (0, ExactKey())] == [20, 40]


class Doubled(compression.NoCompression):
    """A codec of a user's."""

    def compress(self, tensor: torch.Tensor, info: Any, allow_inplace: bool = False) -> Any:
        return super().compress(2 * tensor, info, allow_inplace)


class DoubledBySize(compression.SizeAdaptiveCompression):
    """Another one."""

    def compress(self, tensor: torch.Tensor, info: Any, allow_inplace: bool = False) -> Any:
        return super().compress(2 * tensor, info, allow_inplace)


@pytest.mark.parametrize("codec", [Doubled(), DoubledBySize(10, less=PLAIN, greater_equal=PLAIN)])
def test_a_codec_of_a_user_encodes_as_it_says(codec: Any) -> None:
    tensor = torch.ones(4)
    assert encoded(codec, tensor, info(tensor)).buffer == (2 * tensor).numpy().tobytes()


def test_fields_change_until_a_message_is_sent() -> None:
    message = PartMessage(encoded(PLAIN, torch.ones(3), info(torch.ones(3))), weight=1.0)
    message.code, message.group_id, message.peer_id = averaging_pb2.AVERAGED_PART, b"another", b"\0\1"
    again = averaging_pb2.AveragingData.FromString(message.SerializeToString())
    assert (again.code, again.group_id, again.peer_id) == (averaging_pb2.AVERAGED_PART, b"another", b"\0\1")


def test_a_message_without_a_part_has_an_empty_one() -> None:
    message = received(PartMessage(code=averaging_pb2.BAD_GROUP_ID).SerializeToString())
    assert message.code == averaging_pb2.BAD_GROUP_ID
    assert not message.head.HasField("tensor_part")
    assert (len(message.tensor_part.buffer), message.tensor_part.dtype) == (0, "")


def test_of_two_buffers_the_last_one_counts() -> None:
    """As for protobuf, whatever comes first."""
    first = PartMessage(encoded(PLAIN, torch.ones(3), info(torch.ones(3))))
    data = first.SerializeToString() + message_of(torch.zeros(2), PLAIN).SerializeToString()
    assert bytes(received(data).tensor_part.buffer) == averaging_pb2.AveragingData.FromString(data).tensor_part.buffer


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 19, 20, 21])
def test_what_was_cut_off_is_read_or_refused_as_by_protobuf(cut: int) -> None:
    whole = PartMessage(encoded(PLAIN, torch.ones(3), info(torch.ones(3))), **FIELDS).SerializeToString()
    try:
        expected = averaging_pb2.AveragingData.FromString(whole[:cut])
    except DecodeError:
        with pytest.raises(DecodeError):
            received(whole[:cut])
    else:
        assert bytes(received(whole[:cut]).tensor_part.buffer) == expected.tensor_part.buffer


def test_the_buffer_of_a_part_is_taken_out_of_its_message() -> None:
    message = PLAIN.compress(torch.full((2,), math.pi), info(torch.ones(2)))
    carried = message.buffer
    part = TensorPart.of(message)
    assert part.buffer == carried
    assert not part.header.buffer
