"""What the peers of a run have to agree on: a model's parameters, compared through the DHT before training.

Peers of different models meet in the DHT all the same, but hivemind's averagers turn each other away without a word,
and each of them trains alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import hivemind
import torch

from hivenb.engine.dht.record_board import ANSWER_TIMEOUT, RECORD_BYTES, RecordBoard
from hivenb.engine.progress.peer_reports import read_peers
from hivenb.errors import SwarmError

#: Seconds for which a description counts after its last renewal; peers renew it while they train.
EXPIRATION = 300.0

#: Seconds between two renewals.
RENEWAL = 60.0

#: Bytes of a description in one record, which also says how many records there are.
_PART_BYTES = RECORD_BYTES - 16

#: Name and shape of a parameter; and its type, where that is averaged in another than single precision.
ParameterShape = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], str]


def describe_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[ParameterShape, ...]:
    """Name, shape and, unless single, the precision of each parameter, in the order in which they are averaged."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return tuple(_described(names.get(id(p), "(not of the module)"), tuple(p.shape), p.dtype) for p in parameters)


def _described(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ParameterShape:
    averaged_in = torch.promote_types(dtype, torch.float32)
    return (name, shape) if averaged_in is torch.float32 else (name, shape, str(averaged_in).removeprefix("torch."))


def first_difference(ours: Sequence[ParameterShape], theirs: Sequence[ParameterShape]) -> str | None:
    """The first parameter in which two models differ, in words; ``None`` if peers can average them."""
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if own[1] != other[1]:
            return (
                f"parameter {number} is {own[0]} of shape {own[1]} here and {other[0]} of shape {other[1]} in the swarm"
            )
        if own[2:] != other[2:]:
            here, there = ("".join(one[2:]) or "float32" for one in (own, other))
            return (
                f"parameter {number}, {own[0]}, is averaged in {here} here and in {there} in the swarm; give all peers "
                "the same Trainer(precision=...)"
            )
    if len(ours) != len(theirs):
        return f"there are {len(ours)} parameters here and {len(theirs)} in the swarm"
    return None


def agree_on_model(
    dht: hivemind.DHT, run_id: str, ours: Sequence[ParameterShape], timeout: float = ANSWER_TIMEOUT
) -> None:
    """Compare a model with the one that other peers of a run train, and describe it to those who come later.

    :param dht: a running DHT
    :param run_id: name of the run
    :param ours: what :func:`describe_parameters` gave
    :param timeout: seconds that the DHT is given for each answer
    :raises SwarmError: if the models differ, and the message names the first difference; or if the DHT does not answer
    """
    others = [peer for peer in read_peers(dht, run_id, timeout) if not peer.is_self]
    # without others, what stands there is what somebody trained before: a corrected cell is to be run again
    theirs = declared_model(dht, run_id, timeout) if others else None
    difference = None if theirs is None else first_difference(ours, theirs)
    if difference is not None:
        raise SwarmError(
            f"the swarm trains another model in the run {run_id!r}: {difference}. Build the same model as the others, "
            "or give this run a name of its own (run_id=...)"
        )
    declare_model(dht, run_id, ours)


def declare_model(dht: hivemind.DHT, run_id: str, ours: Sequence[ParameterShape]) -> None:
    """Describe the model of a run to those who come later, for the next :data:`EXPIRATION` seconds. Does not wait."""
    text = json.dumps(ours, separators=(",", ":")).encode()
    parts = [text[start : start + _PART_BYTES] for start in range(0, len(text), _PART_BYTES)]
    board = RecordBoard(dht, _key(run_id), expiration=EXPIRATION)
    for number, part in enumerate(parts):
        board.write(number, [len(parts), part])


def declared_model(
    dht: hivemind.DHT, run_id: str, timeout: float = ANSWER_TIMEOUT
) -> tuple[ParameterShape, ...] | None:
    """The description of the model of a run; ``None`` if there is none, or it is not whole.

    :param timeout: seconds that the DHT is given to answer
    :raises SwarmError: if the DHT does not answer in time
    """
    records = RecordBoard(dht, _key(run_id), timeout=timeout).read()
    try:
        count = records[0].value[0]
        text = b"".join(records[number].value[1] for number in range(count))
        return tuple(_read(*entry) for entry in json.loads(text))
    except (KeyError, IndexError, TypeError, ValueError):  # anybody may write to a DHT
        return None


def _read(name: Any, shape: Any, averaged_in: Any = "") -> ParameterShape:
    own = str(name), tuple(int(size) for size in shape)
    return (*own, str(averaged_in)) if averaged_in else own


class ModelDeclaration:
    """What a peer tells the others about its model, as long as it trains it.

    :param dht: a running DHT
    :param run_id: name of the run
    :param parameters: what :func:`describe_parameters` gave
    :raises SwarmError: if the swarm trains another model; the message names the first difference
    """

    def __init__(self, dht: hivemind.DHT, run_id: str, parameters: Sequence[ParameterShape]):
        self._dht, self._run_id, self._parameters = dht, run_id, parameters
        agree_on_model(dht, run_id, parameters)
        self._declared_at = time.monotonic()

    def keep(self) -> None:
        """Say it again if it would be forgotten otherwise. Cheap, and does not wait."""
        if time.monotonic() - self._declared_at > RENEWAL:
            declare_model(self._dht, self._run_id, self._parameters)
            self._declared_at = time.monotonic()


def _key(run_id: str) -> str:
    return f"{run_id}_model"
