"""A real averager of gradients that never starts its process, and a loop for it: its answers to others are what is fed.

Nothing here trains: no message of it leaves this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import P2PContext, P2PDaemonError, PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from hivenb.engine.averaging.extensions.extension import Exchange
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.exchange import codecs
from hivenb.engine.exchange.all_reduce import RoundTerms
from hivenb.engine.matchmaking.group_records import marked
from hivenb.engine.network.untrusted_values import bound_this_process

# as in each averager's process
bound_this_process()
codecs.install()

OWN, GOOD, EVIL, OTHER = (PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(4))

#: Numbers that are averaged, and bytes of a part of them.
COUNT, PART_BYTES = 96, 64

EPOCH = 3

#: Seconds that the answer to an input may take; all is in memory, and the machine may be busy.
PATIENCE = 20.0


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In the loop that all inputs share; whatever of it is not over by then is a finding."""
    with contextlib.ExitStack() as patches:
        for module, name in _times_given():
            patches.enter_context(patch.object(module, name, 0.0))
        return loop().run_until_complete(_alone(coroutine))


@cache
def _times_given() -> list[tuple[Any, str]]:
    """Wherever others are given time to read the end of a stream, which nobody needs here."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hivenb.engine.")]
    names = ("CLOSED_WITHIN", "PARTS_LEFT_OPEN", "STATE_LEFT_OPEN")
    return [(module, name) for module in modules for name in names if hasattr(module, name)]


async def _alone(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await asyncio.wait_for(coroutine, PATIENCE)
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@cache
def averager() -> GradientAverager:
    dht = SimpleNamespace(peer_id=OWN, client_mode=False)
    settings = {"min_matchmaking_time": 1.0, "request_timeout": 0.5, "part_size_bytes": PART_BYTES}
    return GradientAverager([torch.nn.Parameter(torch.zeros(COUNT))], dht=dht, prefix="run", start=False, **settings)


class NobodyReached:
    """In place of libp2p: nobody is there."""

    peer_id = OWN

    async def iterate_protobuf_handler(self, *args: Any) -> Any:
        raise P2PDaemonError("nobody is reached")

    call_protobuf_handler = iterate_protobuf_handler


def anew() -> GradientAverager:
    """The averager as its process begins; to be called in the loop."""
    own = averager()
    own._p2p = NobodyReached()
    own._matchmaking = None
    own._running_groups.clear()
    own._state_updated, own._pending_groups_registered = asyncio.Event(), asyncio.Event()
    own._pending_groups_registered.set()
    return own


def gathered(epoch: Any = EPOCH, bandwidth: Any = None, mode: Any = 0) -> bytes:
    """What a peer of ours sends to its group."""
    return marked(MSGPackSerializer.dumps([bandwidth, mode, MSGPackSerializer.dumps(epoch)]))


def runner_of(own: GradientAverager, group: GroupInfo, tensors: Sequence[torch.Tensor], **settings: Any) -> Any:
    """What exchanges tensors with a group.

    :param settings: of the exchange; with ``are_of_ours``, nobody in the group is a peer of plain hivemind
    """
    own._matchmaking.begin(group.group_id)
    terms = RoundTerms(settings.pop("are_of_ours", False), has_helper=False)
    infos = [CompressionInfo.from_tensor(one, key=number) for number, one in enumerate(tensors)]
    exchange = Exchange(tuple(tensors), tuple(infos), NoCompression(), 1.0, weights_are_samples=True)
    return own._runner_of(group, exchange, terms, **settings)


def step() -> Any:
    """A round that looks for its group."""
    return SimpleNamespace(
        data_for_gather=gathered(), scheduled_time=get_dht_time(), get_timeout=lambda: PATIENCE, weight=1.0
    )


def context(remote: PeerID) -> P2PContext:
    return P2PContext(handle_name="fed", local_id=OWN, remote_id=remote)


async def stream(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def all_of(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]
