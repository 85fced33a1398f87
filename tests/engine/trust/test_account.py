from __future__ import annotations

import multiprocessing as mp
import os

import pytest

from hivenb.engine.trust.conduct import LONGEST_REASON, MOST_NAMED, MOST_REFUSED, Account, AccountBook

A, B = b"a", b"b"


def test_what_was_told_is_taken_once():
    book = AccountBook()
    accounts = [Account(3, took_part=frozenset({A}), seconds=1.5), Account(4, refused=((B, "nan"),))]
    for account in accounts:
        book.tell(account)
    assert book.take() == accounts
    assert book.take() == []


@pytest.mark.process
def test_another_process_tells_it():
    book = AccountBook()
    child = mp.get_context("fork").Process(target=book.tell, args=(Account(1, missed=frozenset({A})),))
    child.start()
    child.join(20)
    assert book.take() == [Account(1, missed=frozenset({A}))]


def test_nobody_waits_for_a_reader_and_all_comes_in_whole_pieces():
    book = AccountBook()
    many, *others = (frozenset(os.urandom(40) for _ in range(300)) for _ in range(4))
    account = Account(1, many, *others, tuple((peer, "x" * 1000) for peer in many))
    for _ in range(1000):
        book.tell(account)
    taken = book.take()
    assert 2 <= len(taken) < 1000
    for one in taken:
        assert len(one.took_part) == len(one.missed) == len(one.stalled) == len(one.overstated) == MOST_NAMED
        assert len(one.refused) == MOST_REFUSED
        assert all(len(reason) == LONGEST_REASON for _, reason in one.refused)
    book.tell(Account(2))
    assert book.take() == [Account(2)]
