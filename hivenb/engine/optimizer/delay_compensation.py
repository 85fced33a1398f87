"""Compensation for gradients that are averaged in the background: training goes on from a step with a peer's own.

With ``delay_grad_averaging``, the gradients of an epoch travel while those of the next one are computed, at parameters
that are about to move: that costs accuracy. Here, each peer makes a *speculative step* meanwhile, with its own
gradients of the epoch, from the same parameters and moments, and computes the next gradients there. When the average
has arrived, the optimizer makes its step from where it was, and the model gets what that gives: the other one is gone.
A peer that is alone waits for its step, and trains as without any delay.

Gradients of few samples are longer than the average, the longer the fewer. The own ones of a speculative step have at
most :data:`LONGEST` times the length of the last average: where many peers share an epoch, SGD would else go farther
and farther away. Squared errors of a linear regression in 64 dimensions, 60 epochs of 128 samples, SGD with 0.3:

=================  =======  ======  =======  ===========
peers by samples   in step  late    bounded  not bounded
=================  =======  ======  =======  ===========
4 by 32            0.0103   0.0108  0.0105   0.0105
8 by 16            0.0103   0.0108  0.0106   0.0109
16 by 8            0.0103   0.0108  0.0108   0.117
32 by 4            0.0103   0.0108  0.0110   3e13
=================  =======  ======  =======  ===========

The optimizer is offloaded then: it works on copies of the parameters in main memory, and those are the truth. They,
moments and schedules know nothing of the speculative step, which changes the model's parameters alone. So averages,
downloads and snapshots have what they would without it. Checkpoints, validation and pauses wait for the step itself.

What a step would be is computed without writing to anything that the optimizer has. For torch's Adam, AdamW and SGD,
by a formula, parameter by parameter, in about the time of the step itself. For all others, by the code of the optimizer
itself, with copies of a few parameters and their state at a time: an object of its class with a state and groups of its
own, which is given up afterwards. That holds for any torch optimizer whose state is where torch has it and that steps
each parameter by itself, gives bit for bit what the step would be, and takes two to four times as long. Where it is
seen that state or parameters are elsewhere as well, nothing is compensated: :func:`why_not_beside`. No hook is called,
but for the clipping of gradients, and what an optimizer's own code calls by the step of its base class.

Ways that were tried (``tests/benchmarks/delay_compensation.py``; digits, each gradient a whole epoch late, two seeds,
2 peers; 33 million numbers on 2 busy cores; bytes for each number, beside what the optimizer and the gradients have):

=============================  ========  =================  =====
a step is made                 accuracy  held for a moment  ms
=============================  ========  =================  =====
not at all: late               0.816     0                  0
on a deep copy                 0.981     12.5               245
on copies of a few at a time   0.981     2.2                207
by a formula                   0.981     0.5                75
by the last step's sizes       0.801     4, kept for good   20
without any delay              0.983     -                  75
=============================  ========  =================  =====

Memory: 4 bytes for each parameter in main memory, first for the own gradients, which the round writes over where they
are sent from, then for the parameters that the step is made from, to which they return if it fails half-way; and, for a
moment, what the largest parameter and its state have, or :data:`AT_A_TIME` numbers. None on the model's device.

Buffers of the module, such as BatchNorm's statistics, are what they are at the parameters with which batches were
computed, the speculative ones included.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from hivemind.utils import get_logger

from hivenb.engine.averaging.finite import norm_of
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)

# -- the step of an optimizer, made beside it -------------------------------------------------------------------------


#: Numbers of parameters that are stepped at a time: few calls for many small ones, little memory for large ones.
AT_A_TIME = 2**22

_Piece = list[tuple[int, torch.Tensor, torch.Tensor]]


#: How deep tensors are looked for in what an optimizer has in its attributes.
_DEPTH = 5

#: Attributes that are no state of an optimizer's own: what a step beside it gets copies of, what torch puts there, and
#: bitsandbytes' tables of what a byte of a state means, which are alike for all parameters.
_KNOWN = frozenset({"state", "param_groups", "defaults", "name2qmap"})
_HOOKS = "_optimizer_"

_NOT_LOOKED_INTO = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


def why_not_beside(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no step can be made beside an optimizer, in words; ``None`` if one can.

    What is made to step beside it shares its attributes, and knows a few parameters at a time: whatever remembers
    something for each parameter by its place, or reaches parameters another way, would work on what is not its own.
    """
    for kind in type(optimizer).__mro__:
        if "__del__" in vars(kind):
            return f"{kind.__name__} frees something when it is deleted (__del__), which a copy would share"
    keys: Iterable[Any] = optimizer.state
    for key in keys:
        if not torch.is_tensor(key):
            return f"its state has something of no parameter's own ({str(key)[:40]!r})"
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in _KNOWN or name.startswith(_HOOKS):
            continue
        for one in _within(value, _DEPTH, set()):
            if isinstance(one, torch.optim.Optimizer):
                return f"it has another optimizer in its attribute {name}"
            if id(one) in parameters:
                return f"it has parameters in its attribute {name}"
            if isinstance(one, torch.Generator):
                return f"it has a generator of random numbers in its attribute {name}"
            if torch.is_tensor(one) and (one.dim() or one.requires_grad):
                return f"it has tensors in its attribute {name}, not in its state"
    return None


