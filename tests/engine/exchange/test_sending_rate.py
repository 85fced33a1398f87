"""What a line can send is the highest rate of the last rounds at which this machine has sent for a while."""

from __future__ import annotations

import asyncio
import socket
import time

import psutil
import pytest
from hivemind.utils import MSGPackSerializer

from hivenb.engine.exchange import sending
from hivenb.engine.exchange.sending import LOOKS, REMEMBERED, SAYS_NOTHING, SendingRate, bytes_sent
from hivenb.engine.matchmaking.group_records import is_readable, marked

#: Seconds between two looks in these tests.
EVERY = 0.01


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "LOOK_EVERY", EVERY)


def run_round(
    rate: SendingRate, monkeypatch: pytest.MonkeyPatch, *megabits: float, seconds: float = 3 * LOOKS * EVERY
) -> None:
    """A round during which each interface sends so much a second."""
    began = time.monotonic()

    def sent() -> dict[str, int]:
        passed = time.monotonic() - began
        return {f"eth{number}": int(one * passed / 8e-6) for number, one in enumerate(megabits)}

    async def watch() -> None:
        async with rate.watched():
            await asyncio.sleep(seconds)

    monkeypatch.setattr(sending, "bytes_sent", sent)
    asyncio.run(watch())


def test_a_round_shows_what_is_sent_meanwhile(monkeypatch):
    rate = SendingRate()
    assert rate.megabits is None
    run_round(rate, monkeypatch, 20.0)
    assert rate.megabits == pytest.approx(20.0, rel=0.05)


def test_what_a_tunnel_sends_counts_once(monkeypatch):
    rate = SendingRate()
    run_round(rate, monkeypatch, 20.0, 21.0)
    assert rate.megabits == pytest.approx(21.0, rel=0.05)


@pytest.mark.parametrize(
    ("megabits", "seconds"), [((20.0,), EVERY), ((SAYS_NOTHING / 2,), 3 * LOOKS * EVERY), ((), 3 * LOOKS * EVERY)]
)
def test_short_and_idle_rounds_say_nothing(monkeypatch, megabits, seconds):
    rate = SendingRate()
    run_round(rate, monkeypatch, *megabits, seconds=seconds)
    assert rate.megabits is None


def test_the_highest_of_the_last_rounds_counts(monkeypatch):
    rate = SendingRate()
    run_round(rate, monkeypatch, 20.0)
    for _ in range(REMEMBERED - 1):
        run_round(rate, monkeypatch, 5.0)
    assert rate.megabits == pytest.approx(20.0, rel=0.05), "it waited for others"
    run_round(rate, monkeypatch, 5.0)
    assert rate.megabits == pytest.approx(5.0, rel=0.05), "its line has changed"


def test_what_this_machine_sends_to_itself_is_not_seen():
    before = bytes_sent()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        here.sendall(bytes(1000))
    assert psutil.net_io_counters(pernic=True)["lo"].bytes_sent >= 1000
    assert "lo" not in before
    assert set(before) == set(bytes_sent())


def test_where_nothing_tells_nothing_is_known(monkeypatch):
    def refuse(**kwargs):
        raise FileNotFoundError("/proc/net/dev")

    monkeypatch.setattr(sending.psutil, "net_io_counters", refuse)
    assert bytes_sent() == {}


@pytest.mark.parametrize(("own", "told"), [(None, 20.0), (5.0, 5.0), (0.0, 0.0)])
def test_the_group_is_told_unless_the_user_has_said_it(own, told):
    plain = MSGPackSerializer.dumps([own, 0, MSGPackSerializer.dumps(3)])
    gather = marked(plain, megabits=20.0)
    assert is_readable(gather)
    assert MSGPackSerializer.loads(gather)[0] == told
    assert MSGPackSerializer.loads(marked(plain))[0] == own
