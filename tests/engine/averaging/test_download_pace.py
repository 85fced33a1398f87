from __future__ import annotations

import asyncio

from hivemind.p2p import PeerID

from hivenb.engine.averaging import state_download
from hivenb.engine.averaging.state_download import AT_ONCE, PERIOD, DownloadPace

A, B = PeerID(b"a"), PeerID(b"b")


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def _downloads(pace: DownloadPace, time: Time, peer: PeerID, until: float) -> int:
    count = 0
    while True:
        async with pace.turn(peer):
            if time.now > until:
                return count
            count += 1
            time.now += 0.01


def test_a_loop_of_downloads_has_its_pace_and_others_do_not_wait_for_it():
    async def main() -> None:
        time = Time()
        pace = DownloadPace(time.clock, time.sleep)
        began = time.now
        for _ in range(AT_ONCE):
            async with pace.turn(A):
                pass
        assert time.now == began, "one that joins does not wait"
        count = await _downloads(pace, time, A, began + 60.0)
        assert 50 <= count * PERIOD <= 62
        before = time.now
        async with pace.turn(B):
            assert time.now == before
        time.now += 60.0
        before = time.now
        for _ in range(AT_ONCE):
            async with pace.turn(A):
                pass
        assert time.now == before, "it begins anew"

    asyncio.run(main())


def test_a_peer_has_one_download_at_a_time_and_one_that_breaks_off_keeps_nobody_waiting():
    async def main() -> None:
        pace, at_work = DownloadPace(), []

        async def download(peer: PeerID) -> None:
            async with pace.turn(peer):
                at_work.append(peer)
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(download(peer)) for peer in (A, A, B)]
        await asyncio.sleep(0.05)
        assert at_work == [A, B]
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert at_work == [A, B, A]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert not pace._at_work

    asyncio.run(main())


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(state_download, "MOST_REMEMBERED", 10)
    time = Time()
    pace = DownloadPace(time.clock, time.sleep)
    for number in range(100):
        pace._pay(PeerID(bytes([number])))
        time.now += 0.5
    assert len(pace._paid_until) <= 10
