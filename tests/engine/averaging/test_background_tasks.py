from __future__ import annotations

import asyncio
import gc
import weakref

import uvloop

from hivenb.engine.averaging.averager import _background_tasks, keep_tasks_alive


async def survives_a_collection() -> bool:
    """Whether a task that waits for what only itself knows of, like a round for its trigger, is still there."""

    async def wait_for_a_trigger() -> None:
        await asyncio.get_running_loop().create_future()

    task = weakref.ref(asyncio.create_task(wait_for_a_trigger()))
    await asyncio.sleep(0)
    gc.collect()
    alive = task()
    if alive is None:
        return False
    alive.cancel()
    await asyncio.wait([alive])
    return True


def test_a_waiting_round_is_not_garbage_in_an_averager():
    async def main() -> bool:
        keep_tasks_alive()
        keep_tasks_alive()
        return await survives_a_collection()

    others = set(_background_tasks)  # of swarms in memory, whose loops were closed with tasks that wait
    for new_loop in (uvloop.new_event_loop, asyncio.new_event_loop):
        loop = new_loop()
        try:
            assert loop.run_until_complete(main())
        finally:
            loop.close()
    assert _background_tasks <= others


def test_without_our_help_it_is():
    """When this fails, asyncio holds its tasks, and there is nothing left for us to do."""
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        assert not loop.run_until_complete(survives_a_collection())
    finally:
        loop.close()
