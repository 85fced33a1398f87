"""Loading what a program needs, at any moment of which Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from hivenb._library_warnings import library_warnings_ignored

#: The exit code of a program that was interrupted, as shells have it.
INTERRUPTED = 130


def say_interrupted() -> None:
    """Say why the program ends."""
    sys.stderr.write("\nhivenb: interrupted\n")
    sys.stderr.flush()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Let an interrupt end this process at once. For the main thread, while there is nothing yet to be closed.

    Python would raise it in whatever is imported just then. Modules that are content without another one go on as if
    that were not installed, and C++ makes it an ``ImportError``: one in ten was lost, or ended in a traceback.
    """
    previous = signal.signal(signal.SIGINT, _end)
    try:
        with library_warnings_ignored():
            yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(*_: Any) -> None:
    say_interrupted()
    sys.stdout.flush()
    os._exit(INTERRUPTED)
