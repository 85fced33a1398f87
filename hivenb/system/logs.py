"""The log of a notebook's background work, kept instead of printed.

Whatever a background thread or a child process prints lands in whichever cell ran last. So while a swarm is open,
the records of hivemind, Lightning and hivenb that come from there are collected: those of this process directly,
those of its forked children, and whatever else these print, through a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from select import PIPE_BUF
from typing import Any, TextIO

from hivenb._fresh_locks import free_in_children
from hivenb._library_warnings import no_errors_on_this_thread
from hivenb.engine.process import child
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.system.safe_text import printable

# -- log lines -------------------------------------------------------------------------------------------------------
#
# The newest lines of a log, without what says nothing to the reader, and each once that comes again and again.


#: Lines kept; the oldest go first.
CAPACITY = 1000

#: Seconds for which a line that comes again is counted instead of written anew.
_COUNTED_FOR = 60.0

#: What hivemind's averagers say whenever one round is scheduled while another one is looked for, which is how rounds
#: in the background work; and what Lightning advertises.
_NOISE = (
    "Another look_for_group is already in progress",
    "For seamless cloud logging and experiment tracking",
    # what a run does on purpose when it was stopped in the middle of a pass: as many batches follow as were left
    "You're resuming from a checkpoint that ended before the epoch ended",
    # another start, which goes on with the model's own weights, from a file that nobody has named
    "/resume.ckpt",
)

_CLOCK = re.compile(r"(\d\d:\d\d:\d\d) (.*)", re.DOTALL)


@dataclass
class _Line:
    clock: str
    text: str
    began: float
    count: int = 1
    last: str = ""

    def __str__(self) -> str:
        line = f"{self.clock} {self.text}".lstrip()
        if self.count == 1:
            return line
        return f"{line} ({self.count:,} times{f', until {self.last}' if self.last not in ('', self.clock) else ''})"


class LogLines:
    """Keeps the newest lines. Whoever adds holds a lock; anybody may read.

    :param capacity: how many
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._lines: deque[_Line] = deque(maxlen=capacity)
        self._newest: dict[str, _Line] = {}

    def add(self, line: str) -> bool:
        """Keep a line, which may begin with the time of day.

        :returns: whether it is new; one that was there a moment ago is only counted
        """
        found = _CLOCK.match(line)
        clock, text = found.groups() if found else ("", line)
        now, known = time.monotonic(), self._newest.get(text)
        if known is not None and now - known.began <= _COUNTED_FOR:
            known.count, known.last = known.count + 1, clock
            return False
        if len(self._lines) == self._lines.maxlen and self._newest.get(self._lines[0].text) is self._lines[0]:
            del self._newest[self._lines[0].text]
        self._newest[text] = _Line(clock, text, now)
        self._lines.append(self._newest[text])
        return True

    def tail(self, count: int) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        lines = tuple(self._lines.copy())
        return tuple(str(line) for line in lines[-count:]) if count > 0 else ()


def is_noise(text: str) -> bool:
    """Whether a message is of no use to whoever reads the log."""
    return any(noise in text for noise in _NOISE)


def is_deprecation_in_a_library(category: type[Warning], filename: str) -> bool:
    """Whether a warning tells the authors of an installed package, and not the reader, to change their code."""
    deprecations = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    return issubclass(category, deprecations) and ("site-packages" in filename or "dist-packages" in filename)


def is_hint(category: type[Warning]) -> bool:
    """Whether a warning tells by its kind of what may well be meant, as Lightning's ``PossibleUserWarning`` does.

    There is one at each start of whoever has a ``validation_step`` and trains without validating.
    """
    return any(base.__name__ == "PossibleUserWarning" for base in category.__mro__)


# -- log rate --------------------------------------------------------------------------------------------------------
#
# How many lines of a kind a log takes: what others send must not push out what a person has to read.


#: Lines of a kind in a row.
AT_ONCE = 100

#: Seconds for each further one.
PERIOD = 2.0

#: Kinds that are remembered; a line of one that is not is the first of its kind.
MOST_KINDS = 512

#: What differs in lines of a kind: numbers, ids of peers, and what stands between quotation marks.
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|b'|\b\w*\d\w*\b")

#: Characters that tell a kind from another.
_SAME = 60


@dataclass
class _Kind:
    paid_until: float
    left_out: int = 0


