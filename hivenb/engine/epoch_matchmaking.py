"""Matchmaking of peers that are at the same epoch, know how many they are, and wait for each other's trigger."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

#: What hivemind's averager sends to its group with each round: bandwidth, mode, the caller's own.
UPSTREAM_FIELDS = 3

#: Seconds between two looks for peers to average with.
LOOK_EVERY = 0.1

#: What ours add to it; a peer of plain hivemind reads the fields that it knows and no further.
MARK = "hivenb"


def marked(gather: bytes) -> bytes:
    """What a peer sends to its group, with the mark of ours."""
    return MSGPackSerializer.dumps([*MSGPackSerializer.loads(gather), MARK])


def is_marked(record: list[Any]) -> bool:
    """Whether a peer of ours has sent that record."""
    return MARK in record[UPSTREAM_FIELDS:]


def epoch_of(gather: bytes) -> int | None:
    """The epoch whose round a peer of ours looks for; ``None`` if it does not say, or is not one of ours."""
    try:
        record = MSGPackSerializer.loads(gather)
        epoch = MSGPackSerializer.loads(record[UPSTREAM_FIELDS - 1]) if is_marked(record) else None
    except (ValueError, TypeError, IndexError):  # anybody may send anything
        return None
    return epoch if isinstance(epoch, int) else None


@dataclass(frozen=True)
class ExpectedPeers:
    """The other peers of a run that a round may wait for.

    :param epochs: which they have reported
    :param ahead: by how much the number of a round is ahead of what its peers report while they look for each other
    """

    epochs: tuple[int, ...]
    ahead: int = 0

    def count(self, epoch: int | None) -> int:
        """Those that can come to a round of that epoch: whoever is further already will not."""
        return sum(epoch is None or reported <= epoch - self.ahead for reported in self.epochs)


class PacedGroupKeyManager(GroupKeyManager):
    """``hivemind``'s ``GroupKeyManager`` that looks for peers no more often than it has to.

    hivemind's peers look without a pause until they have found a group, which keeps a core busy.
    """

    _looked_at = -math.inf

    async def get_averagers(self, *args: Any, **kwargs: Any) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(self._looked_at + LOOK_EVERY - time.monotonic())
        self._looked_at = time.monotonic()
        return await super().get_averagers(*args, **kwargs)


class EpochMatchmaking(Matchmaking):
    """``hivemind``'s matchmaking, in which a leader turns away whoever is at another epoch.

    hivemind's peers do not ask. One that has just joined, or has missed a round, then fills a place in the group of
    the others' next round: they wait for it, and average their gradients with those of an epoch that is over.
    """

    @classmethod
    def of(cls, matchmaking: Matchmaking) -> EpochMatchmaking:
        """The same matchmaking, which hivemind has made already."""
        chosen = matchmaking.__dict__.pop("target_group_size")
        matchmaking.__class__ = cls
        matchmaking.group_key_manager.__class__ = PacedGroupKeyManager
        own = cast(EpochMatchmaking, matchmaking)
        own._chosen_size, own._expected, own._awaiting_trigger, own._peers_of_ours = chosen, None, {}, set()
        return own

    _chosen_size: int | None
    _expected: ExpectedPeers | None
    #: groups that this peer is in and that it has not begun to average with, by their ids
    _awaiting_trigger: dict[bytes, tuple[StepControl, asyncio.Event]]
    #: peers that have said which epoch's round they look for, in a group with this one
    _peers_of_ours: set[PeerID]

    @property
    def target_group_size(self) -> int | None:
        """Peers with which a group is complete: as many as the user has chosen, or all that can come to the round."""
        if self._chosen_size is not None or self._expected is None:
            return self._chosen_size
        step = self.step_control
        # a group of one would turn everybody away; the key manager's own size stays open, it draws from it
        return max(2, 1 + self._expected.count(None if step is None else epoch_of(step.data_for_gather)))

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        # Who is to lead is whoever began to look first; who does not look has an infinite time here. hivemind says so
        # only after the answer to a request of its own: two that ask each other, since one had not heard that the other
        # has begun anew, wait until request_timeout, and then until one of them begins anew again.
        if self.potential_leaders.declared_expiration_time > (request.expiration or math.inf):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_EXPIRATION_TIME)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        reason = super()._check_reasons_to_reject(request, context)
        if reason is None and self.step_control is not None:
            own, theirs = epoch_of(self.step_control.data_for_gather), epoch_of(request.gather)
            if own is not None and theirs is not None and own != theirs:
                return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        return reason

    async def expect(self, peers: ExpectedPeers) -> None:
        """Let a group be complete as soon as these peers have met; one that is by now begins."""
        self._expected = peers
        async with self.lock_request_join_group:
            # hivemind looks at the size only when somebody joins, so one that has shrunk is looked at here
            if not self.is_looking_for_group or self.assembled_group.done():
                return
            if self.target_group_size is not None and len(self.current_followers) + 1 >= self.target_group_size:
                await self.leader_assemble_group()

    async def leader_assemble_group(self) -> GroupInfo:
        return self._await_trigger(await super().leader_assemble_group())

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> GroupInfo:
        return self._await_trigger(await super().follower_assemble_group(leader, msg))

    def _await_trigger(self, group: GroupInfo) -> GroupInfo:
        self._awaiting_trigger[group.group_id] = self.step_control, asyncio.Event()
        sent = zip(group.peer_ids, group.gathered, strict=True)
        self._peers_of_ours.update(peer for peer, gather in sent if epoch_of(gather) is not None)
        return group

    def is_of_ours(self, peer: PeerID) -> bool:
        """Whether a peer is known not to be one of plain hivemind, since it has been in a group with this one."""
        return peer in self._peers_of_ours

    def begin(self, group_id: bytes) -> None:
        """Let those in that have sent data for a group already."""
        _, begun = self._awaiting_trigger.pop(group_id, (None, asyncio.Event()))
        begun.set()

    def end(self, step: StepControl) -> None:
        """Send those away who wait for a group of that round: it is over, or it has failed."""
        for group_id in [group_id for group_id, (own, _) in self._awaiting_trigger.items() if own is step]:
            self.begin(group_id)

    async def wait_for_trigger(self, group_id: bytes) -> None:
        """Return when this peer has begun to average with a group, at once if it waits for no trigger.

        :param group_id: as whoever sends data names it, maybe with a suffix for a phase of the round
        """
        waiting = [begun for own_id, (_, begun) in self._awaiting_trigger.items() if group_id.startswith(own_id)]
        for begun in waiting:
            await begun.wait()
