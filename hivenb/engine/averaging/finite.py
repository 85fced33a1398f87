"""Whether gradients are finite, and how long they are, for the price of one pass over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def are_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether no tensor holds nan or inf. Reads each once, and waits once for each device.

    :param tensors: of any shapes, types and devices; of sparse ones, the values that they hold count
    """
    given = [one.coalesce().values() if one.is_sparse else one for one in tensors if one is not None]
    devices = {one.device for one in given}
    if len(devices) > 1:
        return all(are_finite([one for one in given if one.device == device]) for device in devices)
    return not given or _are_finite(given)


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    # one kernel for many tensors on a GPU; a nan or inf anywhere is one in the sum
    norms = torch._foreach_norm(tensors)
    total = norms[0] if len(norms) == 1 else torch.stack([norm.float() for norm in norms]).sum()
    if math.isfinite(total.item()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)  # the squares of large numbers are not either


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all numbers of some gradients; not finite if one of them is not.

    :param tensors: dense, in main memory
    """
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    return math.hypot(*(norm.item() for norm in norms))


def where_not_finite(tensors: Iterable[torch.Tensor | None]) -> str:
    """In words: ``nan or inf in 2 of 8 gradients, the first of shape (64, 10)``."""
    given = [tensor for tensor in tensors if tensor is not None]
    return _in_words([are_finite([tensor]) for tensor in given], [tensor.shape for tensor in given])


def _in_words(finite: Sequence[bool], shapes: Sequence[torch.Size]) -> str:
    bad = [shape for is_finite, shape in zip(finite, shapes, strict=True) if not is_finite]
    first = f", the first of shape {tuple(bad[0])}" if bad else ""
    return f"nan or inf in {len(bad)} of {len(finite)} gradients{first}"


class LateVerdict:
    """Whether gradients are finite, as far as their device knows: nobody waits for it until somebody asks.

    :param tensors: of one type and one device, dense and real
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[torch.Tensor]):
        finite = torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()
        self._all = finite.all()
        self._shapes = [tensor.shape for tensor in tensors]
        self._known: torch.cuda.Event | None = None
        self._finite = finite
        if finite.is_cuda:
            self._finite = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
            self._finite.copy_(finite, non_blocking=True)
            self._known = torch.cuda.Event()
            self._known.record()

    @torch.no_grad()
    def silence(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the gradients to zero if not all of them are finite, without knowing that here.

        :param tensors: those of the verdict
        """
        # as integers, of which none stays what it is when multiplied by zero
        integers = _AS_INTEGERS[tensors[0].element_size()]
        torch._foreach_mul_([tensor.view(integers) for tensor in tensors], self._all.to(integers))

    def __bool__(self) -> bool:
        """Whether all are finite; waits for the device if it has not come so far."""
        self._wait()
        return bool(self._finite.all())

    def where(self) -> str:
        """As :func:`where_not_finite`."""
        self._wait()
        return _in_words(self._finite.tolist(), self._shapes)

    def _wait(self) -> None:
        if self._known is not None:
            self._known.synchronize()


#: Integers of as many bytes.
_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_be_judged_late(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there can be a :class:`LateVerdict` on gradients, and it saves a wait: they are on a GPU, and alike."""
    if not tensors:
        return False
    first = tensors[0]
    return first.is_cuda and all(
        one.device == first.device
        and one.dtype == first.dtype
        and one.is_floating_point()
        and not one.is_sparse
        and one.numel()
        for one in tensors
    )
