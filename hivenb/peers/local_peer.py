"""A peer on this machine, seen from the process that added it."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hivenb.engine.process.known_process import KnownProcess
from hivenb.engine.process.watched_child import how_it_ended
from hivenb.errors import LocalPeerError
from hivenb.options.options import Options
from hivenb.peers.followed_run import pack_options

#: What multiprocessing takes for the exit code of all that were forked from a server that has ended, the living too.
_UNKNOWN = 255


class LocalPeer:
    """A peer on this machine, seen from the process that added it. Any thread may call.

    :param number: 1 for the first one of the swarm, and so on
    :param process: its process
    :param connection: for orders and reports
    :param log_path: where it writes what it logs
    :param run_id: name of the run in which it takes part
    :param experiment: of which that is a run
    """

    def __init__(
        self,
        number: int,
        process: Any,
        connection: Connection,
        log_path: Path,
        run_id: str = "",
        experiment: str = "",
    ):
        self.number, self.run_id, self.experiment = number, run_id, experiment or run_id
        self._process, self._connection, self._log_path = process, connection, log_path
        # the fork server frees its number as soon as it has ended
        self._known = KnownProcess(process.pid)
        self._listening = threading.Lock()  # a view looks while a cell waits; each message is for one of them
        self._sending = threading.Lock()  # one order at a time
        self._looking = threading.Lock()  # the exit code is told once, and who came second would take it for a crash
        self._peer_id: str | None = None
        self._began = False
        self._failure: str | None = None
        self._told_why = ""

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._process.pid

    @property
    def peer_id(self) -> str | None:
        """Its id in the DHT; ``None`` before it has one."""
        self._listen()
        return self._peer_id

    @property
    def state(self) -> str:
        """``"starting"``, ``"ready"`` until the run is started, ``"training"``, ``"left"`` or ``"failed"``."""
        self._listen()
        exit_code = self._exit_code
        if exit_code is None:
            return "starting" if self._peer_id is None else "training" if self._began else "ready"
        return "left" if exit_code == 0 else "failed"

    @property
    def why_ended(self) -> str:
        """Why it takes part no more, in words, once it has ended; empty if it has left as it was told to."""
        if self.state not in ("left", "failed"):
            return ""
        return self._told_why or self._failure or (self.last_words if self.state == "failed" else "")

    def ask_to_end(self, why: str) -> None:
        """Tell it to end, since it cannot take part any more. Returns at once.

        :param why: that is so
        """
        self._told_why = why
        self.ask_to_leave()

    @property
    def log(self) -> tuple[str, ...]:
        """The newest lines of its log, oldest first."""
        with contextlib.suppress(FileNotFoundError), self._log_path.open(errors="replace") as lines:
            return tuple(line.rstrip("\n") for line in deque(lines, maxlen=200))
        return ()

    def kill(self) -> None:
        """End it at once, without a goodbye to the swarm, as a power cut would."""
        self._known.kill()
        self._wait_for_exit_code()

    def begin(self, options: Options) -> None:
        """Tell it to train, with these options from now on. Returns at once, and may be called twice.

        :raises OptionsError: if they cannot be sent to another process
        """
        packed = pack_options(options)
        self.run_id = options.run_id
        if self._send("train", packed):
            self._began = True

    def ask_to_leave(self) -> None:
        """Tell it to stop training, say goodbye and end. Returns at once."""
        self._send("leave")

    def wait_until_gone(self, timeout: float) -> None:
        """Wait for its end; after the timeout (seconds), force it."""
        if not self._known.wait(timeout):
            self._known.kill()
        self._wait_for_exit_code()
        with self._sending, self._listening:  # what has its number next is somebody else's
            self._connection.close()

    def wait_until_started(self, timeout: float) -> None:
        """Wait until it has an id in the DHT.

        :raises LocalPeerError: if it ends before, or takes longer than ``timeout`` seconds
        """
        deadline = time.monotonic() + timeout
        while self.peer_id is None:
            remaining = deadline - time.monotonic()
            if self._exit_code is not None or self._failure is not None:
                raise LocalPeerError(f"{self} could not start: {self.last_words}")
            if remaining <= 0:
                raise LocalPeerError(f"{self} did not start within {timeout:.0f} s; its log: {self.last_words}")
            tells_of_its_end = [] if self._server_has_ended else [self._process.sentinel]
            mp.connection.wait([self._connection, *tells_of_its_end], remaining)

    @property
    def _exit_code(self) -> int | None:
        return None if self._server_has_ended and not self._known.wait(0.0) else self._told_exit_code

    @property
    def _server_has_ended(self) -> bool:
        return self._told_exit_code == _UNKNOWN

    @property
    def _told_exit_code(self) -> int | None:
        with self._looking:
            return self._process.exitcode

    def _wait_for_exit_code(self) -> None:
        self._known.wait()
        mp.connection.wait([self._process.sentinel])
        with self._looking:
            self._process.join()

    def _send(self, order: str, content: bytes = b"") -> bool:
        with self._sending, contextlib.suppress(OSError):  # it has ended already
            self._connection.send((order, content))
            return True
        return False

    def _listen(self) -> None:
        with self._listening, contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                kind, text = self._connection.recv()
                if kind == "ready":
                    self._peer_id = text
                else:
                    self._failure = text

    @property
    def last_words(self) -> str:
        """Why it has ended, in one line: its own error, the signal that killed it, or else the end of its log."""
        self._listen()
        exit_code = self._exit_code
        if self._failure is None and exit_code is not None and exit_code < 0:
            return f"it {how_it_ended(exit_code)}"  # what it logged before says nothing of that
        return self._failure or " / ".join(self.log[-3:]) or f"no word from it, exit code {exit_code}"

    def __repr__(self) -> str:
        return f"LocalPeer({self.number}, {self.state})"
