"""Parameters of a torch optimizer that are not trained, and so no business of the swarm's.

Whatever has ``requires_grad=False`` when training begins is neither averaged, nor copied, nor sent, and has no buffers
for gradients: a base of bytes under adapters, or one that is simply large. A torch optimizer leaves it as it is, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class UntrainedParameters:
    """Those that were taken out of the groups of an optimizer.

    :param groups: all parameters of each group, in their order
    :param trained: of each of them, whether it is trained
    """

    groups: tuple[tuple[torch.Tensor, ...], ...]
    trained: tuple[tuple[bool, ...], ...]

    @classmethod
    def among(cls, groups: Iterable[Mapping[str, Any]]) -> UntrainedParameters:
        """Those of some groups, as they are now."""
        parameters = tuple(tuple(group["params"]) for group in groups)
        return cls(parameters, tuple(tuple(one.requires_grad for one in group) for group in parameters))

    def without(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of those groups that have only what is trained."""
        return [
            {**group, "params": _chosen(own, trained)}
            for group, own, trained in zip(groups, self.groups, self.trained, strict=True)
        ]

    def take_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer have only what is trained."""
        for group, own, trained in zip(optimizer.param_groups, self.groups, self.trained, strict=True):
            group["params"] = _chosen(own, trained)

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it have all of them again, with those that are trained as it has them by now."""
        for group, own, trained in zip(optimizer.param_groups, self.groups, self.trained, strict=True):
            present = iter(group["params"])
            group["params"] = [
                next(present) if is_trained else one for one, is_trained in zip(own, trained, strict=True)
            ]

    @property
    def are_none(self) -> bool:
        """Whether all are trained."""
        return all(all(group) for group in self.trained)

    def unfrozen(self) -> list[torch.Tensor]:
        """Those that were not trained when training began, and are to be by now."""
        return [
            one
            for own, trained in zip(self.groups, self.trained, strict=True)
            for one, was_trained in zip(own, trained, strict=True)
            if not was_trained and one.requires_grad
        ]

    def in_full(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the torch optimizer as if it had all of them, as plain torch writes and reads it."""
        if [len(group["params"]) for group in state_dict["param_groups"]] == [len(own) for own in self.groups]:
            return dict(state_dict)  # it has: none is frozen, or they were put back when training was over
        numbers: dict[int, int] = {}
        groups, count = [], 0
        for group, trained in zip(state_dict["param_groups"], self.trained, strict=True):
            own = iter(group["params"])
            for offset, is_trained in enumerate(trained):
                if is_trained:
                    numbers[next(own)] = count + offset
            groups.append({**group, "params": list(range(count, count + len(trained)))})
            count += len(trained)
        state = {numbers[number]: one for number, one in state_dict["state"].items()}
        return {**state_dict, "state": state, "param_groups": groups}

    def of_trained(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """What of a state that :meth:`in_full`, or plain torch, gave is of those that are trained."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(own) for own in self.groups]:
            return dict(state_dict)  # of another one, as torch will say; or of one that had only these
        kept = [
            {**group, "params": _chosen(group["params"], trained)}
            for group, trained in zip(groups, self.trained, strict=True)
        ]
        numbers = {number for group in kept for number in group["params"]}
        state = {number: one for number, one in state_dict["state"].items() if number in numbers}
        return {**state_dict, "state": state, "param_groups": kept}


def _chosen(some: Sequence[Any], are_chosen: Sequence[bool]) -> list[Any]:
    return [one for one, is_chosen in zip(some, are_chosen, strict=True) if is_chosen]