def _within(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Something, and what it holds."""
    if id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
        return
    seen.add(id(value))
    yield value
    if not depth or isinstance(value, (torch.Tensor, torch.optim.Optimizer, str, bytes)):
        return
    if isinstance(value, Mapping):
        held: Iterable[Any] = chain(value.keys(), value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held = value
    else:
        held = getattr(value, "__dict__", {}).values()
    for one in list(held):
        yield from _within(one, depth - 1, seen)


def step_beside(
    optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None], at_a_time: int = AT_A_TIME
) -> Iterator[tuple[int, torch.Tensor]]:
    """What a step would make of an optimizer's parameters; they, its state and its settings stay as they are.

    Each parameter is taken to be stepped by itself, as all of torch's optimizers do it: one that couples them, as by a
    norm over all, makes another step beside itself than it makes itself.

    :param gradients: one for each parameter, in the order of the groups; ``None`` for one that has none
    :param at_a_time: numbers of parameters that are copied at a time
    :returns: for each parameter with a gradient, its number and its value after the step
    :raises RuntimeError: if the optimizer's code has written to its parameters all the same
    """
    given = iter(enumerate(gradients))
    before = _writes(optimizer)
    for group in optimizer.param_groups:
        formula = _formula_of(optimizer, group)
        piece: _Piece = []
        size = 0
        for parameter in group["params"]:
            number, gradient = next(given)
            if gradient is None:
                continue
            if formula is not None and optimizer.state.get(parameter) and not parameter.is_complex():
                try:
                    value = formula(parameter.detach(), gradient, optimizer.state[parameter], group)
                except (ArithmeticError, LookupError, TypeError, ValueError):
                    formula = None  # this version of torch has other settings: the optimizer's own code knows them
                else:
                    yield number, value
                    continue
            if piece and size + parameter.numel() > at_a_time:
                yield from _piece_beside(optimizer, group, piece)
                piece, size = [], 0
            piece.append((number, parameter, gradient))
            size += parameter.numel()
        if piece:
            yield from _piece_beside(optimizer, group, piece)
    if _writes(optimizer) != before:
        raise RuntimeError(f"a step of {type(optimizer).__name__} beside it has written to its own parameters")


def _writes(optimizer: torch.optim.Optimizer) -> list[int]:
    """How often each of its parameters was written to, as torch counts it."""
    return [parameter._version for group in optimizer.param_groups for parameter in group["params"]]


def _formula_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any], Mapping[str, Any]], torch.Tensor] | None:
    """What gives a parameter after a step in the time of a step; ``None`` for the optimizer's own code."""
    numbers = (group.get("lr"), *group.get("betas", ()))
    unusual = ("amsgrad", "capturable", "differentiable", "maximize")
    if any(group.get(name) for name in unusual) or any(torch.is_tensor(one) for one in numbers):
        return None
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        # before torch 2.7 no group says so, but the class
        is_decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return partial(_by_adam, is_decoupled=is_decoupled)
    return _by_sgd if type(optimizer) is torch.optim.SGD else None


def _by_adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    is_decoupled: bool,
) -> torch.Tensor:
    (first, second), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    count = float(state["step"]) + 1
    if decay and not is_decoupled:
        gradient = gradient.add(parameter, alpha=decay)
    below = torch.mul(state["exp_avg_sq"], second).addcmul_(gradient, gradient, value=1 - second)
    below.sqrt_().div_(math.sqrt(1 - second**count)).add_(group["eps"])
    mean = torch.lerp(state["exp_avg"], gradient, 1 - first)
    stepped = parameter.mul(1 - rate * decay) if is_decoupled else parameter.clone()
    return stepped.addcdiv_(mean, below, value=-rate / (1 - first**count))


