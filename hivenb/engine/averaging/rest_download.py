"""What of a module no round averages, sent in pieces from one peer to another."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from hivenb.engine.averaging.module_rest import PIECE, ModuleRest, RestEntry
from hivenb.engine.averaging.state_download import SharesState, ranked_sources
from hivenb.engine.network.untrusted_values import raw, sequence, text, whole
from hivenb.errors import SwarmError

logger = get_logger(__name__)

#: Seconds within which some peer has to send what no round averages, and each piece of it.
REST_WITHIN, PIECE_WITHIN = 60.0, 15.0

_ASK_AGAIN = 0.3


class SharesRest(SharesState):
    """Base to put *behind* hivemind's averager of the state: what no round averages is sent to who lacks it.

    :param module_rest: that of this peer's module
    """

    def __init__(self, *args: Any, module_rest: ModuleRest | None = None, **kwargs: Any):
        self.module_rest = module_rest
        # for both processes: which of these tensors another peer asks for, and from which byte on; -1 for the state
        self._asked = torch.full((2,), -1, dtype=torch.int64).share_memory_()
        # in the averager's process
        self._rest_sources: Sequence[bytes] = ()
        self._asking_host = asyncio.Lock()
        super().__init__(*args, **kwargs)

    # -- in the process that trains -----------------------------------------------------------------------------

    def asked_piece(self) -> torch.Tensor | None:
        """The piece that the averager's process asks for; ``None`` if it asks for the state."""
        number, start = self._asked.tolist()
        return None if number < 0 or self.module_rest is None else self.module_rest.piece(number, start)

    def download_rest(self, wanted: Mapping[int, RestEntry]) -> None:
        """Take over from another peer what of the module no round averages.

        :param wanted: by its numbers here, what another peer has said of it
        :raises SwarmError: if no peer sends it within a minute
        """
        for number, theirs in wanted.items():
            deadline, attempt = time.monotonic() + REST_WITHIN, 0
            while not self._download_of_rest(number, theirs, attempt):
                if time.monotonic() > deadline:
                    raise SwarmError(
                        f"no peer of the swarm sends its {theirs.name}, which stays out of the optimizer and differs "
                        "from this peer's. Do all of them run in client mode, or have they left?"
                    )
                attempt += 1
                time.sleep(_ASK_AGAIN)

    def _download_of_rest(self, number: int, theirs: RestEntry, attempt: int) -> bool:
        assert self.module_rest is not None
        pieces = []
        for start in range(0, theirs.nbytes, PIECE):
            answer: MPFuture[torch.Tensor | None] = MPFuture()
            self._outer_pipe.send(("_fetch_of_rest", [theirs.name, start, attempt], {"answer": answer}))
            piece = answer.result(2 * PIECE_WITHIN)
            if piece is None or len(piece) != min(PIECE, theirs.nbytes - start):
                return False
            pieces.append(piece.clone())
        return self.module_rest.take_over(number, theirs, torch.cat(pieces))

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _fetch_of_rest(self, name: str, start: int, attempt: int, answer: Any) -> None:
        piece = None
        try:
            if start == 0:
                key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
                found = await self.dht.get(key, latest=True, return_future=True)
                entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
                own = self.peer_id.to_bytes()
                self._rest_sources = [one for one in ranked_sources(entries, math.inf) if one != own]
            if sources := self._rest_sources:
                stub = self.get_stub(self._p2p, PeerID(sources[attempt % len(sources)]), namespace=self.prefix)
                request = averaging_pb2.DownloadData(metadata=self.serializer.dumps([name, start]))
                told = await stub.rpc_tell_rest(request, timeout=PIECE_WITHIN)
                piece = torch.frombuffer(bytearray(raw(told.metadata, PIECE, least=1)), dtype=torch.uint8)
        except Exception as e:  # another one may have it, or this one a moment later
            logger.debug(f"{name} was not sent: {e!r}")
        finally:
            answer.set_result(piece)

    async def rpc_tell_rest(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Send another peer a piece of what no round averages."""
        name, start = sequence(self.serializer.loads(raw(request.metadata, 4096)), 2, least=2)
        rest = self.module_rest
        number = None if rest is None else rest.number_of(text(name, 2048))
        if rest is None or number is None or not self.allow_state_sharing:
            raise ValueError("this peer does not share it")
        whole(start, 0, rest.sizes[number] - 1)
        _, (piece,), _ = await self._ask_host(number, start)
        return averaging_pb2.DownloadData(metadata=piece.numpy().tobytes())

    async def _get_current_state_from_host_process(self) -> Any:
        return await self._ask_host(-1, -1)

    async def _ask_host(self, number: int, start: int) -> Any:
        """Have the process that trains copy something, one thing at a time: it is told what by way of memory."""
        async with self._asking_host:
            self._asked.copy_(torch.tensor([number, start]))
            try:
                return await super()._get_current_state_from_host_process()
            finally:
                self._asked.fill_(-1)
