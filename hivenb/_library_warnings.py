"""Warnings of other libraries, for which whoever uses hivenb can do nothing.

With ``python -W error``, or ``filterwarnings = error`` of pytest, each would end what is at work: an import, a process,
a run.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_numbers = itertools.count()


@contextlib.contextmanager
def library_warnings_ignored() -> Iterator[None]:
    """Ignore all warnings meanwhile, and leave the filters as they are otherwise.

    Not :func:`warnings.catch_warnings`, which takes back all filters that were added meanwhile: torch, Lightning and
    hivemind add some as they are imported, which are to stay.
    """
    warnings.filterwarnings("ignore", message=f"(?#hivenb {next(_numbers)})")  # a comment, so that any message matches
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody else has set all filters anew
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


class _OnThisThread:
    """In place of the pattern of a filter: matches what that does, on the thread that has made this alone.

    :param pattern: a compiled one, a text that has to be the same, or ``None`` for all
    """

    def __init__(self, pattern: Any) -> None:
        self._thread, self._pattern = threading.get_ident(), pattern
        self.is_over = False

    def match(self, text: str) -> bool:
        if self.is_over or threading.get_ident() != self._thread:
            return False
        if isinstance(self._pattern, str):
            return text == self._pattern
        return self._pattern is None or bool(self._pattern.match(text))


@contextlib.contextmanager
def no_errors_on_this_thread() -> Iterator[None]:
    """Let warnings on this thread, which nobody looks at, be shown meanwhile where the filters make errors of them.

    Filters are those of the process. Each that makes an error is preceded by one for this thread, and stays itself.
    """
    ours = []
    for one in [known for known in warnings.filters if known[0] == "error"]:
        shown = ("default", _OnThisThread(one[1]), *one[2:])
        warnings.filters.insert(warnings.filters.index(one), shown)  # type: ignore[attr-defined]
        ours.append(shown)
    try:
        yield
    finally:
        for shown in ours:
            shown[1].is_over = True  # also where somebody has set all filters anew, and may set back the old ones
            with contextlib.suppress(ValueError):
                warnings.filters.remove(shown)  # type: ignore[attr-defined]


def raise_no_warnings() -> None:
    """Let warnings be no errors in this process, which is a child of ours: they are shown, which is in its log.

    ``python -W error`` asks for errors in the process that somebody looks at. In a child, the first of hivemind's would
    end the swarm.
    """
    for index, (action, *rest) in enumerate(warnings.filters):
        if action == "error":
            warnings.filters[index] = ("default", *rest)  # type: ignore[index]
