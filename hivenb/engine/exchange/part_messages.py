"""Parts of tensors on their way to another peer and back, copied as seldom as can be.

On the wire they are hivemind's ``AveragingData``, which plain hivemind reads and writes as ever. A message of protobuf
holds bytes of its own: numbers are copied into the message of the tensor, from there into that of the part, and once
more where that is serialized; and again where it is parsed, and with each look at its buffer. Here they are copied
when the message is put together, and where it is read, they stay where they have arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.compression.adaptive import AdaptiveCompressionBase
from hivemind.proto import averaging_pb2, runtime_pb2

#: The tag of ``tensor_part`` in ``AveragingData``, and that of ``buffer`` in it: the number of a field of bytes.
_PART_TAG, _BUFFER_TAG = b"\x22", b"\x0a"

#: Bytes of a length, which may be written longer than it has to be. With the two tags, eight bytes come before the
#: numbers: a message lies at a multiple of 16, and they lie at one of 8.
_LENGTH_BYTES = 3

#: Bytes that can be told so, with those of the inner tag and length; what is longer is left to protobuf.
_LONGEST = (1 << 7 * _LENGTH_BYTES) - 1 - len(_BUFFER_TAG) - _LENGTH_BYTES

_START = len(_PART_TAG) + len(_BUFFER_TAG) + 2 * _LENGTH_BYTES


def _field_of(holder: str, name: str) -> Any:
    """A property that reads and writes a field of a message that is held."""
    return property(
        lambda self: getattr(getattr(self, holder), name),
        lambda self, value: setattr(getattr(self, holder), name, value),
    )


class TensorPart:
    """What ``runtime_pb2.Tensor`` says, with its bytes beside it.

    :param header: the rest of it
    :param buffer: the numbers, as a codec has them
    """

    __slots__ = ("buffer", "header")

    size, dtype, compression, requires_grad = (
        _field_of("header", name) for name in ("size", "dtype", "compression", "requires_grad")
    )

    def __init__(self, header: runtime_pb2.Tensor, buffer: bytes | memoryview):
        self.header, self.buffer = header, buffer

    @classmethod
    def of(cls, message: runtime_pb2.Tensor) -> TensorPart:
        """The same, of a message that has no buffer any more then."""
        buffer = message.buffer
        message.ClearField("buffer")
        return cls(message, buffer)


def encoded(codec: CompressionBase, tensor: torch.Tensor, info: CompressionInfo) -> TensorPart:
    """A part of a tensor, as a codec has it, in bytes of its own: the tensor may change at once.

    :param codec: any, also one that chooses another one
    """
    while isinstance(codec, AdaptiveCompressionBase) and _is_hiveminds(codec, AdaptiveCompressionBase):
        codec = codec.choose_compression(info)
    if not _is_hiveminds(codec, NoCompression) or tensor.dtype == torch.bfloat16:
        return TensorPart.of(codec.compress(tensor, info))
    header = runtime_pb2.Tensor(
        compression=codec.compression_type,
        size=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )
    return TensorPart(header, tensor.detach().numpy().tobytes())


def _is_hiveminds(codec: CompressionBase, kind: type[CompressionBase]) -> bool:
    """Whether a codec encodes as a class of hivemind's does; users may have one of their own."""
    return type(codec).compress is kind.compress


class PartMessage:
    """What stands in for ``AveragingData`` wherever hivemind sends, receives or reads one.

    :param part: of a tensor; ``None`` for a message without one
    :param fields: of ``AveragingData``, but for ``tensor_part``
    """

    __slots__ = ("_buffer", "head")

    code, group_id, peer_id, weight = (_field_of("head", name) for name in ("code", "group_id", "peer_id", "weight"))

    def __init__(self, part: TensorPart | None = None, **fields: Any):
        self.head = averaging_pb2.AveragingData(**fields)
        self._buffer: bytes | memoryview = b""
        if part is not None:
            self.head.tensor_part.CopyFrom(part.header)
            self._buffer = part.buffer

    @property
    def tensor_part(self) -> TensorPart:
        """The part of a tensor; empty if there is none."""
        return TensorPart(self.head.tensor_part, self._buffer)

    def SerializeToString(self) -> bytes:
        """As that of ``AveragingData``: two parts of a field that comes twice are one message to protobuf.

        The numbers come first, so that whoever is to read them finds them without a look at the rest.
        https://protobuf.dev/programming-guides/encoding/#last-one-wins
        """
        head, length = self.head.SerializeToString(), len(self._buffer)
        if not length:
            return head
        if length > _LONGEST:
            whole = averaging_pb2.AveragingData()
            whole.CopyFrom(self.head)
            whole.tensor_part.buffer = bytes(self._buffer)
            return whole.SerializeToString()
        start = _PART_TAG + _padded(length + len(_BUFFER_TAG) + _LENGTH_BYTES) + _BUFFER_TAG + _padded(length)
        return b"".join((start, self._buffer, head))

    def ParseFromString(self, data: bytes) -> None:
        """As that of ``AveragingData``; numbers that come first stay in the data.

        :raises DecodeError: if it is no such message
        """
        length = _length_of_first(data)
        self.head, self._buffer = averaging_pb2.AveragingData(), b""
        if length:
            self.head.ParseFromString(data[_START + length :])
            self._buffer = memoryview(data)[_START : _START + length]
        if not length or self.head.tensor_part.buffer:
            self.head.ParseFromString(data)
            self._buffer = TensorPart.of(self.head.tensor_part).buffer if self.head.HasField("tensor_part") else b""


def _padded(length: int) -> bytes:
    """A varint of three bytes."""
    return bytes((length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14))


def _length_of_first(data: bytes) -> int:
    """Bytes of the numbers with which a message begins, as :meth:`PartMessage.SerializeToString` has it; else 0."""
    start = data[:_START]
    if len(start) < _START or start[:1] != _PART_TAG or start[4:5] != _BUFFER_TAG:
        return 0
    lengths = [one[0] & 0x7F | (one[1] & 0x7F) << 7 | one[2] << 14 for one in (start[1:4], start[5:8])]
    length = lengths[1]
    is_so = start == _PART_TAG + _padded(lengths[0]) + _BUFFER_TAG + _padded(length)
    is_so = is_so and lengths[0] == length + len(_BUFFER_TAG) + _LENGTH_BYTES and _START + length <= len(data)
    return length if is_so else 0
