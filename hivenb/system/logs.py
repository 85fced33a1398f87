"""The log of a notebook's background work, kept instead of printed.

Whatever a background thread or a child process prints lands in whichever cell ran last. So while a swarm is open,
the records of hivemind, Lightning and hivenb that come from there are collected: those of this process directly,
those of its forked children, and whatever else these print, through a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from select import PIPE_BUF
from typing import Any, TextIO

from hivenb._fresh_locks import free_in_children
from hivenb._library_warnings import no_errors_on_this_thread
from hivenb.engine.process import child
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.system.log_lines import CAPACITY, LogLines, LogRate, is_deprecation_in_a_library, is_hint, is_noise
from hivenb.system.safe_text import printable

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
        if record.levelno < logging.ERROR and is_noise(line):  # what has failed may be of such a file
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
