"""How peers meet for a round: requests to join a group, and what its leader says to those that follow it."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from fuzzing.averager_without_process import (
    COUNT,
    EVIL,
    GOOD,
    OTHER,
    OWN,
    PATIENCE,
    all_of,
    anew,
    context,
    gathered,
    run,
    runner_of,
    step,
    stream,
)
from fuzzing.records import NUMBERS, any_value
from fuzzing.target import Choices, Target
from hivenb.engine.matchmaking.group_records import epoch_of, is_readable, marked

GROUP = bytes(range(20))

#: What hivemind tries a round anew after; anything else would end it.
KNOWN = ("AllreduceException", "MatchmakingException")


def nested(depth: int, code: int = 0x40) -> bytes:
    """A tuple in a tuple, and so on, as msgpack carries them."""
    inner = b"\xc0"
    for _ in range(depth):
        wrapped = b"\x91" + inner
        inner = b"\xc9" + len(wrapped).to_bytes(4, "big") + bytes([code]) + wrapped
    return inner


def what_is_gathered(choices: Choices) -> bytes:
    """What a peer sends to its group, or something else in its place."""
    kind = choices.number(10)
    if kind < 4:
        return gathered()
    if kind == 4:
        return gathered(bandwidth=choices.of((*NUMBERS, 1e-9, 1e15, "5")))
    if kind == 5:
        return choices.raw(choices.number(64))
    if kind == 6:
        return nested(choices.of((1, 20, 200, 400, 900)), choices.of((0x40, 0x50, 0x51)))
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # what nobody could send
        if kind == 7:
            return gathered(any_value(choices), any_value(choices), any_value(choices))
        if kind == 8:
            return bytes(MSGPackSerializer.dumps(any_value(choices)))
        record = [None, choices.number(5), choices.raw(8)]
        return marked(MSGPackSerializer.dumps(record))[: choices.number(64)]
    return b"\x93"


def a_request(choices: Choices, own: Any) -> averaging_pb2.JoinRequest:
    message = averaging_pb2.JoinRequest(
        schema_hash=own.schema_hash,
        expiration=get_dht_time() + 60,
        gather=what_is_gathered(choices),
        group_key=own._matchmaking.group_key_manager.current_key,
    )
    if choices.now_and_then():
        message.expiration = choices.of([float(one) for one in NUMBERS])
    if choices.now_and_then():
        message.group_key = choices.text()
    if choices.now_and_then():
        message.schema_hash = choices.raw(40)
    message.client_mode = choices.now_and_then()
    return message


async def _lead(choices: Choices) -> None:
    """Lead a group that a good peer joins, after others have asked."""
    own = anew()
    matchmaking = own._matchmaking
    current = step()
    async with matchmaking.looking_for_group(current):
        matchmaking.potential_leaders.declared_group_key = matchmaking.group_key_manager.current_key
        matchmaking.potential_leaders.declared_expiration_time = get_dht_time() + PATIENCE
        asking = [
            asyncio.create_task(all_of(own.rpc_join_group(a_request(choices, own), context(peer))))
            for peer in (EVIL, OTHER)[: 1 + choices.number(2)]
        ]
        good = asyncio.create_task(all_of(own.rpc_join_group(a_request(Choices(b""), own), context(GOOD))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert GOOD in matchmaking.current_followers, "whoever asks in between"
        async with matchmaking.lock_request_join_group:
            group = await matchmaking.leader_assemble_group()
        answers = await good
        assert [answer.code for answer in answers] == [averaging_pb2.ACCEPTED, averaging_pb2.BEGIN_ALLREDUCE]
        await asyncio.gather(*asking)
    assert await _average_with(own, group), "a round that one of those fails who asked to be in it"


def feed_requests(data: bytes) -> None:
    choices = Choices(data)
    gather = what_is_gathered(choices)
    if is_readable(gather):
        MSGPackSerializer.loads(gather)
    epoch_of(gather)
    run(_lead(choices))


async def _average_with(own: Any, group: Any) -> bool:
    """Share a tensor out among a group, and no more; whether a round would have begun."""
    begun = []

    async def begin(tensors: Any, group_info: Any, **kwargs: Any) -> None:
        assert sum(kwargs["peer_fractions"]) == COUNT
        assert min(kwargs["peer_fractions"]) >= 0
        shared = {name: kwargs[name] for name in ("part_size_bytes", "peer_fractions")}
        runner_of(own, group_info, tensors, **shared).finalize()
        begun.append(group_info)

    own._run_allreduce_inplace_ = begin
    settings = {"compression": NoCompression(), "min_vector_size": 0, "weight": 1.0, "part_size_bytes": 64}
    infos = (CompressionInfo.from_tensor(torch.zeros(COUNT), key=0),)
    try:
        await own._aggregate_with_group(group, tensor_infos=infos, **settings)
    except Exception as e:
        if type(e).__name__ not in KNOWN:
            raise
    finally:
        del own._run_allreduce_inplace_
    return bool(begun)


def a_beginning(choices: Choices) -> averaging_pb2.MessageFromLeader:
    message = averaging_pb2.MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE, group_id=GROUP)
    peers = [OWN.to_bytes(), EVIL.to_bytes(), GOOD.to_bytes()]
    message.ordered_peer_ids.extend(peers)
    message.gathered.extend(what_is_gathered(choices) for _ in peers)
    if choices.now_and_then():
        ids = (*peers, b"", b"\0" * 34, b"x" * 4096)
        message.ordered_peer_ids[:] = [choices.of(ids) for _ in range(choices.number(6))]
    if choices.now_and_then():
        message.gathered[:] = [what_is_gathered(choices) for _ in range(choices.number(4))]
    if choices.now_and_then():
        message.group_id = choices.raw(choices.number(64))
    if choices.now_and_then():
        message.code = choices.number(24)
    if choices.now_and_then():
        message.suggested_leader = choices.of((EVIL.to_bytes(), OWN.to_bytes(), b"", b"x" * 60_000))
    return message


async def _follow(choices: Choices) -> None:
    """Ask somebody to lead, who says anything; whatever it is, this peer goes on looking, or has a group."""
    own = anew()
    matchmaking = own._matchmaking
    beginnings = iter([a_beginning(choices) for _ in range(3)])

    async def join(request: Any) -> Any:
        code = averaging_pb2.ACCEPTED if not choices.now_and_then() else choices.number(24)
        message = next(beginnings, None)
        answers = [averaging_pb2.MessageFromLeader(code=code), *([] if message is None else [message])]
        return stream(answers[: choices.number(3) if choices.now_and_then() else 2])

    stub = SimpleNamespace(rpc_join_group=join)
    matchmaking._servicer_type = SimpleNamespace(get_stub=lambda *args, **kwargs: stub)
    matchmaking.request_timeout = 0.5
    async with matchmaking.looking_for_group(step()):
        group = await matchmaking._request_join_group(PeerID(EVIL.to_bytes()))
    if group is not None:
        await _average_with(own, group)


def feed_leaders(data: bytes) -> None:
    run(_follow(Choices(data)))


TARGETS = [
    Target("requests", "requests to join a group, and the round of that group", feed_requests),
    Target("leaders", "what a leader says to those that follow it, and the round with its group", feed_leaders),
]
