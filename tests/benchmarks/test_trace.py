"""What is made of the events of a swarm: a trace, and what the ends of epochs are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_epochs import END, Event, chrome_trace, read, shares

TRAINING, GRADIENTS = 11, 12

#: Two ends of epochs, of which the first one began too early to count; microseconds.
EVENTS = [
    Event(END, 1, TRAINING, 0.0, 50_000.0),
    Event("compute", 1, TRAINING, 60_000.0, 40_000.0),
    Event("matchmaking", 2, GRADIENTS, 70_000.0, 50_000.0),
    Event(END, 1, TRAINING, 100_000.0, 100_000.0),
    Event("exchange gradients", 2, GRADIENTS, 120_000.0, 30_000.0),
]


def test_what_lies_within_the_ends_of_epochs_is_added_up() -> None:
    found = {row.name: (row.seconds, row.most) for row in shares(0, EVENTS, since=60_000.0)}
    assert found == {
        END: pytest.approx((0.1, 0.1)),
        "matchmaking": pytest.approx((0.02, 0.02)),
        "exchange gradients": pytest.approx((0.03, 0.03)),
    }


def test_a_trace_shows_each_peer_with_its_threads_from_a_moment_on(tmp_path: Path) -> None:
    (tmp_path / "3-1.jsonl").write_text("".join(f"{json.dumps(list(vars(one).values()))}\n" for one in EVENTS))
    found = read(tmp_path)
    assert found == {3: sorted(EVENTS, key=lambda one: one.began)}
    shown = chrome_trace(found, since=60_000.0)["traceEvents"]
    names = {event["args"]["name"] for event in shown if event["ph"] == "M"}
    assert names == {"peer 3", "training", "gradients"}
    assert [(event["name"], event["ts"]) for event in shown if event["ph"] == "X"] == [
        ("compute", 0.0),
        ("matchmaking", 10_000.0),
        (END, 40_000.0),
        ("exchange gradients", 60_000.0),
    ]
