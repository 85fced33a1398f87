"""What a module does to its parameters itself, kept where something else changes copies of them meanwhile.

A target network follows another one by averaging, weights are clamped, embeddings are held to a norm, a mask prunes.
An optimizer in main memory steps copies, and a round in the background averages copies: written back as they are,
they would undo all that. What both have changed since they were the same, has the sum of both changes.

Changes are found by comparing values, once in an epoch: ``parameter.data`` and views of it are written to without
torch counting that. While nothing runs in the background, an offloaded optimizer's own copy is what the model had
last, and no memory is needed. Otherwise what was the same is kept in main memory, as many bytes as the parameters
have: in their own type for an offloaded optimizer, and in that of the averaging buffers, 4 bytes for each number,
without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch


@torch.no_grad()
def merged(now: torch.Tensor, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """A tensor that two have changed since they had the same: the value of who has, and both changes where both have.

    :param now: what the module has
    :param last: what both had, of the same type
    :param other: what the other one has, of that type or a wider one
    :returns: of the other one's type; ``None`` if the module has changed nothing
    """
    if torch.equal(now, last):
        return None
    here = (now != last) & ~(now.isnan() & last.isnan())
    there = other.to(last.dtype) != last
    own, before = now.to(other.dtype), last.to(other.dtype)
    return torch.where(here, torch.where(there, other + (own - before), own), other)


class ChangesOfModule:
    """Between the parameters of a model and the copies that an optimizer in main memory steps. For the training thread.

    At any time, what the module has changed is the difference of its parameters to what was the same last: that is
    what is remembered, or the copies themselves.
    """

    def __init__(self) -> None:
        self._last: list[torch.Tensor] | None = None
        self._is_remembered = False

    def forget(self) -> None:
        """Take for the same what the copies are, or will be, whatever the module has: it is to be written over."""
        self._is_remembered = False

    @torch.no_grad()
    def take_in(self, parameters: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], remember: bool) -> None:
        """Let the copies have what the module has changed. Nothing else may change them meanwhile.

        :param parameters: of the model
        :param copies: of them, in main memory
        :param remember: whether both may change before :meth:`hand_out`
        """
        if remember and self._last is None:
            self._last = [torch.empty_like(one.detach(), device="cpu") for one in parameters]
        for number, (parameter, copy) in enumerate(zip(parameters, copies, strict=True)):
            now = parameter.detach().cpu()
            last = self._last[number] if self._last is not None and self._is_remembered else copy.to(now.dtype)
            value = merged(now, last, copy)
            if value is not None:
                copy.copy_(value)
            if remember and self._last is not None:
                self._last[number].copy_(now)
        self._is_remembered = remember

    @torch.no_grad()
    def lead(
        self,
        values: Iterable[tuple[int, torch.Tensor]],
        parameters: Sequence[torch.Tensor],
        write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:
        """Let the model have other values than the copies until :meth:`hand_out`; they are no changes of its own.

        To be called right after :meth:`take_in`, which has remembered what is the same.

        :param values: numbers of parameters, and what the model is to have of them
        :param parameters: of the model
        :param write: copies sources, which lie in main memory for long, to targets
        :raises Exception: what making the values raises; the model then has what it had
        """
        last = self._last or []
        led: list[int] = []
        try:
            for number, value in values:
                led.append(number)
                last[number].copy_(value)
        except BaseException:
            for number in led:
                last[number].copy_(parameters[number])
            raise
        write([last[number] for number in led], [parameters[number] for number in led])

    @torch.no_grad()
    def hand_out(
        self,
        copies: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:
        """Let the model have the copies, and keep what the module has changed since they were the same.

        :param copies: which a round may be averaging
        :param parameters: of the model
        :param write: copies sources, which lie in main memory for long, to targets
        :raises Exception: what writing to the model does; it gets all of the copies the next time
        """
        if self._last is None or not self._is_remembered:
            write(copies, parameters)
            return
        try:
            self._hand_out(copies, parameters, self._last, write)
        except BaseException:
            self.forget()  # nobody knows what was written, and values of before would be taken for the module's own
            raise

    def _hand_out(
        self,
        copies: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        remembered: Sequence[torch.Tensor],
        write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:
        unchanged = []
        for number, (parameter, copy, last) in enumerate(zip(parameters, copies, remembered, strict=True)):
            value = None
            now = parameter.detach().cpu()
            if not torch.equal(now, last):
                new = copy.to(last.dtype, copy=True)
                value = merged(now, last, new)
                last.copy_(new)
            else:
                last.copy_(copy)
            if value is None:
                unchanged.append(number)
            else:
                parameter.copy_(value)
        write([remembered[number] for number in unchanged], [parameters[number] for number in unchanged])

    @torch.no_grad()
    def handed_out(self, copies: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the model would have after :meth:`hand_out`; it stays as it is. May share memory with the copies."""
        if self._last is None or not self._is_remembered:
            return list(copies)
        values = []
        for parameter, copy, last in zip(parameters, copies, self._last, strict=True):
            value = copy.to(last.dtype)
            with_changes = merged(parameter.detach().cpu(), last, value)
            values.append(value if with_changes is None else with_changes)
        return values


class ChangesMeanwhile:
    """What of a model's tensors was given to a round in the background, which returns averages of it later."""

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self._is_under_way = False

    def forget(self) -> None:
        """What comes back next is to be taken as it is."""
        self._is_under_way = False

    @torch.no_grad()
    def give(self, buffers: Sequence[torch.Tensor]) -> None:
        """Remember what is about to be averaged in place."""
        if [one.shape for one in self._given] != [one.shape for one in buffers]:
            self._given = [torch.empty_like(one) for one in buffers]
        for given, buffer in zip(self._given, buffers, strict=True):
            given.copy_(buffer)
        self._is_under_way = True

    @torch.no_grad()
    def take_back(self, averages: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Write averages where the model has changed a tensor meanwhile, with both changes.

        :param averages: of what was given
        :param tensors: of the model
        :returns: numbers of those that it has written; the others are to be written as they are
        """
        written: list[int] = []
        if self._is_under_way:
            self._is_under_way = False
            for number, (average, tensor, given) in enumerate(zip(averages, tensors, self._given, strict=True)):
                value = merged(tensor.detach().cpu().to(given.dtype), given, average)
                if value is not None:
                    tensor.copy_(value)
                    written.append(number)
        return written