def _by_sgd(
    parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> torch.Tensor:
    momentum, before = group["momentum"], state.get("momentum_buffer")
    if group["weight_decay"]:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    if momentum:
        mean = gradient  # as torch has it, where there is no mean of before
        if before is not None:
            mean = torch.mul(before, momentum).add_(gradient, alpha=1 - group["dampening"])
        gradient = gradient.add(mean, alpha=momentum) if group["nesterov"] else mean
    return parameter.add(gradient, alpha=-group["lr"])


def _piece_beside(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], piece: _Piece
) -> Iterator[tuple[int, torch.Tensor]]:
    copies, state = [], {}
    for _, parameter, gradient in piece:
        made = parameter.detach().clone().requires_grad_(parameter.requires_grad)
        made.grad = gradient
        copies.append(made)
        if parameter in optimizer.state:
            state[made] = _copied(optimizer.state[parameter])
    beside = _like(optimizer, [{**_copied(_settings(group)), "params": copies}], state)
    with torch.random.fork_rng(devices=[]):  # what the step itself draws is what it would have drawn
        _step_without_hooks(type(beside))(beside)
    for (number, _, _), made in zip(piece, copies, strict=True):
        yield number, made.detach()


def _step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class without what torch puts around it, which calls hooks, those of all optimizers as well."""
    step: Callable[..., Any] = kind.step
    # https://github.com/pytorch/pytorch/blob/main/torch/optim/optimizer.py: Optimizer._patch_step_function
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _like(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, Any]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes with other groups and state, and no hooks.

    What it counts in its attributes, it counts in copies of them.
    """
    # copy.copy would go by way of __setstate__, in which some of torch's classes change the state that is shared
    made = object.__new__(type(optimizer))
    own = dict(vars(optimizer))
    for name in ("step", "state", "param_groups"):  # the first by a scheduler, which counts the optimizer's steps
        own.pop(name, None)
    vars(made).update({name: value if name.startswith(_HOOKS) else _own(value) for name, value in own.items()})
    made.param_groups, made.state = groups, defaultdict(dict, state)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _own(value: Any) -> Any:
    """A copy of what can be written to, in containers; other objects stay the same."""
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({name: _own(one) for name, one in value.items()})
        return made
    if isinstance(value, list):
        return [_own(one) for one in value]
    return copy.copy(value) if isinstance(value, (set, deque)) else value


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return copy.deepcopy(value)


# -- delay compensation -----------------------------------------------------------------------------------------------


#: How long the gradients of a speculative step may be, as a multiple of the last average.
LONGEST = 2.0


