"""Records that stand in the DHT, which anybody may write to: what each says, and what is made of all of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from concurrent.futures import Future
from typing import Any

import torch
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from fuzzing.target import Choices, Target
from hivenb.engine.averaging.module_rest import ModuleRest
from hivenb.engine.matchmaking.matchmaking import AttendanceList
from hivenb.engine.network import dht as _dht  # noqa: F401 - with the bounds that each process of ours has
from hivenb.engine.network.record_board import RECORD_BYTES, RecordBoard, owner_of
from hivenb.engine.network.records import Kind, why_refused
from hivenb.engine.progress.peer_reports import Look, as_infos, parse_report, parse_reports
from hivenb.errors import SwarmError
from hivenb.options import Options
from hivenb.options.swarm_wide import SHARED_FIELDS, shared_part, with_shared_part
from hivenb.swarm.agreement.frozen_parameters import difference, parse_rest, to_download
from hivenb.swarm.agreement.model_record import first_difference, parse_description, parse_record, whose_model
from hivenb.swarm.agreement.options_record import Declaration, Plan, parse
from hivenb.swarm.agreement.public_names import MAX_LENGTH, parse_name
from hivenb.swarm.members import MemberList
from hivenb.view.peers_panel import peers_html
from hivenb.view.style import safe
from hivenb.view.text import peer_lines

OWNER = owner_of(RSAPrivateKey())
OWN_ID = PeerID(bytes(range(34)))
SHARED = shared_part(Options(target_batch_size=64))

NUMBERS = (
    0, 1, 2, 64, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, 1.0, 0.5, -1.5, 1e-320, 1e30, 1e308,
    float("inf"), float("-inf"), float("nan"), True, False,
)  # fmt: skip
TEXTS = ("", "Ann", "x" * 300, "\u202eevil", "\x1b[31m", "<img src=x onerror=alert(1)>", "1e999", "\ud800", "\0")


class FoundRecords:
    """In place of a DHT: it has found these records under each key."""

    peer_id = OWN_ID

    def __init__(self, records: Any):
        self._found = ValueWithExpiration(records, get_dht_time() + 60)

    def get(self, key: str, latest: bool, return_future: bool) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self._found)
        return answer


def any_value(choices: Choices, depth: int = 3) -> Any:
    """Whatever a record can hold, as msgpack has carried it."""
    kind = choices.number(7 if depth else 5)
    if kind == 0:
        return choices.of(NUMBERS)
    if kind == 1:
        return choices.of(TEXTS)
    if kind == 2:
        return choices.raw(choices.number(64))
    if kind == 3:
        return choices.text()
    if kind == 4:
        return None
    members = [any_value(choices, depth - 1) for _ in range(choices.number(5))]
    if kind == 5:
        return members if choices.number(2) else tuple(members)
    return {choices.of((*SHARED_FIELDS, "peer", "steps", 0, b"x")): member for member in members}


def changed(choices: Choices, value: dict[str, Any]) -> Any:
    """A value with a few things in other places or of other kinds."""
    if choices.now_and_then():
        return any_value(choices)
    value = dict(value)
    for _ in range(choices.number(4)):
        name = choices.of(tuple(value) or ("peer",))
        if choices.number(5) == 4:
            value.pop(name, None)
        else:
            value[name] = choices.of(NUMBERS) if choices.number(2) else any_value(choices)
    return value


def a_report(choices: Choices) -> Any:
    """A report of progress."""
    report = {
        "peer_id": choices.of((OWN_ID.to_bytes(), bytes(34), b"\x12\x20" + bytes(32), b"", b"<script>")),
        "epoch": choices.number(8),
        "samples_accumulated": choices.number(256),
        "samples_per_second": float(choices.number(100)),
        "time": get_dht_time(),
        "client_mode": choices.now_and_then(),
    }
    return changed(choices, report)


def feed_reports(data: bytes) -> None:
    choices, member_list = Choices(data), MemberList()
    attendance = AttendanceList()
    for look in range(1 + choices.number(3)):
        values = [a_report(choices) for _ in range(choices.number(5))]
        found = {one.peer_id: one for value in values if (one := parse_report(value)) is not None}
        infos = as_infos(found.values(), OWN_ID)
        attendance.call([one for one in found.values() if one.peer_id != OWN_ID.to_bytes()])
        member_list.update(Look(time.monotonic() + look, infos), 64, {info.peer_id: "Ann" for info in infos})
        assert sum(member.share for member in member_list.members) <= 1.001
        assert all(member.samples >= 0 for member in member_list.members)
    peer_lines(member_list.members)
    html = peers_html(member_list.members)
    assert "<script" not in html
    assert "<img" not in html


def feed_declarations(data: bytes) -> None:
    choices = Choices(data)
    if choices.number(4) == 3:
        packed = choices.rest()
    else:
        steps = [[choices.number(6), changed(choices, SHARED)] for _ in range(choices.number(4))]
        fields = {"peer": "Qm", "since": get_dht_time(), "version": choices.number(9), "steps": steps}
        text = json.dumps(changed(choices, fields), default=repr, skipkeys=True)
        packed = text.replace('"1e999"', "1e999").encode("utf-8", "surrogatepass")
    declaration = parse(OWNER, packed)
    parse(choices.of((OWNER[:-1], b"", "owner", None)), packed)
    if declaration is None:
        return
    assert len(packed) <= RECORD_BYTES
    assert isinstance(declaration, Declaration)
    assert parse(OWNER, declaration.pack()) == declaration, "as this peer says it again"
    _follow(declaration.plan)


def _follow(plan: Plan) -> None:
    for epoch in (0, 1, 7, 10**6):
        shared = {name: value for name, value in plan.at(epoch).items() if name != "grad_averager_factory"}
        followed = with_shared_part(Options(target_batch_size=1), shared)
        assert followed.target_batch_size > 0
    plan.changed(SHARED, 9, 3)


def feed_models(data: bytes) -> None:
    choices = Choices(data)
    if choices.number(2):
        described = [[choices.text(8), [choices.number(99)], *(["float64"] * choices.number(2))] for _ in range(3)]
        if choices.now_and_then():
            dtype = choices.of(("float32", "uint8", "nn", "qint8"))
            described = [[choices.text(8), [choices.number(9) + 1], dtype, {dtype: choices.text(40)}] for _ in range(2)]
        described = [any_value(choices) if choices.now_and_then() else one for one in described]
        packed = json.dumps(described, default=repr, skipkeys=True).encode("utf-8", "surrogatepass")
    else:
        packed = choices.raw(choices.number(256))
    digest = hashlib.sha256(packed).hexdigest()
    count = choices.number(3) + 1
    parts = [packed[len(packed) * n // count : len(packed) * (n + 1) // count] for n in range(count)]
    records: dict[Any, Any] = {f"{digest}/{number}": [count, part] for number, part in enumerate(parts)}
    if choices.now_and_then():
        records[choices.of((f"{digest}/0", f"{digest}/1", OWNER))] = any_value(choices)
    described = parse_description(digest, records)
    if described is not None:
        first_difference((("layer.weight", (2, 4)), ("layer.bias", (2,))), described)
        first_difference(described, described)
    if (rest := parse_rest(digest, records)) is not None:
        own = ModuleRest(torch.nn.Linear(2, 2), ())
        found = difference(own.entries, rest)
        for downloads in (False, True) if found is not None else ():
            with contextlib.suppress(SwarmError):
                to_download(found, own, "run", downloads)
    said = [[digest, OWN_ID.to_base58(), choices.raw(32)], any_value(choices)]
    found = [parse_record(owner, value) for owner in (OWNER, b"", None) for value in said]
    whose_model([one for one in found if one is not None], frozenset({OWN_ID.to_base58()}))


def feed_names(data: bytes) -> None:
    choices = Choices(data)
    ids = (OWN_ID.to_base58(), "1", "", "0OIl", "x" * 5000, "Zo\xeb", "12D3KooW" + "1" * 44)
    record = {"peer": choices.of(ids), "name": choices.text(250), "proof": choices.raw(16)}
    owner = choices.of((OWNER, b"", None, 0, "x"))
    told = parse_name(owner, changed(choices, record))
    if told is None:
        return
    _, name = told
    assert len(name) <= MAX_LENGTH
    assert name.isprintable()
    assert "<" not in safe(name)


def feed_boards(data: bytes) -> None:
    choices = Choices(data)
    keys = (0, 1, OWN_ID.to_base58(), "x" * 200, b"", OWNER, True, 0.5)
    records: Any = {choices.of(keys): any_value(choices) for _ in range(choices.number(6))}
    found = _standing(records) if choices.number(4) else any_value(choices)
    read = RecordBoard(FoundRecords(found), "run").read()
    assert all(isinstance(record, ValueWithExpiration) for record in read.values())
    parse_reports(read)


def feed_record_bytes(data: bytes) -> None:
    """What a record's bytes are taken for by a node that is to keep them."""
    choices = Choices(data)
    kind = choices.of((*Kind, None))
    subkey = choices.of((DHTProtocol.IS_REGULAR_VALUE, MSGPackSerializer.dumps(OWNER), b"", choices.raw(16)))
    expires = choices.of((get_dht_time() + 10.0, *NUMBERS))
    value = choices.rest()
    record = DHTRecord(b"key", subkey, value, expires)
    refused = why_refused(record, value, kind)
    assert refused is None or isinstance(refused, str)
    if refused is None:
        MSGPackSerializer.loads(value)


def _standing(records: dict[Any, Any]) -> dict[Any, Any]:
    return {key: ValueWithExpiration(value, get_dht_time() + 60) for key, value in records.items()}


TARGETS = [
    Target("reports", "what peers report of themselves, and what the list of peers makes of it", feed_reports),
    Target("declarations", "what a host declares, and the options that are made of it", feed_declarations, 4096),
    Target("models", "descriptions of models, in parts", feed_models),
    Target("names", "names that peers give themselves", feed_names),
    Target("boards", "boards of records, and the reports on them", feed_boards),
    Target("record-bytes", "records as a node of the DHT is sent them", feed_record_bytes),
]
