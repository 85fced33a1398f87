"""What the peers of a run have to agree on: a model's parameters, compared through the DHT before training.

Peers of different models meet in the DHT all the same, but hivemind's averagers turn each other away without a word,
and each of them trains alone. Each peer signs the digest of its description; the description itself stands under that
digest, so that nobody can change it, and is there once however many peers train the model.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import hivemind
import torch
from hivemind.p2p import PeerID

from hivenb.engine.network.access.identity import is_proven
from hivenb.engine.network.dht import DHT, know_run
from hivenb.engine.network.record_board import ANSWER_TIMEOUT, RECORD_BYTES, RecordBoard
from hivenb.engine.network.untrusted_values import PEER_ID_LENGTH, raw, sequence, text, whole
from hivenb.engine.progress.peer_reports import parse_reports
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.other_runs import tell_of_run

#: Seconds for which a description counts after its last renewal; peers renew it while they train.
EXPIRATION = 300.0

#: Seconds between two renewals.
RENEWAL = 60.0

#: Seconds within which a peer that trains reports anew.
RENEWED_WITHIN = 60.0

#: Seconds between two looks for that.
_LOOK_AGAIN = 0.5

#: Bytes of a description in one record, which also says how many records there are.
_PART_BYTES = RECORD_BYTES - 16

#: Records of a description, and parameters in it, at most: a megabyte tells of some ten thousand.
MAX_PARTS, MAX_PARAMETERS = 512, 100_000

_MAX_DIMENSIONS, _MAX_TYPE, _DIGEST, _PROOF_BYTES = 64, 32, 64, 128

#: The name of a parameter that the optimizer has from elsewhere.
NOT_OF_THE_MODULE = "(not of the module)"

#: What wrappers of modules put into the names of their parameters.
_WRAPPERS = frozenset({"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_T = TypeVar("_T")

#: Name and shape of a parameter; and its type, where that is averaged in another than single precision.
ParameterShape = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], str]


def describe_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[ParameterShape, ...]:
    """Name, shape and, unless single, the precision of each parameter that is trained, in the order of averaging."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return tuple(_described(names.get(id(p), NOT_OF_THE_MODULE), tuple(p.shape), p.dtype) for p in trained)


