from __future__ import annotations

import multiprocessing as mp
import os

import pytest

from hivenb.engine.trust.reliability import LONGEST_REASON, MOST_NAMED, MOST_REFUSED, RoundReport, RoundReportPipe

A, B = b"a", b"b"


def test_what_was_told_is_taken_once():
    book = RoundReportPipe()
    round_reports = [RoundReport(3, took_part=frozenset({A}), seconds=1.5), RoundReport(4, refused=((B, "nan"),))]
    for report in round_reports:
        book.tell(report)
    assert book.take() == round_reports
    assert book.take() == []


@pytest.mark.process
def test_another_process_tells_it():
    book = RoundReportPipe()
    child = mp.get_context("fork").Process(target=book.tell, args=(RoundReport(1, missed=frozenset({A})),))
    child.start()
    child.join(20)
    assert book.take() == [RoundReport(1, missed=frozenset({A}))]


def test_nobody_waits_for_a_reader_and_all_comes_in_whole_pieces():
    book = RoundReportPipe()
    many, *others = (frozenset(os.urandom(40) for _ in range(300)) for _ in range(4))
    report = RoundReport(1, many, *others, tuple((peer, "x" * 1000) for peer in many))
    for _ in range(1000):
        book.tell(report)
    taken = book.take()
    assert 2 <= len(taken) < 1000
    for one in taken:
        assert len(one.took_part) == len(one.missed) == len(one.stalled) == len(one.overstated) == MOST_NAMED
        assert len(one.refused) == MOST_REFUSED
        assert all(len(reason) == LONGEST_REASON for _, reason in one.refused)
    book.tell(RoundReport(2))
    assert book.take() == [RoundReport(2)]
