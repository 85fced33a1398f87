"""Who is there of those who have reported, as told by real DHTs that live, were killed, or no longer answer.

All else that a detector makes of answers: tests/in_memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from hivenb.engine.network.dht import DHT
from hivenb.engine.process.child import shared_locks_held
from hivenb.engine.progress.failure_detector import MAX_QUESTIONS, FailureDetector
from hivenb.engine.progress.tracker import GONE_AFTER


def report(peer: DHT | PeerID, client_mode: bool = False) -> LocalTrainingProgress:
    peer_id = peer if isinstance(peer, PeerID) else peer.peer_id
    return LocalTrainingProgress(
        peer_id=peer_id.to_bytes(),
        epoch=0,
        samples_accumulated=0,
        samples_per_second=1.0,
        time=get_dht_time(),
        client_mode=client_mode,
    )


@pytest.fixture
def mortal_client(dht: DHT) -> Iterator[DHT]:
    """One that nobody can reach: it has to have dialled itself."""
    opened = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], client_mode=True)
    yield opened
    opened.shutdown()  # also one that was killed, and is just being started anew


def was_reached(detector: FailureDetector, peer: DHT) -> bool:
    return detector._sightings[peer.peer_id.to_bytes()].was_reached


def processes(own: DHT) -> list[psutil.Process]:
    assert own.pid is not None
    main = psutil.Process(own.pid)
    return [main, *main.children(recursive=True)]


def test_whoever_was_killed_is_gone_until_it_reports_again(
    dht: DHT, joining_dht: DHT, mortal_client: DHT, eventually: Callable[..., None]
) -> None:
    mortal_dht, detector = mortal_client, FailureDetector(dht)
    reports = [report(joining_dht), report(mortal_dht, client_mode=True)]
    eventually(
        lambda: (
            detector.find_gone(reports, GONE_AFTER) or all(was_reached(detector, o) for o in (joining_dht, mortal_dht))
        )
    )
    assert detector.find_gone(reports, GONE_AFTER) == frozenset()
    mortal_dht.kill()
    eventually(lambda: detector.find_gone(reports, GONE_AFTER) == {mortal_dht.peer_id.to_bytes()})
    newer = report(mortal_dht, client_mode=True)
    assert detector.find_gone([report(joining_dht), newer], GONE_AFTER) == frozenset()
    assert detector.find_gone([report(joining_dht)], GONE_AFTER) == frozenset(), "not on the list any more"


def test_whoever_does_not_answer_for_long_is_gone(dht: DHT, joining_dht: DHT, eventually: Callable[..., None]) -> None:
    """As when its network is cut: the connection stays."""
    detector, reports = FailureDetector(dht), [report(joining_dht)]
    eventually(lambda: detector.find_gone(reports, GONE_AFTER) or was_reached(detector, joining_dht))
    stopped = processes(joining_dht)
    with shared_locks_held():
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: detector.find_gone(reports, GONE_AFTER) == {joining_dht.peer_id.to_bytes()})
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)


def test_whoever_was_not_asked_for_want_of_room_comes_first() -> None:
    """In a large swarm, those at the end of the list would never be asked."""
    questions: list[Future[bool]] = []

    def be_asked(question: partial[Any], return_future: bool) -> Future[bool]:
        asked.append(question.args[0].to_bytes())
        questions.append(Future())
        return questions[-1]

    asked: list[bytes] = []
    detector = FailureDetector(cast(Any, SimpleNamespace(run_coroutine=be_asked)))
    reports = [report(PeerID(b"\x12\x20" + bytes([number] * 32))) for number in range(MAX_QUESTIONS + 2)]
    detector.find_gone(reports, GONE_AFTER, ask_after=0.0)
    assert asked == [one.peer_id for one in reports[:MAX_QUESTIONS]]
    for question in questions:
        question.set_result(True)
    detector.find_gone(reports, GONE_AFTER, ask_after=0.0)
    assert asked[MAX_QUESTIONS : MAX_QUESTIONS + 2] == [one.peer_id for one in reports[MAX_QUESTIONS:]]


@pytest.mark.parametrize(
    ("ahead", "under_way", "expected"),
    [
        (0.0, 0.3, -0.3),  # what a peer has done since its report counts
        (2.5, 0.3, 0.0),
        (-2.5, 0.3, 0.0),
        (-120.0, 0.3, 0.0),
        (0.05, 0.0, 0.05),
    ],
    ids=["the same", "ahead", "behind", "far behind", "nearly the same"],
)
def test_reports_by_another_clock_are_read_by_this_one(ahead: float, under_way: float, expected: float) -> None:
    nobody_answers = SimpleNamespace(run_coroutine=lambda *_, **__: Future())
    detector, peer = FailureDetector(cast(Any, nobody_answers)), PeerID(b"\x12\x20" + bytes(32))
    made = report(peer)
    for older in (1.0, 0.0):  # the quickest one tells
        made.time = get_dht_time() + ahead - under_way - older
        detector.find_gone([made], 100.0, 1000.0)
    read = detector.by_own_clock(made)
    assert read.time - get_dht_time() == pytest.approx(expected, abs=0.05)
    assert {**read.dict(), "time": 0.0} == {**made.dict(), "time": 0.0}
    assert detector.by_own_clock(other := report(PeerID(b"\x12\x20" + bytes(31) + b"1"))) is other
