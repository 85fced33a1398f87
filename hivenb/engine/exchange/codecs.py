"""hivemind's lossy codecs, corrected where they fail today; the format on the wire stays hivemind's.

Averagers encode with the codec they were given, but decode, and encode their replies, with the object that
``hivemind/compression/serialization.py`` keeps for the message's type. So a correction needs both: a subclass
to hand to the averager (`corrected` finds it for any codec object), and its entry in that table (`install`, which
each averager runs in its own process: that of a kernel or a script is others' as well).

Each override names the line of hivemind 1.1.12 it works around; ``tests/engine/test_corrected_codecs.py`` says when
upstream no longer needs it.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.compression import adaptive as upstream_adaptive
from hivemind.compression import floating as upstream_floating
from hivemind.compression import quantization as upstream_quantization
from hivemind.compression import serialization as upstream_serialization
from hivemind.proto import runtime_pb2

from hivenb.engine.trust.tensors import check_message
from hivenb.errors import MissingDependencyError

_PLAIN = NoCompression()
_NON_FINITE = (-math.inf, math.inf, math.nan)


class _PlainWhenBetter(CompressionBase):
    """Sends a tensor uncompressed where the codec cannot take it, or would not make it smaller.

    ``floating.py:16,52`` and ``quantization.py:30`` raise for integers (the former for bfloat16 too), and
    ``floating.py:59`` for a single number: with such a codec for its state, no peer could ever load an
    optimizer that counts its steps. Every peer decodes by the type in the message, plain hivemind too, so
    mixing is safe.
    """

    #: whether it takes only a tensor whose numbers lie one after the other
    _takes_contiguous = False

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> Any:
        if self._takes_contiguous:
            tensor = tensor.contiguous()
        if tensor.is_floating_point() and self._accepts(tensor):
            return super().compress(tensor, info, allow_inplace=allow_inplace)
        return _PLAIN.compress(tensor, info, allow_inplace=allow_inplace)

    def _accepts(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 1 and tensor.dtype != torch.bfloat16

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        check_message(serialized_tensor)
        return self._decode(serialized_tensor)

    def _decode(self, serialized_tensor: Any) -> torch.Tensor:
        """The tensor of a message that holds what it says."""
        return super().extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        if not info.descriptor.dtype.is_floating_point:
            return 1.0
        return super().estimate_compression_ratio(info)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _CheckedPlain(NoCompression):
    """Without compression, and of nothing but what a message carries."""

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        check_message(serialized_tensor)
        if isinstance(serialized_tensor.buffer, memoryview) and serialized_tensor.dtype != "bfloat16":
            # nobody changes what has arrived; hivemind makes a copy of it
            numbers = np.frombuffer(serialized_tensor.buffer, dtype=np.dtype(serialized_tensor.dtype))
            return torch.as_tensor(numbers).reshape(tuple(serialized_tensor.size))
        return super().extract(serialized_tensor)


class Float16Compression(_PlainWhenBetter, upstream_floating.Float16Compression):
    """Half precision: 2 bytes per parameter; values beyond +-65504 are clipped."""

    def _decode(self, serialized_tensor: Any) -> torch.Tensor:
        # floating.py:35 lets numpy convert the numbers, which takes it twelve times as long as torch
        halves = torch.as_tensor(np.frombuffer(serialized_tensor.buffer, dtype=np.float16))
        values = halves.to(getattr(torch, serialized_tensor.dtype)).reshape(tuple(serialized_tensor.size))
        return values.requires_grad_(serialized_tensor.requires_grad)


class ScaledFloat16Compression(_PlainWhenBetter, upstream_floating.ScaledFloat16Compression):
    """Half precision after each row was scaled to mean 0 and deviation 1."""

    def _accepts(self, tensor: torch.Tensor) -> bool:
        """Leave out what ``floating.py:59`` cannot measure: squares of 1e19 are infinite, the result NaN."""
        return super()._accepts(tensor) and bool(tensor.detach().abs().amax() < 1e18)


class _EightBits(_PlainWhenBetter, upstream_quantization.Quantization):
    """One byte per parameter, an index into a table of 256 values that travels with it.

    Subclasses say which bucket a value belongs to; what a bucket decodes to is the mean of the values in it.
    """

    def _accepts(self, tensor: torch.Tensor) -> bool:
        table_bytes = 8 + self.n_bins * np.dtype(self.codebook_dtype).itemsize
        return tensor.numel() + table_bytes < tensor.numel() * tensor.element_size() and _is_single(tensor)

    @abstractmethod
    def _buckets(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Give each of these finite float32 values (one dimension, at least one) a bucket below ``count``."""

    def quantize(self, tensor: torch.Tensor, allow_inplace: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Split a tensor into indices (its shape, uint8) and the table of 256 float32 values they point to.

        The tensor is never changed, whatever ``allow_inplace`` says: ``quantization.py:69`` subtracts the
        mean in place and then builds the table from what is left. Values that are not finite are kept as they
        are, in buckets of their own: upstream one NaN becomes a tensor of them.
        """
        values = tensor.detach().to(torch.float32).reshape(-1)
        finite = values.isfinite()
        if bool(finite.all()):
            indices = self._buckets(values, self.n_bins) if values.numel() else torch.zeros(0, dtype=torch.uint8)
            table = _bucket_means(values, indices, self.n_bins)
        else:
            regular = self.n_bins - len(_NON_FINITE)
            indices = torch.where(values > 0, regular + 1, torch.where(values < 0, regular, regular + 2))
            indices = indices.to(torch.uint8)
            if bool(finite.any()):
                indices[finite] = self._buckets(values[finite], regular)
            table = _bucket_means(values[finite], indices[finite], self.n_bins)
            table[regular:] = torch.tensor(_NON_FINITE)
        return indices.reshape(tensor.shape).numpy(), table.numpy()

    def _decode(self, serialized_tensor: Any) -> torch.Tensor:
        """Decode; ``quantization.py:41`` calls int() on an array of length 1, a TypeError since numpy 2.4."""
        buffer = memoryview(serialized_tensor.buffer)
        table_end = 8 + _count_at(buffer, 0) * np.dtype(self.codebook_dtype).itemsize
        table = np.frombuffer(buffer[8:table_end], dtype=self.codebook_dtype)
        indices = np.frombuffer(buffer[table_end:], dtype=self.indices_dtype)
        values = torch.from_numpy(table[indices].reshape(tuple(serialized_tensor.size)))
        return values.to(getattr(torch, serialized_tensor.dtype)).requires_grad_(serialized_tensor.requires_grad)


class Uniform8BitQuantization(_EightBits, upstream_quantization.Uniform8BitQuantization):
    """256 buckets of equal width over three standard deviations to each side of the mean."""

    def _buckets(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Assign by distance from the mean.

        ``quantization.py:70`` divides by ``numel() - 1`` and hands a width of 0 or NaN to a function which
        torch is about to remove; here a width too small for float32 means that all values share a bucket.
        """
        centered = values - values.mean(dtype=torch.float64).float()
        deviation = torch.linalg.vector_norm(centered, dtype=torch.float64).item() / math.sqrt(max(len(values) - 1, 1))
        width = self.RANGE_IN_SIGMAS * deviation / self.n_bins
        if width < torch.finfo(torch.float32).tiny:
            return torch.full(values.shape, count // 2, dtype=torch.uint8)
        return centered.div_(width).round_().add_(count // 2).clamp_(0, count - 1).to(torch.uint8)


class Quantile8BitQuantization(_EightBits, upstream_quantization.Quantile8BitQuantization):
    """256 buckets with about as many values in each."""

    def _buckets(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Assign by rank.

        ``quantization.py:118`` uses a pool of threads that was made on import: a process forked after its
        first use waits for threads which it does not have. A sort needs no threads, and gives exact
        quantiles.
        """
        starts = np.arange(1, count) * len(values) // count
        borders = torch.from_numpy(np.sort(values.numpy())[starts])
        return torch.bucketize(values, borders, out_int32=True, right=True).to(torch.uint8)


class BlockwiseQuantization(_PlainWhenBetter, upstream_quantization.BlockwiseQuantization):
    """One byte per parameter, scaled in blocks of 4096, by the package bitsandbytes."""

    _takes_contiguous = True

    def _accepts(self, tensor: torch.Tensor) -> bool:
        blocks = -(-tensor.numel() // upstream_quantization._BLOCKWISE_QUANTIZATION_BLOCKSIZE)
        smaller = tensor.numel() + 16 + 4 * (self.n_bins + blocks) < tensor.numel() * tensor.element_size()
        return smaller and bool(tensor.detach().isfinite().all()) and _is_single(tensor)

    def _decode(self, serialized_tensor: Any) -> torch.Tensor:
        """Decode; ``quantization.py:185`` has the same int() of an array as the other two.

        :raises DamagedTensorError: if it is not what it says
        :raises MissingDependencyError: if bitsandbytes is not installed
        """
        # after the check: a message of others is not to have that imported, which takes seconds
        try:
            from bitsandbytes.functional import dequantize_blockwise
        except ImportError as error:
            raise MissingDependencyError(
                "a peer sends with blockwise8bit, which this one can only read with the package bitsandbytes: "
                "run `pip install bitsandbytes`"
            ) from error

        buffer = memoryview(serialized_tensor.buffer)
        scales_end = 16 + 4 * _count_at(buffer, 0)
        table_end = scales_end + 4 * _count_at(buffer, 8)
        scales, table, indices = (
            torch.from_numpy(np.array(np.frombuffer(part, dtype=dtype)))
            for part, dtype in (
                (buffer[16:scales_end], self.codebook_dtype),
                (buffer[scales_end:table_end], self.codebook_dtype),
                (buffer[table_end:], self.indices_dtype),
            )
        )
        blocksize = upstream_quantization._BLOCKWISE_QUANTIZATION_BLOCKSIZE
        values = dequantize_blockwise(
            indices.reshape(tuple(serialized_tensor.size)),
            absmax=scales,
            code=table,
            blocksize=blocksize,
            nested=False,
        )
        return values.to(getattr(torch, serialized_tensor.dtype)).requires_grad_(serialized_tensor.requires_grad)


def _is_single(tensor: torch.Tensor) -> bool:
    """Whether all its finite numbers are within the range of single precision, in which tables are."""
    if tensor.dtype != torch.float64:
        return True
    size = tensor.detach().abs()
    return not bool((size.isfinite() & (size > torch.finfo(torch.float32).max)).any())


def _count_at(buffer: memoryview, offset: int) -> int:
    return int(np.frombuffer(buffer, dtype=np.int64, offset=offset, count=1)[0])


def _bucket_means(values: torch.Tensor, indices: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of the values in each bucket, 0 for an empty one.

    ``quantization.py:90`` adds up in float32: 500,000 times 0.1 decodes as 0.0996. Here the sums are doubles.
    """
    sums = np.bincount(indices.numpy(), weights=values.numpy(), minlength=count)
    counts = np.bincount(indices.numpy(), minlength=count)
    return torch.from_numpy((sums / np.maximum(counts, 1)).astype(np.float32))


class _Adaptive(upstream_adaptive.AdaptiveCompressionBase):
    """Decodes by the corrected codecs: ``adaptive.py:22`` asks hivemind's table, corrected in our processes alone."""

    def extract(self, serialized_tensor: Any) -> torch.Tensor:
        return _DECODERS[serialized_tensor.compression].extract(serialized_tensor)


class SizeAdaptiveCompression(_Adaptive, upstream_adaptive.SizeAdaptiveCompression):
    """One codec for large tensors, another one for small ones."""


class RoleAdaptiveCompression(_Adaptive, upstream_adaptive.RoleAdaptiveCompression):
    """A codec for each role of a tensor."""


class PerTensorCompression(_Adaptive, upstream_adaptive.PerTensorCompression):
    """A codec for each tensor."""


_CORRECTED: dict[type, type[CompressionBase]] = {
    upstream_floating.Float16Compression: Float16Compression,
    upstream_floating.ScaledFloat16Compression: ScaledFloat16Compression,
    upstream_quantization.Uniform8BitQuantization: Uniform8BitQuantization,
    upstream_quantization.Quantile8BitQuantization: Quantile8BitQuantization,
    upstream_quantization.BlockwiseQuantization: BlockwiseQuantization,
}

_ADAPTIVE: dict[type, type[_Adaptive]] = {
    upstream_adaptive.SizeAdaptiveCompression: SizeAdaptiveCompression,
    upstream_adaptive.RoleAdaptiveCompression: RoleAdaptiveCompression,
    upstream_adaptive.PerTensorCompression: PerTensorCompression,
}

#: What decodes a message, by the kind that it names.
_DECODERS: dict[int, CompressionBase] = {
    **{codec_class.compression_type: codec_class() for codec_class in _CORRECTED.values()},
    _CheckedPlain.compression_type: _CheckedPlain(),
}


def codec_of(kind: int) -> CompressionBase:
    """What encodes an answer to a message with a codec of that kind."""
    return _DECODERS[kind]


def corrected(compression: CompressionBase) -> CompressionBase:
    """The same codec, with hivemind's own lossy codecs in it replaced by the corrected ones.

    :param compression: any codec; adaptive ones are searched through, unknown classes are kept
    :returns: a codec that sends what the given one would send; the given object is not changed
    """
    if type(compression) in _CORRECTED:
        replacement = _CORRECTED[type(compression)]()
        vars(replacement).update(vars(compression))
        return replacement
    if not isinstance(compression, upstream_adaptive.AdaptiveCompressionBase):
        return compression
    replacement = copy.copy(compression)
    replacement.__class__ = _ADAPTIVE.get(type(compression), type(compression))
    for name, value in vars(compression).items():
        if isinstance(value, CompressionBase):
            setattr(replacement, name, corrected(value))
        elif isinstance(value, Mapping):
            setattr(replacement, name, {key: _corrected_part(part) for key, part in value.items()})
        elif isinstance(value, (list, tuple)):
            setattr(replacement, name, tuple(_corrected_part(part) for part in value))
    return replacement


def _corrected_part(part: Any) -> Any:
    return corrected(part) if isinstance(part, CompressionBase) else part


def install() -> None:
    """Make this process, which has to be a child of ours alone, decode and reply with the corrected codecs.

    Works around ``serialization.py:13``, which keeps the decoders in a table by type. May be called any
    number of times.
    """
    for kind, decoder in _DECODERS.items():
        upstream_serialization._BASE_COMPRESSION_TYPES[runtime_pb2.CompressionType.Name(kind)] = decoder
