"""Tasks of an averager's loop: held until they are done, and no complaint of those that ended as they should."""

from __future__ import annotations

import asyncio
from typing import Any


def complain_unless_ended(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Of an error that nobody else has seen.

    Before Python 3.12, asyncio/streams.py takes a request that is cancelled for such an error; and
    hivemind/p2p/p2p_daemon.py does not look at the end of a stream that comes while the answer to it ends.
    """
    if not isinstance(context.get("exception"), (asyncio.CancelledError, asyncio.IncompleteReadError)):
        loop.default_exception_handler(context)


def keep_tasks_alive() -> None:
    """Let the running loop hold each of its tasks until it is done, and complain of no end; may be called again.

    asyncio holds them weakly, and hivemind/averaging/averager.py:_run_internal only the newest one. A round that has
    met its peers and waits for its trigger, or a peer's request that waits for that round, would be collected as
    garbage: the peer then waits for averaging_timeout, and the others for a peer that has never really left.
    """
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_make_kept_task)
    loop.set_exception_handler(complain_unless_ended)


_kept_tasks: set[asyncio.Task[Any]] = set()


def _make_kept_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **kwargs)
    _kept_tasks.add(task)
    task.add_done_callback(_kept_tasks.discard)
    return task