class LogRate:
    """Says which lines are too many of their kind. Whoever asks holds a lock.

    :param clock: tells the time, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def admits(self, text: str) -> str | None:
        """A line as it is to be written, with the number of those that were left out before it.

        :param text: the line, without the time of day
        :returns: ``None`` if it is to be left out
        """
        now, name = self._clock(), _PARTICULARS.sub("#", text[:1000])[:_SAME]
        known = self._kinds.pop(name, None) or _Kind(now)
        self._kinds[name] = known  # those that have not come for longest go first
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if known.paid_until - now >= AT_ONCE * PERIOD:
            known.left_out += 1
            return None
        known.paid_until = max(known.paid_until, now) + PERIOD
        if not (left_out := known.left_out):
            return text
        known.left_out = 0
        return f"{text} (and {left_out:,} more like it)"


# -- logs ------------------------------------------------------------------------------------------------------------


#: Loggers whose records are collected. hivemind's all come from threads and processes of its own.
_ALWAYS = ("hivemind", "hivenb")
_FROM_OUR_THREADS = (
    "lightning",
    "lightning.pytorch",
    "lightning.fabric",
    "pytorch_lightning",
    "lightning_fabric",
)


class LogCollector(logging.Handler):
    """Keeps the newest log lines of this process and of the children it forks while it is installed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        self._lines, self._rate = LogLines(), LogRate()
        self._owner = os.getpid()
        self._threads: set[int] = set()
        self.version = 0
        #: where each line is written as well, for a process that nobody looks into
        self.echo: TextIO | None = None
        read_end, self._write_end = os.pipe()
        child.child_output = self._write_end
        BackgroundThread(target=self._collect, args=(read_end,), name="hivenb-log").start()

    def tail(self, count: int = CAPACITY) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        return self._lines.tail(count)

    @contextlib.contextmanager
    def this_thread(self) -> Iterator[None]:
        """Collect what Lightning logs and what anybody warns of on this thread, instead of printing it."""
        _watch_lightning(self)  # one of its packages may have been imported in the meantime
        ident = threading.get_ident()
        self._threads.add(ident)
        try:
            with no_errors_on_this_thread():
                yield
        finally:
            self._threads.discard(ident)

    def owns(self, thread: int | None) -> bool:
        """Whether records of this thread are collected."""
        return thread in self._threads

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(self.format(record).split("\n"))
        if is_noise(line):
            return
        if os.getpid() == self._owner:
            self._keep(line)
        elif line := self._in_its_turn(line):  # others' messages arrive in children
            # up to that many bytes in a pipe are never mixed with those of another process
            os.write(self._write_end, line.encode(errors="replace")[: PIPE_BUF - 1] + b"\n")

    def _in_its_turn(self, line: str) -> str:
        """A line of a child, with how many like it were left out; empty if it is one too many of its kind."""
        clock, _, text = line.partition(" ")
        admitted = self._rate.admits(text)
        return "" if admitted is None else f"{clock} {admitted}"

    def _keep(self, line: str) -> None:
        line = printable(line)
        with self.lock or contextlib.nullcontext():
            is_new = self._lines.add(line)
            self.version += 1
            if is_new and self.echo is not None:
                self.echo.write(line + "\n")

    def _collect(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb") as lines:
            for line in lines:
                self._keep(line.decode(errors="replace").rstrip("\n"))


_collector: LogCollector | None = None
_lock = threading.Lock()
free_in_children(_lock)


def collect_logs() -> LogCollector:
    """The collector of this process, installed when it is first asked for.

    From then on hivemind's records no longer go to standard error; those of Lightning, and warnings, still do unless
    they come from a thread inside :meth:`LogCollector.this_thread`.
    """
    global _collector
    with _lock:
        if _collector is None or _collector._owner != os.getpid():
            _collector = _install(LogCollector())
        return _collector


def _install(collector: LogCollector) -> LogCollector:
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    for name in _ALWAYS:
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if isinstance(h, LogCollector)]:
            logger.removeHandler(handler)  # of the process that this one was forked from
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(collector)
    _watch_lightning(collector)
    _collect_warnings(collector)
    return collector


def _watch_lightning(collector: LogCollector) -> None:
    """Let Lightning's loggers, as set up by now, hand what our threads log to the collector, and print none of it."""
    for name in _FROM_OUR_THREADS:
        logger = logging.getLogger(name)
        for printer in [h for h in logger.handlers if not isinstance(h, _Forward)]:
            if not any(isinstance(known, _NotOurs) and known.collector is collector for known in printer.filters):
                printer.addFilter(_NotOurs(collector))
        is_last = "." not in name or not logger.propagate  # else its records come to its parent, too
        if is_last and not any(isinstance(h, _Forward) and h._collector is collector for h in logger.handlers):
            logger.addHandler(_Forward(collector))


class _NotOurs(logging.Filter):
    def __init__(self, collector: LogCollector):
        super().__init__()
        self.collector = collector

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.collector.owns(record.thread)


class _Forward(logging.Handler):
    def __init__(self, collector: LogCollector):
        super().__init__(logging.INFO)
        self._collector = collector

    def emit(self, record: logging.LogRecord) -> None:
        if self._collector.owns(record.thread):
            self._collector.handle(record)


def _collect_warnings(collector: LogCollector) -> None:
    printed = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if file is None and collector.owns(threading.get_ident()):
            if is_deprecation_in_a_library(category, filename):
                return
            level = logging.INFO if is_hint(category) else logging.WARNING
            logging.getLogger("hivenb.warnings").log(level, "%s: %s", category.__name__, message)
        else:
            printed(message, category, filename, lineno, file, line)

    warnings.showwarning = show