class DelayCompensation:
    """The speculative steps of a peer whose gradients are averaged in the background. For the training thread."""

    def __init__(self) -> None:
        #: clips the gradients of an optimizer's parameters, as is done before each step of the one that is trained with
        self.clip: Callable[[torch.optim.Optimizer], None] | None = None
        # at first the own gradients, then the parameters that the step is made from
        self._kept: list[torch.Tensor] = []
        self._has_gradient: Sequence[bool] | None = None
        self._length_of_average: float | None = None
        self._is_told = False
        self._is_given_up = False

    def begin(self) -> None:
        """A round is about to begin, for which there may be own gradients or not."""
        self._has_gradient = None

    def note_gradients(self, means: Sequence[torch.Tensor], has_gradient: Sequence[bool]) -> None:
        """Keep the own gradients of an epoch, which a round is about to write over; or say why they cannot be kept.

        An error here would be one of the round, which hivemind then holds without this peer.

        :param means: over this peer's samples, one for each parameter, in main memory
        :param has_gradient: by parameter, whether a batch has used it
        """
        try:
            if [one.shape for one in self._kept] != [one.shape for one in means]:
                self._kept = [torch.empty_like(one) for one in means]
            for kept, mean in zip(self._kept, means, strict=True):
                kept.copy_(mean)
        except Exception as e:  # such as one of the allocator
            self._kept = []
            self._tell(f"this peer's own gradients cannot be kept: {e!r}")
            return
        self._has_gradient = tuple(has_gradient)

    def note_average(self, length: float) -> None:
        """The gradients of an epoch have been averaged with others. From any thread.

        :param length: their norm, of all of them together
        """
        self._length_of_average = length

    def forget(self) -> None:
        """Give the memory back."""
        self._kept, self._has_gradient = [], None

    def speculate(self, averager: TrainingStateAverager) -> None:
        """Let the model be ahead by a step with the own gradients, if there are any, until the step itself is made.

        :param averager: of the state, with an offloaded optimizer of which nothing is under way in the background
        """
        has_gradient, self._has_gradient = self._has_gradient, None
        if has_gradient is None or not any(has_gradient) or self._is_given_up:
            return
        impossible = f"with {type(averager.optimizer).__name__}, no speculative step can be made, as"
        if reason := why_not_beside(averager.optimizer):
            self._tell(f"{impossible} {reason}")
            return
        gradients = [kept if one else None for kept, one in zip(self._kept, has_gradient, strict=True)]
        self._shorten([one for one in gradients if one is not None])
        try:
            averager.lead_model(lambda optimizer: self._steps(optimizer, gradients), self._kept)
        except ProcessEndedError:
            return  # which is told of where a step or a round meets it, and is no fault of the optimizer's
        except Exception as e:  # in the user's optimizer, whose own step may do all the same
            self._is_given_up = True  # it may have left something behind, and would so in each epoch
            self._tell(f"{impossible} a step of it with copies of its parameters fails: {e!r}")

    def _shorten(self, gradients: list[torch.Tensor]) -> None:
        """Let own gradients be no longer than they may be."""
        if self._length_of_average is None:
            return
        length, longest = norm_of(gradients), LONGEST * self._length_of_average
        if longest < length < math.inf:
            torch._foreach_mul_(gradients, longest / length)

    def _steps(
        self, optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None]
    ) -> Iterable[tuple[int, torch.Tensor]]:
        if self.clip is not None:
            clipped = _with_gradients(optimizer, gradients)
            self.clip(clipped)  # in place, or by giving the parameters other gradients
            gradients = [parameter.grad for group in clipped.param_groups for parameter in group["params"]]
        return step_beside(optimizer, gradients)

    def _tell(self, reason: str) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(f"Gradients are averaged in the background, and nothing makes up for their delay: {reason}")


def _with_gradients(
    optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None]
) -> torch.optim.Optimizer:
    """An optimizer as clipping knows it: of the same class and groups, with other gradients of the same parameters."""
    given, groups = iter(gradients), []
    for group in optimizer.param_groups:
        views = []
        for parameter in group["params"]:
            view = parameter.detach().requires_grad_(parameter.requires_grad)
            view.grad = next(given)
            views.append(view)
        groups.append({**_settings(group), "params": views})
    return _like(optimizer, groups, {})
