"""What holds for everything that others may send, and for everything that this peer sends."""

from __future__ import annotations

import json
from typing import Any

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from hivenb.engine.exchange import codecs
from hivenb.engine.network.access.tokens import NEVER, Admin, Secret
from hivenb.engine.progress.peer_reports import parse_report
from hivenb.errors import DamagedTensorError, InviteError
from hivenb.options import Options
from hivenb.options.swarm_wide import shared_part
from hivenb.swarm.agreement.options_record import parse
from hivenb.swarm.agreement.public_names import MAX_LENGTH, clean
from hivenb.swarm.invite import INVITE_PREFIX, Invite, encode_invite, read_invite
from hivenb.view.style import safe

from .invites import ADDRESS
from .records import OWNER

codecs.install()  # as in each averager's process

numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
carried = st.recursive(
    numbers | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)

#: All that is sent without loss.
tensors = st.builds(
    lambda size, kind, seed: torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(kind),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.bfloat16]),
    st.integers(0, 99),
)


@given(tensors)
def test_a_tensor_arrives_as_it_was_sent(tensor: torch.Tensor) -> None:
    arrived = deserialize_torch_tensor(serialize_torch_tensor(tensor))
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor)


@given(tensors, st.sampled_from([0, 1, 2, 3, 4]), st.data())
def test_a_tensor_that_was_changed_on_its_way_is_of_its_size_or_refused(
    tensor: torch.Tensor, codec: int, data: st.DataObject
) -> None:
    message = serialize_torch_tensor(tensor.float().reshape(-1, 1), 0)
    message.compression = codec
    message.size[:] = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=5))
    message.dtype = data.draw(st.sampled_from(["float32", "float64", "int8", "S9", "O", "", "float32\0"]))
    try:
        arrived = deserialize_torch_tensor(message)
    except DamagedTensorError:
        return
    assert tuple(arrived.shape) == tuple(message.size)
    assert arrived.nbytes <= 8 * max(1, len(message.buffer))


@given(st.binary(max_size=200))
def test_bytes_are_a_tensor_or_refused(data: bytes) -> None:
    message = runtime_pb2.Tensor(buffer=data, size=[len(data) // 4], dtype="float32")
    try:
        assert deserialize_torch_tensor(message).numel() * 4 == len(data)
    except DamagedTensorError:
        assert len(data) % 4


@given(carried)
def test_what_msgpack_carries_is_a_report_or_none(value: Any) -> None:
    report = parse_report(value)
    assert report is None or report.epoch >= 0


@given(carried)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    arrived = MSGPackSerializer.loads(MSGPackSerializer.dumps(value))
    assert repr(arrived) == repr(value), "nan is not equal to itself"


@given(st.dictionaries(st.sampled_from(["peer", "since", "version", "steps", "order", "proof", "returned"]), carried))
def test_what_json_carries_is_a_declaration_or_none(fields: dict[str, Any]) -> None:
    shared = shared_part(Options(target_batch_size=64))
    declared = {"peer": "Qm", "since": 1.0, "version": 0, "steps": [[0, shared]]}
    assert parse(OWNER, json.dumps(declared).encode()) is not None
    declaration = parse(OWNER, json.dumps({**declared, **fields}, default=repr).encode())
    assert declaration is None or parse(OWNER, declaration.pack()) == declaration


@given(st.text())
def test_a_name_is_one_short_line_and_never_html(name: str) -> None:
    cleaned = clean(name)
    assert len(cleaned) <= MAX_LENGTH
    assert cleaned == clean(cleaned)
    assert not cleaned or cleaned.isprintable()
    assert not set(safe(cleaned)) & set("<>\"'")


@given(st.none() | st.integers(0, NEVER), st.none() | st.text(min_size=1))
def test_an_invite_says_what_was_put_into_it(expires: int | None, run_id: str | None) -> None:
    key = None if expires is None else Admin(Secret.random()).new_invite(expires)
    invite = Invite((ADDRESS,), key, run_id)
    try:
        assert read_invite(encode_invite(invite.addresses, invite.key, invite.run_id)) == invite
    except InviteError:
        assert run_id is not None
        assert len(run_id) > 256


@given(st.text(), st.booleans())
def test_what_is_pasted_is_an_invite_or_an_error_of_ours(text: str, is_prefixed: bool) -> None:
    try:
        read_invite(INVITE_PREFIX * is_prefixed + text)
    except InviteError as e:
        said = str(e)
        assert len(said) < 1000
