"""Others are asked for a word about a state while it is on its way from the peer that serves it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from hivenb.engine.averagers.state_witness import Question, Statement, make_statement
from hivenb.engine.dht.checked_values import raw
from hivenb.engine.rounds.averager import AveragerBase

logger = get_logger(__name__)

#: Peers that are asked for a word about the state of another, at most.
MOST_WITNESSES = 3

#: Seconds that a witness is given.
WITNESS_WITHIN = 10.0

#: Seconds between two questions of one peer about this one's state.
ASKED_AGAIN_AFTER = 0.3


@dataclass(frozen=True)
class Testimony:
    """What a peer has told of its own state.

    :param peer: its id
    :param question: that it was asked, and nobody else: who serves a state that fits it has to know it
    :param answer: as it came
    """

    peer: bytes
    question: Question
    answer: bytes

    def contradicts(self, epoch: Any, tensors: Sequence[torch.Tensor]) -> bool | None:
        """Whether another state cannot be of the same swarm; ``None`` if that cannot be told.

        :param epoch: of that state
        :param tensors: of it, no fewer than were asked for
        """
        try:
            statement = Statement.parse(self.answer)
        except (ValueError, TypeError) as e:
            logger.debug(f"What {PeerID(self.peer)} tells of its state cannot be read: {e!r}")
            return None
        return make_statement(self.question, epoch, tensors).contradicts(statement)


class AsksWitnesses(AveragerBase):
    """Base to put *behind* a class of hivemind's averagers: tells newcomers of its state, and asks others for theirs.

    In the averager's own process.
    """

    async def _hear_witnesses(self, peers: Sequence[PeerID], count: int) -> tuple[Testimony, ...]:
        """What they tell of their states, if they do in time.

        :param count: tensors of a state that they are asked about
        """
        heard = await asyncio.gather(*(self._hear_witness(peer, count) for peer in peers[:MOST_WITNESSES]))
        return tuple(one for one in heard if one is not None)

    async def _hear_witness(self, peer: PeerID, count: int) -> Testimony | None:
        last_asked = self.__dict__.setdefault("_last_asked", {})
        await asyncio.sleep(last_asked.get(peer, -math.inf) + 2 * ASKED_AGAIN_AFTER - time.monotonic())
        last_asked[peer] = time.monotonic()
        question = Question(os.urandom(16), count)
        request = averaging_pb2.DownloadData(metadata=question.pack())
        try:
            stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
            told = await stub.rpc_tell_state(request, timeout=WITNESS_WITHIN)
        except Exception as e:  # one of plain hivemind, or gone
            logger.debug(f"{peer} tells nothing of its state: {e!r}")
            return None
        return Testimony(peer.to_bytes(), question, bytes(told.metadata))

    async def rpc_tell_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Answer a newcomer that wants to know whether another peer sends it the swarm's state."""
        question = Question.parse(raw(request.metadata, 64))
        self._require_patience(context.remote_id.to_bytes())
        if not self.allow_state_sharing:
            raise ValueError("this peer does not share its state")
        packed, tensors, _ = await self._get_current_state_from_host_process()
        epoch = self.serializer.loads(packed).get("epoch")
        telling = asyncio.get_running_loop().run_in_executor(None, make_statement, question, epoch, tensors)
        return averaging_pb2.DownloadData(metadata=(await telling).pack())

    _asked_at: dict[bytes, float]

    def _require_patience(self, peer: bytes) -> None:
        now = time.monotonic()
        asked_at = self.__dict__.setdefault("_asked_at", {})
        self._asked_at = {one: at for one, at in asked_at.items() if now - at < ASKED_AGAIN_AFTER}
        if peer in self._asked_at:
            raise ValueError("this peer was asked just now")
        self._asked_at[peer] = now
