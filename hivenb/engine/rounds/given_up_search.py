"""What a peer that gives up its search asks its leader, which may have begun a round with it and not know that yet."""

from __future__ import annotations

import contextlib
from typing import Any

from hivemind.p2p import P2PDaemonError, P2PHandlerError, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import as_aiter

logger = get_logger(__name__)

#: Seconds that a leader may take to say whether it has begun, and then to say with whom.
ANSWERED_WITHIN = 2.0

#: What is raised where a peer cannot be reached.
UNREACHABLE = (P2PDaemonError, P2PHandlerError, OSError, EOFError)

# of messages whose group has no id: the peer that leaves does not know in which one it may be
_GIVEN_UP = averaging_pb2.AveragingData(code=averaging_pb2.GROUP_DISBANDED)
_HAS_BEGUN = averaging_pb2.AveragingData(code=averaging_pb2.BEGIN_ALLREDUCE)


async def has_begun(leader: StubBase) -> bool:
    """Tell a leader that this peer has given up its search.

    :param leader: a stub of its averager
    :returns: whether it has begun with this peer, and will say so in its answer to the request to be let in; not if it
      cannot be reached, or is one of plain hivemind
    """
    try:
        async with contextlib.aclosing(await leader.rpc_aggregate_part(as_aiter(_GIVEN_UP))) as answers:
            return bool(await anext(answers, None) == _HAS_BEGUN)
    except UNREACHABLE as e:
        logger.debug(f"A leader could not be told that a search was given up: {e!r}")
    return False


def is_given_up(message: Any) -> bool:
    """Whether that is what a peer tells its leader."""
    return bool(message == _GIVEN_UP)


def answer(has_begun: bool) -> averaging_pb2.AveragingData:
    """What a leader says then."""
    return _HAS_BEGUN if has_begun else averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED)
