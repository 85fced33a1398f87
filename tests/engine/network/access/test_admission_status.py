"""A peer whom nobody lets in any more knows why; one whom a single member lies to does not believe it."""

from __future__ import annotations

import time

import pytest

from hivenb.engine.network.access.guard import (
    BANNED,
    EXPIRED,
    REFUSALS_UNTIL,
    STRANGER,
    UNANSWERED_FOR,
    AdmissionStatus,
)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by as long as nobody may have answered."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + UNANSWERED_FOR + 1)


def refused(reason: str, times: int = REFUSALS_UNTIL) -> AdmissionStatus:
    status = AdmissionStatus()
    for _ in range(times):
        status.note_refusal(reason)
    return status


@pytest.mark.parametrize("reason", [BANNED, EXPIRED])
def test_it_is_out_when_all_say_so(request: pytest.FixtureRequest, reason: str) -> None:
    status = refused(reason)
    assert status.why_excluded is None, "others may answer yet"
    request.getfixturevalue("later")
    assert status.why_excluded == reason
    status.note_answer()
    assert status.why_excluded is None


@pytest.mark.usefixtures("later")
def test_silence_alone_and_what_strangers_say_is_nothing() -> None:
    assert AdmissionStatus().why_excluded is None
    assert refused(STRANGER).why_excluded is None
    assert refused("").why_excluded is None


def test_one_refusal_is_not_enough(request: pytest.FixtureRequest) -> None:
    status = refused(BANNED, REFUSALS_UNTIL - 1)
    request.getfixturevalue("later")
    assert status.why_excluded is None