def _described(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ParameterShape:
    averaged_in = torch.promote_types(dtype, torch.float32)
    return (name, shape) if averaged_in is torch.float32 else (name, shape, str(averaged_in).removeprefix("torch."))


def first_difference(ours: Sequence[ParameterShape], theirs: Sequence[ParameterShape]) -> str | None:
    """The first parameter in which two models differ, in words; ``None`` if peers can average them.

    Parameters are averaged by their places. Where two have one shape and other names, something else would be averaged
    into each without a word, such as an encoder into a decoder that one peer has built first.
    """
    names, other_names = _comparable_names([one[0] for one in ours], [one[0] for one in theirs])
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if own[1] != other[1]:
            return (
                f"parameter {number} is {own[0]} of shape {own[1]} here and {other[0]} of shape {other[1]} in the swarm"
            )
        name, other_name = names[number - 1], other_names[number - 1]
        if name != other_name:
            remedy = (
                "give the optimizer its parameters in the same order at all peers"
                if other_name in names
                else "give the layers the same names at all peers"
            )
            return (
                f"parameter {number}, of shape {own[1]}, is {own[0]} here and {other[0]} in the swarm, and peers "
                f"average what stands at the same place; {remedy}"
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


def _comparable_names(ours: Sequence[str], theirs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names as they are the same at all peers: without what a wrapper, such as ``torch.compile``, adds to them.

    What all names of a module begin with goes as well: to the one the model is ``self.model``, to another ``self.net``.
    Where one of two is not of the module, the other one takes its place.
    """
    pairs = list(zip(ours, theirs, strict=False))
    named = [pair for pair in pairs if NOT_OF_THE_MODULE not in pair]
    own, other = (without_wrappers([pair[side] for pair in named]) for side in (0, 1))
    bare = iter(zip(own, other, strict=True))
    found = [next(bare) if NOT_OF_THE_MODULE not in pair else (NOT_OF_THE_MODULE,) * 2 for pair in pairs]
    return [one for one, _ in found], [one for _, one in found]


def bare_parts(name: str) -> list[str]:
    """Of a name, without those that wrappers add to it."""
    return [part for part in name.split(".") if part not in _WRAPPERS] or [name]


def without_wrappers(names: Sequence[str]) -> list[str]:
    """Names of one module without what wrappers add to them, and without what all of them begin with."""
    parts = [bare_parts(name) for name in names]
    shared = 0
    while parts and all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    return [".".join(one[shared:]) for one in parts]


@dataclass(frozen=True)
class ModelRecord:
    """What one peer says of its model.

    :param owner: the subkey, which holds its public key
    :param digest: SHA-256 of the description
    :param inviting: id of the peer, if that has proven to be the owner
    """

    owner: bytes
    digest: str
    inviting: str = ""


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
    difference = lasting_difference(
        dht, run_id, lambda owners: _difference(dht, run_id, ours, owners, timeout), timeout
    )
    if difference is not None:
        raise SwarmError(
            f"the swarm trains another model in the run {run_id!r}: {difference}. Build the same model as the "
            "others, or give this run a name of its own (run_id=...)"
        )
    declare_model(dht, run_id, ours)


def lasting_difference(
    dht: hivemind.DHT, run_id: str, find: Callable[[Collection[Any]], _T | None], timeout: float = ANSWER_TIMEOUT
) -> _T | None:
    """In what this peer differs from those that train in a run, and have not just died.

    :param find: a difference to peers, by their owners' keys; ``None`` without one
    """
    know_run(dht, run_id)
    seen: dict[Any, float] = {}
    deadline = time.monotonic() + RENEWED_WITHIN
    while True:
        reported = reported_by(dht, run_id, timeout)
        if find(reported) is None:
            return None
        # who has just died, or was ended, is listed for a while; who trains reports anew
        alive = [key for key, until in reported.items() if until > seen.setdefault(key, until)]
        if alive or time.monotonic() > deadline:
            return find(alive or reported)
        time.sleep(_LOOK_AGAIN)


def reported_by(dht: hivemind.DHT, run_id: str, timeout: float) -> dict[Any, float]:
    """Until when the reports of the others count that train in a run, by their owners."""
    records = RecordBoard(dht, f"{run_id}_progress", timeout=timeout).read()
    own = dht.peer_id.to_bytes()
    others = (key for key, report in parse_reports(records).items() if report.peer_id != own)
    return {key: records[key].expiration_time for key in others}


def _difference(
    dht: hivemind.DHT, run_id: str, ours: Sequence[ParameterShape], owners: Collection[Any], timeout: float
) -> str | None:
    """In what the model of some peers differs, in words; ``None`` if peers can average them."""
    # without others, what stands there is what somebody trained before: a corrected cell is to be run again
    theirs = _model_of(dht, run_id, owners, timeout) if owners else None
    if theirs is None or theirs[0] == digest_of(ours):
        return None
    return "its parameters are others" if theirs[1] is None else first_difference(ours, theirs[1])


def declare_model(dht: hivemind.DHT, run_id: str, ours: Sequence[ParameterShape]) -> None:
    """Describe the model of a run to those who come later, for the next :data:`EXPIRATION` seconds. Does not wait.

    :param dht: of ours; without effect for one of plain hivemind's, which signs nothing
    :param run_id: name of the run
    :param ours: what :func:`describe_parameters` gave
    """
    declare(dht, _key(run_id), _packed(ours))


def declare(dht: hivemind.DHT, key: str, described: bytes) -> None:
    """Pin a description up for the next :data:`EXPIRATION` seconds, signed by this peer. Does not wait.

    :param dht: of ours; without effect for one of plain hivemind's, which signs nothing
    :param key: of a board
    """
    if not isinstance(dht, DHT):
        return
    digest = hashlib.sha256(described).hexdigest()
    parts = [described[start : start + _PART_BYTES] for start in range(0, len(described), _PART_BYTES)]
    board = RecordBoard(dht, key, expiration=EXPIRATION)
    board.write(board.owner, [digest, dht.peer_id.to_base58(), dht.prove(board.owner)])
    for number, part in enumerate(parts):
        board.write(f"{digest}/{number}", [len(parts), part])


def digest_of(described: Sequence[ParameterShape]) -> str:
    """Equal where two descriptions are."""
    return hashlib.sha256(_packed(described)).hexdigest()


def _packed(described: Sequence[ParameterShape]) -> bytes:
    return json.dumps(described, separators=(",", ":")).encode()


def _model_of(
    dht: hivemind.DHT, run_id: str, owners: Collection[Any], timeout: float
) -> tuple[str, tuple[ParameterShape, ...] | None] | None:
    """Digest and description of the model that some peers train; a description that is not whole is ``None``."""
    declared, records = declarations(dht, _key(run_id), owners, timeout)
    digest = whose_model(declared, inviting_peers(dht))
    return None if digest is None else (digest, parse_description(digest, records))


def declarations(
    dht: hivemind.DHT, key: str, owners: Collection[Any], timeout: float
) -> tuple[list[ModelRecord], dict[Any, Any]]:
    """What some peers have pinned up on a board, and all that is there."""
    records = {name: one.value for name, one in RecordBoard(dht, key, timeout=timeout).read().items()}
    found = (parse_record(owner, records[owner]) for owner in owners if owner in records)
    return [record for record in found if record is not None], records


def inviting_peers(dht: hivemind.DHT) -> frozenset[str]:
    """Ids of the peers from whose invite this one came."""
    return frozenset(str(one).rpartition("/p2p/")[2] for one in dht.initial_peers or ())


def whose_model(records: Sequence[ModelRecord], inviting: frozenset[str]) -> str | None:
    """The digest to believe: of the peer from whose invite this one came, or else that of most of them.

    :param records: of peers that are there
    :param inviting: ids of the peers from whose invite this one came
    """
    invited = [record.digest for record in records if record.inviting in inviting]
    most = Counter(invited or [record.digest for record in records]).most_common(1)
    return most[0][0] if most else None


def parse_record(owner: Any, value: Any) -> ModelRecord | None:
    """What a peer says of its model, as it was found, or ``None`` if it is nothing: anybody may write to a DHT."""
    try:
        digest, peer_id, proof = sequence(value, 3, least=3)
        raw_id = PeerID.from_base58(text(peer_id, PEER_ID_LENGTH)).to_bytes()
        is_its_own = is_proven(raw_id, raw(owner, RECORD_BYTES), raw(proof, _PROOF_BYTES))
        return ModelRecord(owner, text(digest, _DIGEST), peer_id if is_its_own else "")
    except ValueError:
        return None


def parse_description(digest: str, records: Mapping[Any, Any]) -> tuple[ParameterShape, ...] | None:
    """The description of a model, as it was found.

    :param digest: of it
    :param records: what stands on the board
    :returns: ``None`` if it is none, or not whole: anybody may write to a DHT
    """
    try:
        packed = described_by(digest, records)
        return tuple(_parse_entry(*sequence(one, 3, least=2)) for one in sequence(json.loads(packed), MAX_PARAMETERS))
    except (KeyError, ValueError, RecursionError):
        return None


def described_by(digest: str, records: Mapping[Any, Any]) -> bytes:
    """A description from its parts on a board.

    :raises KeyError: if one is missing
    :raises ValueError: if they are not what the digest is of
    """
    count, _ = sequence(records[f"{digest}/0"], 2, least=2)
    parts = (sequence(records[f"{digest}/{number}"], 2, least=2)[1] for number in range(whole(count, 1, MAX_PARTS)))
    packed = b"".join(raw(part, RECORD_BYTES) for part in parts)
    if hashlib.sha256(packed).hexdigest() != digest:
        raise ValueError("it was changed on its way")
    return packed


def _parse_entry(name: Any, shape: Any, averaged_in: Any = "") -> ParameterShape:
    own = text(name, RECORD_BYTES), tuple(whole(size) for size in sequence(shape, _MAX_DIMENSIONS))
    return (*own, averaged_in) if text(averaged_in, _MAX_TYPE) else own


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
        tell_of_run(dht, run_id)
        self._declared_at = time.monotonic()

    def keep(self) -> None:
        """Say it again if it would be forgotten otherwise. Cheap, and does not wait."""
        if time.monotonic() - self._declared_at > RENEWAL:
            declare_model(self._dht, self._run_id, self._parameters)
            tell_of_run(self._dht, self._run_id)
            self._declared_at = time.monotonic()


def _key(run_id: str) -> str:
    return f"{run_id}_model"
