from __future__ import annotations

import gc
import weakref

from hivenb.options import Options
from hivenb.peers.followed_run import Followers

FIRST, SECOND, THIRD = (Options(target_batch_size=size) for size in (64, 128, 256))


class Note:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, options):
        self.told.append(options)


def test_followers_hear_what_a_run_trains_with_from_when_it_begins():
    followers, early, late = Followers(), Note(), Note()
    followers.add(early)
    assert early.told == []
    followers.tell(FIRST)
    followers.add(late)
    followers.tell(SECOND)
    assert early.told == late.told == [FIRST, SECOND]


def test_who_comes_when_a_run_has_ended_waits_for_its_next_beginning():
    followers, early, late = Followers(), Note(), Note()
    followers.add(early)
    followers.tell(FIRST)
    followers.end()
    followers.add(late)
    assert (early.told, late.told) == ([FIRST], [])
    followers.tell(THIRD)
    assert (early.told, late.told) == ([FIRST, THIRD], [THIRD])


def test_they_are_not_kept_alive():
    followers, gone = Followers(), Note()
    followers.add(gone)
    seen = weakref.ref(gone)
    del gone
    gc.collect()
    assert seen() is None
    followers.tell(FIRST)
