"""What was seen of the others in the exchanges of a round, and what is said of it."""

from __future__ import annotations

import logging

import pytest
from hivemind.p2p import PeerID

from hivenb.engine.exchange import all_reduce
from hivenb.engine.exchange.all_reduce import GroupExchange
from hivenb.engine.trust.aggregation import SampleReports, SenderWeights
from hivenb.engine.trust.reliability import ExchangeNotes

A, B, C = (PeerID(bytes([number]) * 32) for number in range(3))


def test_those_of_several_exchanges_are_those_of_one_round() -> None:
    notes = ExchangeNotes({A}, {B: "nan"}, {A: (8.0, 8.0)})
    notes.take_in(ExchangeNotes({C}, {C: "inf"}, {C: (9.0, 4.0)}))
    assert notes == ExchangeNotes({A, C}, {B: "nan", C: "inf"}, {A: (8.0, 8.0), C: (9.0, 4.0)})
    assert notes.claimed == {A: 8.0, C: 9.0}


def test_what_was_not_taken_is_said_and_nothing_else() -> None:
    notes = ExchangeNotes({A}, {B: "its norm is nan"}, {A: (8.0, 8.0), B: (9.0, 4.0), C: (1e9, 64.0)})
    lines = notes.lines(implausible={C})
    assert lines[B] == f"{B} is excluded from a round: its norm is nan"
    assert lines[C].startswith(f"{C} counts with a weight of 64 in a round, not with the 1e+09 that it claims: ")
    assert A not in lines


def test_of_one_peer_it_is_said_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = SenderWeights()
    weights.note(SampleReports(64.0, {}))
    own = GroupExchange()
    own._sender_weights = weights
    notes = ExchangeNotes(weights={A: (8.0, 8.0), B: (64.0, 21.3), C: (1e9, 64.0)})
    with caplog.at_level(logging.WARNING, "hivenb"):
        for _ in range(3):
            own.log_what_was_not_taken(notes)
        assert [record.getMessage() for record in caplog.records] == [notes.lines({C})[C]]
        monkeypatch.setattr(all_reduce, "SAY_AGAIN_AFTER", 0.0)
        own.log_what_was_not_taken(notes)
    assert len(caplog.records) == 2
