"""Who is there of those who have reported, as told by real DHTs that live, were killed, or no longer answer."""

from __future__ import annotations

import os
import signal
import time
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
from tiny import LOOPBACK

from hivenb.engine.network.dht import DHT
from hivenb.engine.process.child import shared_locks_held
from hivenb.engine.progress.failure_detector import MAX_QUESTIONS, MAX_UNREACHED, FailureDetector
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


@pytest.fixture(params=[False, True], ids=["node", "client"])
def is_client(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def mortal_dht(dht: DHT, is_client: bool) -> Iterator[DHT]:
    addresses = [str(a) for a in dht.get_visible_maddrs()]
    network = {"client_mode": True} if is_client else LOOPBACK
    opened = DHT(start=True, initial_peers=addresses, **network)
    yield opened
    if opened.is_alive():
        opened.shutdown()


def was_reached(detector: FailureDetector, peer: DHT) -> bool:
    return detector._sightings[peer.peer_id.to_bytes()].was_reached


def processes(own: DHT) -> list[psutil.Process]:
    assert own.pid is not None
    main = psutil.Process(own.pid)
    return [main, *main.children(recursive=True)]


def test_whoever_was_killed_is_gone_until_it_reports_again(
    dht: DHT, joining_dht: DHT, mortal_dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector = FailureDetector(dht)
    reports = [report(joining_dht), report(mortal_dht, client_mode=is_client)]
    eventually(
        lambda: (
            detector.find_gone(reports, GONE_AFTER) or all(was_reached(detector, o) for o in (joining_dht, mortal_dht))
        )
    )
    assert detector.find_gone(reports, GONE_AFTER) == frozenset()
    mortal_dht.kill()
    eventually(lambda: detector.find_gone(reports, GONE_AFTER) == {mortal_dht.peer_id.to_bytes()})
    newer = report(mortal_dht, client_mode=is_client)
    assert detector.find_gone([report(joining_dht), newer], GONE_AFTER) == frozenset()
    assert detector.find_gone([report(joining_dht)], GONE_AFTER) == frozenset(), "not on the list any more"


def test_whoever_does_not_answer_for_long_is_gone(
    dht: DHT, mortal_dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    """As when its network is cut: the connection stays."""
    detector, reports = FailureDetector(dht), [report(mortal_dht, client_mode=is_client)]
    eventually(lambda: detector.find_gone(reports, GONE_AFTER) or was_reached(detector, mortal_dht))
    stopped = processes(mortal_dht)
    with shared_locks_held():
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: detector.find_gone(reports, GONE_AFTER) == {mortal_dht.peer_id.to_bytes()})
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)


def test_a_report_that_is_seen_late_says_nothing_of_now(
    dht: DHT, mortal_dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector, first, last = FailureDetector(dht), report(mortal_dht, is_client), report(mortal_dht, is_client)
    eventually(lambda: detector.find_gone([first], GONE_AFTER) or was_reached(detector, mortal_dht))
    mortal_dht.kill()
    eventually(lambda: bool(detector.find_gone([first], GONE_AFTER)))
    assert detector.find_gone([last], GONE_AFTER) == {mortal_dht.peer_id.to_bytes()}


def test_one_whose_reports_come_before_its_answers_is_reached_all_the_same(
    dht: DHT, mortal_dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector = FailureDetector(dht)
    eventually(
        lambda: detector.find_gone([report(mortal_dht, is_client)], GONE_AFTER) or was_reached(detector, mortal_dht)
    )


def test_whoever_could_never_be_reached_may_be_there_for_others(
    dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector = FailureDetector(dht)
    stranger = report(PeerID(b"\x12\x20" + bytes(range(32))), client_mode=is_client)
    detector.find_gone([stranger], GONE_AFTER)
    first = detector._sightings[stranger.peer_id].answer
    assert first is not None
    eventually(first.done)
    for _ in range(3):
        assert detector.find_gone([stranger], GONE_AFTER) == frozenset()


def test_whoever_can_not_be_reached_and_reports_no_more_was_gone_before(
    dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector = FailureDetector(dht)
    dead = report(PeerID(b"\x12\x20" + bytes(range(32))), client_mode=is_client)
    eventually(lambda: detector.find_gone([dead], GONE_AFTER) == {dead.peer_id})


def test_one_that_a_look_misses_is_remembered(
    dht: DHT, mortal_dht: DHT, is_client: bool, eventually: Callable[..., None]
) -> None:
    detector, reports = FailureDetector(dht), [report(mortal_dht, is_client)]
    eventually(lambda: detector.find_gone(reports, GONE_AFTER) or was_reached(detector, mortal_dht))
    assert detector.find_gone([], GONE_AFTER) == frozenset()
    assert was_reached(detector, mortal_dht)


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


def test_nobody_is_asked_for_a_silence_in_which_nobody_listened(eventually: Callable[..., None]) -> None:
    """In a large swarm there are seconds between two looks at the reports, and all would be asked before each."""
    asked: list[float] = []

    def be_asked(question: partial[Any], return_future: bool) -> Future[float]:
        asked.append(time.monotonic())
        answered: Future[float] = Future()
        answered.set_result(0.01)
        return answered

    detector = FailureDetector(cast(Any, SimpleNamespace(run_coroutine=be_asked)))
    peer = PeerID(b"\x12\x20" + bytes(32))

    first = report(peer)
    eventually(lambda: detector.find_gone([first], GONE_AFTER, 0.2) or detector.round_trip > 0)
    count = len(asked)
    newest = report(peer)
    read_at = time.monotonic()
    detector.find_gone([newest], GONE_AFTER, 0.2)
    time.sleep(0.5)
    detector.find_gone([newest], GONE_AFTER, 0.2, unread=time.monotonic() - read_at)
    assert len(asked) == count
    detector.find_gone([newest], GONE_AFTER, 0.2)
    assert len(asked) == count + 1


def test_no_round_waits_for_one_that_has_never_answered(dht: DHT, joining_dht: DHT, eventually: Any) -> None:
    detector = FailureDetector(dht)
    nobody = PeerID(b"\x12\x20" + bytes(range(32)))

    def looks() -> list[bool]:
        assert detector.find_gone([report(nobody), report(joining_dht)], GONE_AFTER) == frozenset()
        return [detector.in_doubt(peer.to_bytes()) for peer in (nobody, joining_dht.peer_id)]

    assert looks() == [False, False], "before it was asked"
    eventually(lambda: looks() == [True, False])


def test_of_a_flood_no_more_are_counted_than_can_be_asked(dht: DHT, joining_dht: DHT, eventually: Any) -> None:
    detector = FailureDetector(dht)
    eventually(lambda: detector.find_gone([report(joining_dht)], GONE_AFTER) or was_reached(detector, joining_dht))
    flood = [report(PeerID(number.to_bytes(2, "big") + b"x" * 32)) for number in range(10 * MAX_UNREACHED)]
    detector.find_gone([*flood, report(joining_dht)], GONE_AFTER)
    too_many = detector.too_many()
    assert len(too_many) == 9 * MAX_UNREACHED
    assert joining_dht.peer_id.to_bytes() not in too_many
    assert detector.in_doubt(flood[0].peer_id), "before it was asked"
    assert not detector.in_doubt(joining_dht.peer_id.to_bytes())
