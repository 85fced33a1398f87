"""A terminal, or a file in place of one: lines that stay, and a last line that is written over."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from hivenb.system.safe_text import printable

#: Seconds between two passing lines where each of them stays.
INTERVAL = 5.0


class Terminal:
    """Writes lines that stay and, below them, one line that tells how things are going.

    Where nothing can be written over, as in a file or a pipe, the passing line stays too, but is written only now
    and then. For one thread.

    :param stream: where to write; by default standard output
    :param interval: seconds between two passing lines where each of them stays
    """

    def __init__(self, stream: TextIO | None = None, interval: float = INTERVAL):
        self._stream = sys.stdout if stream is None else stream
        self._interval = interval
        self._can_write_over = getattr(self._stream, "isatty", bool)() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._last_time = float("-inf")

    @property
    def width(self) -> int | None:
        """Characters that a passing line may have; ``None`` where it stays, and may be as long as it is."""
        # one less: after a character in the last column, some terminals have gone on to the next line
        return shutil.get_terminal_size().columns - 1 if self._can_write_over else None

    def say(self, text: str = "") -> None:
        """Write a line, or several, that stay."""
        self._erase()
        self._write(printable(text) + "\n")

    def show(self, line: str) -> None:
        """Write the line that tells how things are going over the last one of its kind."""
        line = printable(line)
        if line == self._shown:
            return
        if self.width is not None:
            line = line[: self.width]
            self._write("\r" + line.ljust(len(self._shown)))
            self._shown = line
        elif time.monotonic() >= self._last_time + self._interval:
            self._write(line + "\n")
            self._shown = line
            self._last_time = time.monotonic()

    def _erase(self) -> None:
        if self._can_write_over and self._shown:
            self._write("\r" + " " * len(self._shown) + "\r")
        self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
