"""A comparison while it comes about: in the cell that compares, or in the last line of a terminal.

All of it happens on the thread that compares, between two looks at the training.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

from hivenb.view import display, words
from hivenb.view.shown_comparison import ShownComparison
from hivenb.view.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable

#: Share of the time that drawing may take, and the seconds between two pictures at most.
_DRAWING_SHARE, _LONGEST_PAUSE = 0.02, 5.0

#: Seconds between two tables at least, unless another training has its turn.
_INTERVAL = 1.0


class Watcher(Protocol):
    """Shows a comparison again and again."""

    def show(self, comparison: ShownComparison) -> None:
        """Show how far it is."""

    def finish(self, comparison: ShownComparison) -> None:
        """Show it for the last time."""


def watcher() -> Watcher:
    """The one for the place where this runs."""
    return InCell() if display.in_notebook() else InTerminal(Terminal(sys.stderr))


class InCell:
    """Under the cell that runs: one output, which is replaced."""

    def __init__(self) -> None:
        self._update: Callable[[dict[str, str]], None] | None = None
        self._began = time.monotonic()
        self._due = self._picture_due = 0.0
        self._finished = -1
        self._png: bytes | None = None

    def show(self, comparison: ShownComparison) -> None:
        """Show table and curves, unless they have been shown just now."""
        now, finished = time.monotonic(), len(comparison.outcomes)
        if finished == self._finished and now < self._due:
            return
        if finished != self._finished or now >= self._picture_due:
            self._png = comparison.png()
            took = time.monotonic() - now
            self._picture_due = now + min(max(took / _DRAWING_SHARE, _INTERVAL), _LONGEST_PAUSE)
        self._finished, self._due = finished, now + _INTERVAL
        count = words.counted(len(comparison.entries), "training")
        passed = words.duration(now - self._began)
        self._put(comparison, f"{finished} of {count} finished, after {passed}. An interrupt keeps what is finished.")

    def finish(self, comparison: ShownComparison) -> None:
        """Show it as it stays."""
        self._png = comparison.png()
        self._put(comparison, "")
        comparison.is_shown_already()

    def _put(self, comparison: ShownComparison, note: str) -> None:
        text = f"{comparison}\n{note}".strip()
        bundle = {"text/plain": text, "text/html": comparison.as_html(self._png, note)}
        if self._update is None:
            self._update = display.show_bundle(bundle)
        else:
            self._update(bundle)


class InTerminal:
    """In the last line of a terminal, and a line for each training that has ended."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._said: set[str] = set()

    def show(self, comparison: ShownComparison) -> None:
        """Say how the training at work goes, and of a new outcome what it is."""
        for entry in comparison.outcomes:
            if entry.name not in self._said:
                self._said.add(entry.name)
                alone = ShownComparison((entry,))
                named = zip(alone.head[1:], alone.row(entry)[1:], strict=True)
                self._terminal.say(f"{entry.name}: " + ", ".join(f"{title} {cell}" for title, cell in named))
        at_work = next((entry for entry in comparison.unfinished if entry.error is None), None)
        if at_work is not None:
            loss = at_work.snapshot.last("loss") if at_work.snapshot is not None else None
            said = "" if loss is None else f", training loss {words.value(loss)}"
            self._terminal.show(f"{at_work.name}: {at_work.words}{said}")

    def finish(self, comparison: ShownComparison) -> None:
        """Say what is not finished."""
        for entry in comparison.unfinished:
            self._terminal.say(f"{entry.name}: {entry.words}")
