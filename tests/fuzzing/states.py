"""States that a newcomer downloads: what a peer sends for the optimizer's, and what witnesses tell of it."""

from __future__ import annotations

import contextlib
import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.optim.state_averager import dump_optimizer_state, load_optimizer_state
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from fuzzing.averager_without_process import EVIL, context, run
from fuzzing.records import NUMBERS, any_value
from fuzzing.target import Choices, Target
from hivenb.engine.averaging.module_rest import ModuleRest, RestEntry, digests_of
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.averaging.state_download import Question, Statement, make_statement, ranked_sources
from hivenb.engine.averaging.torch_optimizer_state import (
    group_settings,
    initialize_optimizer_state,
    restore_switches,
    state_mismatch,
)

SHAPES = ((2, 4), (2,), (), (4, 2), (0,), (1,))


def _optimizer(kind: type, **settings: Any) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2, 4)), torch.nn.Parameter(torch.ones(2))]
    made = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1, **settings)
    initialize_optimizer_state(made)
    return made


@cache
def optimizers() -> tuple[torch.optim.Optimizer, ...]:
    """As peers have them that have just come."""
    return _optimizer(torch.optim.AdamW), _optimizer(torch.optim.SGD, momentum=0.9), _optimizer(torch.optim.RMSprop)


def feed_optimizers(data: bytes) -> None:
    """What is taken for this optimizer's state can be loaded, and a step can be made with it."""
    choices = Choices(data)
    optimizer = copy.deepcopy(choices.of(optimizers()))
    values, statistics = dump_optimizer_state(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [tensor.detach().clone() for tensor in (*parameters, *statistics)]
    for _ in range(choices.number(4)):
        place = choices.number(len(values))
        values[place] = _changed(choices, values[place])
    if choices.now_and_then():
        tensors[choices.number(len(tensors))] = torch.zeros(choices.of(SHAPES))
    if choices.now_and_then():
        tensors = tensors[: choices.number(len(tensors))]
    metadata: Any = {"epoch": 3, "optimizer_metadata": values}
    if choices.now_and_then():
        metadata = any_value(choices) if choices.number(2) else {"optimizer_metadata": any_value(choices)}
    try:
        metadata = MSGPackSerializer.loads(MSGPackSerializer.dumps(metadata))
    except (ValueError, TypeError, OverflowError):
        return  # nobody could have sent it
    if state_mismatch(optimizer, (), metadata, tensors) is not None:
        return
    settings = group_settings(optimizer)
    load_optimizer_state(optimizer, metadata["optimizer_metadata"], tensors[len(parameters) :])
    restore_switches(optimizer, settings)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _changed(choices: Choices, entry: Any) -> Any:
    kind = choices.number(4)
    if kind == 0 or not isinstance(entry, dict) or "type" not in entry:
        return any_value(choices)
    if kind == 1:
        return {"type": choices.of(("tensor", "value", "")), "index": choices.of(NUMBERS), "value": any_value(choices)}
    return {**entry, "index" if entry["type"] == "tensor" else "value": choices.of((*NUMBERS, "x", None, b"", [], ()))}


def feed_witnesses(data: bytes) -> None:
    """What newcomers ask, what they are told, and who says to have a state."""
    choices = Choices(data)
    tensors = [torch.ones(shape) for shape in SHAPES]
    question = Question(bytes(16), choices.number(8))
    packed = [question.pack(), choices.raw(choices.number(64))]
    try:
        packed.append(MSGPackSerializer.dumps(any_value(choices)))
        packed.append(MSGPackSerializer.dumps([choices.of(NUMBERS), any_value(choices), choices.raw(64)]))
        packed.append(make_statement(question, choices.number(4), tensors).pack())
    except (ValueError, TypeError, OverflowError):
        pass  # that nobody can send, or no statement can be made of
    own = make_statement(Question(bytes(16), 2), 3, tensors)
    for one in packed:
        for kind in (Question, Statement):
            try:
                parsed = kind.parse(one)
            except ValueError:
                continue
            if isinstance(parsed, Statement):
                own.contradicts(parsed)
    ranked_sources([(any_value(choices), any_value(choices)) for _ in range(choices.number(4))], 7.0)


async def _tell_rest(rest: ModuleRest, asked: bytes) -> bytes:
    async def ask_host(number: int, start: int) -> Any:
        return None, (rest.piece(number, start),), None

    own: Any = SimpleNamespace(
        module_rest=rest, serializer=TrainingStateAverager.serializer, allow_state_sharing=True, _ask_host=ask_host
    )
    request = averaging_pb2.DownloadData(metadata=asked)
    return (await TrainingStateAverager.rpc_tell_rest(own, request, context(EVIL))).metadata


def feed_rests(data: bytes) -> None:
    """What a peer is asked of what no round averages, and the bytes that it is sent of it."""
    choices = Choices(data)
    rest = ModuleRest(torch.nn.Linear(2, 3), ())
    try:
        asked = MSGPackSerializer.dumps([choices.of((*rest._numbers, any_value(choices))), choices.of(NUMBERS)])
    except (ValueError, TypeError, OverflowError):
        asked = choices.raw(choices.number(64))
    with contextlib.suppress(ValueError):
        assert 0 < len(run(_tell_rest(rest, asked))) <= 24
    number = choices.number(2)
    own = rest.entries[number]
    dtype = choices.of(("float32", "float64", "bfloat16", "float16"))
    theirs = RestEntry(own.name, own.shape, dtype)
    sent = torch.frombuffer(bytearray(choices.raw(theirs.nbytes).ljust(theirs.nbytes, b"x")), dtype=torch.uint8)
    if choices.number(2):
        digests = digests_of(sent.view(getattr(torch, dtype)).reshape(own.shape))
        theirs = RestEntry(own.name, own.shape, dtype, {**digests, choices.text(8): choices.text(8)})
    rest.take_over(number, theirs, sent)


TARGETS = [
    Target("optimizers", "states of optimizers, and a step with what is taken of them", feed_optimizers),
    Target("rests", "what peers ask and send of what no round averages", feed_rests),
    Target("witnesses", "what peers ask and tell of the swarm's state", feed_witnesses),
]
