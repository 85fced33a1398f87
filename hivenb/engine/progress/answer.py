"""An answer of the DHT, for a loop that goes on without one."""

from __future__ import annotations

import asyncio
from typing import Any

from hivenb.errors import ProcessEndedError

#: In place of an answer that will not come.
UNANSWERED = object()


async def answer_of(future: Any, pause: float) -> Any:
    """What the DHT answers; :data:`UNANSWERED` if it has ended meanwhile, to be started anew or not.

    :param pause: seconds to wait then, before it is asked again
    """
    try:
        return await future
    except ProcessEndedError:
        await asyncio.sleep(pause)
        return UNANSWERED
