from __future__ import annotations

import gc
import threading
import weakref

import pytest

from hivenb.errors import OptionsError
from hivenb.options import Options
from hivenb.peers.followed_run import Followers, pack_options

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


class Far:
    """Is in another process."""

    def begin(self, options):
        pack_options(options)


def test_options_that_cannot_be_sent_are_told_to_nobody():
    followers, lock = Followers(), threading.Lock()
    bad = FIRST.replace(scheduler_fn=lambda optimizer: lock)
    followers.check(bad)  # nobody is there to hear of them
    far, late = Far(), Note()
    followers.add(far)
    followers.tell(FIRST)
    for ask in (followers.check, followers.tell):
        with pytest.raises(OptionsError, match=r"scheduler_fn=.* cannot be sent to the peers on this machine"):
            ask(bad)
    followers.add(late)
    assert late.told == [FIRST]


def test_they_are_not_kept_alive():
    followers, gone = Followers(), Note()
    followers.add(gone)
    seen = weakref.ref(gone)
    del gone
    gc.collect()
    assert seen() is None
    followers.tell(FIRST)
