"""Attacks through what goes into the averages of a group, and through the averages that a member gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hivemind
import torch
from attacks.case import Attack, Outcome
from attacks.training_peers import Attacked, attack
from hivemind.compression import serialize_torch_tensor
from hivemind.proto import averaging_pb2

from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.exchange.reducer import FaultTolerantReducer
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.trust.aggregation import CenteredClipping, CheckedParts, NormBound, SenderWeights

#: Of a model that has learned what there is to learn in the epochs of an attempt. It begins with one above 5.
LEARNED = 1.0


def take_checks_away() -> None:
    """Let parts and averages of any numbers in, and steps be made with them."""
    FaultTolerantReducer._checked = lambda self, part_index, part, weight: (weight, 0.0)
    CheckedParts.check_part = lambda self, peer_index, part_index, part: None
    Optimizer._load_averaged_gradients_into_optimizer_ = hivemind.Optimizer._load_averaged_gradients_into_optimizer_


def send(averager: type, change: Callable[[torch.Tensor], Any]) -> None:
    """In the attacker's process: change each tensor that goes into a round."""
    take_checks_away()  # its own must not stop it
    original = averager._run_allreduce_inplace_

    async def run(self: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        for tensor in tensors:
            change(tensor)
        await original(self, tensors, *args, **kwargs)

    averager._run_allreduce_inplace_ = run


def send_number(averager: type, number: float) -> dict[str, Any]:
    send(averager, lambda tensor: tensor.fill_(number))
    return {"client_mode": True}  # it averages nothing for the others


def give_back(number: float) -> dict[str, Any]:
    """In the attacker's process: answer with such numbers for averages, and be asked for as many as can be."""
    original = FaultTolerantRunner._accumulate_parts_streaming

    async def answer(self: Any, stream: Any, sender_index: int) -> Any:
        async for message in original(self, stream, sender_index):
            garbage = serialize_torch_tensor(torch.full(tuple(message.tensor_part.size), number))
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=garbage)

    FaultTolerantRunner._accumulate_parts_streaming = answer
    return {"averager_opts": {"bandwidth": 1e9}}


def outcome(attacked: Attacked) -> Outcome:
    """They have learned together, and have accused nobody else."""
    count = len(attacked.victims)
    held = attacked.worst_loss < LEARNED and attacked.together == count and not attacked.innocent
    words = [f"loss {attacked.worst_loss:.3g}", f"named by {attacked.named} of {count}" if attacked.named else ""]
    words.append("" if attacked.together == count else f"only {attacked.together} of {count} have averaged")
    words.append(f"{attacked.innocent} others named" if attacked.innocent else "")
    return Outcome(held, ", ".join(filter(None, words)))


def attempt(become_attacker: Callable[[], dict[str, Any]], **kwargs: Any) -> Outcome:
    return outcome(attack(become_attacker, **kwargs))


def let_weights_in() -> None:
    """Let each sender count for as much as it says."""
    SenderWeights.largest = lambda self, senders, own_id: [math.inf] * len(senders)


def take_bounds_away() -> None:
    """Let all finite numbers count, whatever is usual."""
    NormBound.check = lambda self, peer_index, norm, noise=1.0: None


def average_as_ever() -> None:
    """Have the mean where centered clipping is asked for."""
    CenteredClipping.div_ = lambda self, total: (
        sum(weight * part for weight, part in zip(self._weights, self._parts, strict=True)) / total
    )


def send_scaled(factor: float) -> dict[str, Any]:
    send(GradientAverager, lambda tensor: tensor.mul_(factor))
    return {"client_mode": True}


def claim_samples(claimed: float) -> dict[str, Any]:
    """In the attacker's process: send a gradient that leads away from what is learned, for so many samples."""
    original = GradientAverager._run_allreduce_inplace_

    async def run(self: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        for tensor in tensors:
            tensor.neg_()
        await original(self, tensors, *args, **{**kwargs, "weight": claimed})

    GradientAverager._run_allreduce_inplace_ = run
    return {"client_mode": True}


ATTACKS = [
    Attack(
        "claimed-samples",
        "sends gradients of the wrong sign, and says that they are of 10^9 samples",
        disarm=let_weights_in,
        # they learn slowly: it counts for two of five, and against the others
        attempt=partial(attempt, partial(claim_samples, 1e9), epochs=24),
    ),
    Attack(
        "scaled-gradients",
        "sends gradients a million times as large as they are",
        disarm=take_bounds_away,
        attempt=partial(attempt, partial(send_scaled, 1e6)),
    ),
    Attack(
        "turned-gradients",
        "sends gradients of the wrong sign, five times as large, where centered clipping is chosen",
        disarm=average_as_ever,
        attempt=partial(
            attempt,
            partial(send_scaled, -5.0),
            averager_opts={"robust_aggregation": "centered_clipping"},
        ),
    ),
    *(
        Attack(
            f"{name}-gradients",
            f"sends gradients of {number} to be averaged",
            disarm=take_checks_away,
            attempt=partial(attempt, partial(send_number, GradientAverager, number)),
        )
        for name, number in {"nan": math.nan, "infinite": math.inf, "huge": 1e30}.items()
    ),
    Attack(
        "nan-parameters",
        "sends parameters of nan to be averaged",
        disarm=take_checks_away,
        attempt=partial(attempt, partial(send_number, TrainingStateAverager, math.nan)),
    ),
    *(
        Attack(
            f"{name}-averages",
            f"averages for the others, and gives back {number}",
            disarm=take_checks_away,
            attempt=partial(attempt, partial(give_back, number)),
        )
        for name, number in {"nan": math.nan, "huge": 1e30}.items()
    ),
]
