"""Whom a newcomer asks for a word about a state, and for how long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from hivenb.engine.averaging.state_download import (
    MOST_WITNESSES,
    Question,
    SharesState,
    Testimony,
    Wanted,
)

PEERS = [PeerID(os.urandom(32)) for _ in range(MOST_WITNESSES + 2)]

Answer = Callable[[PeerID, bytes], Any]


class Stubs(SimpleNamespace):
    """What of an averager's process asks others, and those others."""

    def __init__(self, answer: Answer, state: Callable[[], AsyncIterator[Any]] | None = None):
        super().__init__(answer=answer, state=state, asked=[], prefix="run", _p2p=None, _last_asked={})
        self.request_timeout = self.next_chunk_timeout = 5.0
        for name in ("_hear_witness", "_hear_witnesses"):
            setattr(self, name, partial(getattr(SharesState, name), self))

    def get_stub(self, p2p: Any, peer: PeerID, namespace: str) -> Any:
        async def tell(request: averaging_pb2.DownloadData, timeout: float) -> averaging_pb2.DownloadData:
            self.asked.append((peer, bytes(request.metadata)))
            return averaging_pb2.DownloadData(metadata=await self.answer(peer, bytes(request.metadata)))

        async def download(request: averaging_pb2.DownloadRequest) -> AsyncIterator[Any]:
            return self.state()

        return SimpleNamespace(rpc_tell_state=tell, rpc_download_state=download)


async def echo(peer: PeerID, question: bytes) -> bytes:
    return question


def hear(stubs: Stubs, peers: list[PeerID]) -> tuple[Testimony, ...]:
    return asyncio.run(SharesState._hear_witnesses(stubs, peers, 2))  # type: ignore[arg-type]


def test_each_witness_is_asked_a_question_that_no_other_one_knows() -> None:
    """One who serves a forged state, and is asked as well, would know which numbers the others tell."""
    stubs = Stubs(echo)
    heard = hear(stubs, PEERS)
    assert [one.peer for one in heard] == [peer.to_bytes() for peer in PEERS[:MOST_WITNESSES]]
    assert len({question for _, question in stubs.asked}) == MOST_WITNESSES
    assert [one.question for one in heard] == [Question.parse(one.answer) for one in heard]
    again = hear(stubs, PEERS[:1])
    assert again[0].question not in [one.question for one in heard]


def test_who_does_not_answer_is_no_witness() -> None:
    async def answer(peer: PeerID, question: bytes) -> bytes:
        if peer == PEERS[0]:
            raise OSError("gone")
        return question

    assert [one.peer for one in hear(Stubs(answer), PEERS[:2])] == [PEERS[1].to_bytes()]


def test_nobody_is_asked_any_longer_when_the_download_fails() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def never(peer: PeerID, question: bytes) -> bytes:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async def fails() -> AsyncIterator[Any]:
        yield averaging_pb2.DownloadData(metadata=b"")
        await asked.wait()
        raise OSError("the line is cut")

    async def download() -> None:
        stubs = Stubs(never, fails)
        with pytest.raises(OSError, match="the line is cut"):
            await SharesState._download_from(stubs, PEERS[0], Wanted(7.0, frozenset(), 1e6, 2, 1.0), PEERS[1:2])  # type: ignore[arg-type]
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(download())
