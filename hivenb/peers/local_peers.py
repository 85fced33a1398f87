"""Further peers of a run as processes on this machine, for a demonstration, a test or a spare core."""

from __future__ import annotations

import atexit
import contextlib
import copy
import multiprocessing as mp
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from hivenb.engine.process.child_process import interrupts_blocked
from hivenb.engine.process.end_with_parent import wait_for_exit
from hivenb.errors import LocalPeerError

if TYPE_CHECKING:
    from hivenb.options.options import Options
    from hivenb.run.training import TrainingRun
    from hivenb.swarm.swarm import Swarm

#: Imported once by the process that all local peers are forked from: they share its memory and start at once.
PRELOADED = ["hivenb.app._local_peer_preload"]

#: Trainer arguments that belong to the run in the notebook alone: one set of log files and checkpoints.
_NOT_FOR_PEERS = (
    "callbacks",
    "logger",
    "enable_checkpointing",
    "default_root_dir",
    "max_epochs",
    "max_steps",
    "profiler",
)

#: Seconds that a peer is given to report itself; the first one waits for the imports as well.
START_TIMEOUT = 120.0

#: Seconds that a peer is given to leave of its own accord.
LEAVE_TIMEOUT = 20.0


@dataclass(frozen=True)
class PeerRecipe:
    """All that another process needs to become a peer of a run.

    :param model: the LightningModule, on the CPU
    :param data: training data; peers do not validate
    :param options: those of the run
    :param initial_peers: multiaddresses of the swarm
    :param trainer_kwargs: keyword arguments of the Trainer
    :param seed: for this peer's own shuffle of the data
    """

    model: Any
    data: Any
    options: Options
    initial_peers: tuple[str, ...]
    trainer_kwargs: dict[str, Any]
    seed: int


class LocalPeer:
    """A peer on this machine, seen from the process that added it.

    :param number: 1 for the first one of the swarm, and so on
    :param run: the run it takes part in
    :param process: its process
    :param connection: for orders and reports
    :param log_path: where it writes what it logs
    """

    def __init__(self, number: int, run: TrainingRun, process: Any, connection: Connection, log_path: Path):
        self.number = number
        self._run = weakref.ref(run)
        self._process, self._connection, self._log_path = process, connection, log_path
        self._listening = threading.Lock()  # a view looks while a cell waits; each message is for one of them
        self._peer_id: str | None = None
        self._began = False
        self._failure: str | None = None

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
        if self._process.exitcode is None:
            return "starting" if self._peer_id is None else "training" if self._began else "ready"
        return "left" if self._process.exitcode == 0 else "failed"

    @property
    def log(self) -> tuple[str, ...]:
        """The newest lines of its log, oldest first."""
        with contextlib.suppress(FileNotFoundError), self._log_path.open(errors="replace") as lines:
            return tuple(line.rstrip("\n") for line in deque(lines, maxlen=200))
        return ()

    def kill(self) -> None:
        """End it at once, without a goodbye to the swarm, as a power cut would."""
        self._process.kill()
        self._process.join()

    def begin(self, options: Options) -> None:
        """Tell it to train, with these options from now on. Returns at once, and may be called twice."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.send(("train", cloudpickle.dumps(options)))
            self._began = True

    def is_of(self, run: TrainingRun) -> bool:
        """Whether it takes part in this run."""
        return self._run() is run

    def ask_to_leave(self) -> None:
        """Tell it to stop training, say goodbye and end. Returns at once."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.send(("leave", b""))

    def wait_until_gone(self, timeout: float) -> None:
        """Wait for its end; after the timeout (seconds), force it."""
        if not wait_for_exit(self.pid, timeout):
            self._process.kill()
        self._process.join()
        self._connection.close()

    def wait_until_started(self, timeout: float) -> None:
        """Wait until it has an id in the DHT.

        :raises LocalPeerError: if it ends before, or takes longer than ``timeout`` seconds
        """
        deadline = time.monotonic() + timeout
        while self.peer_id is None:
            remaining = deadline - time.monotonic()
            if self._process.exitcode is not None or self._failure is not None:
                raise LocalPeerError(f"{self} could not start: {self._failure or self._last_words()}")
            if remaining <= 0:
                raise LocalPeerError(f"{self} did not start within {timeout:.0f} s; its log: {self._last_words()}")
            mp.connection.wait([self._connection, self._process.sentinel], remaining)

    def _listen(self) -> None:
        with self._listening, contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                kind, text = self._connection.recv()
                if kind == "ready":
                    self._peer_id = text
                else:
                    self._failure = text

    def _last_words(self) -> str:
        return " / ".join(self.log[-3:]) or (
            f"no word from it, exit code {self._process.exitcode}. In a script, put what starts the swarm under "
            'if __name__ == "__main__": because each peer imports the script'
        )

    def __repr__(self) -> str:
        return f"LocalPeer({self.number}, {self.state})"


class LocalPeers:
    """The local peers of one swarm; :class:`hivenb.Swarm` is what people use.

    :param swarm: the swarm they join
    """

    def __init__(self, swarm: Swarm):
        self._swarm = swarm
        self._peers: list[LocalPeer] = []
        self._added = 0
        self._lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="hivenb-peers-")
        # multiprocessing would wait at exit for processes that nobody has told to end
        atexit.register(self.close)

    @property
    def all(self) -> tuple[LocalPeer, ...]:
        """All that were added and not removed."""
        return tuple(self._peers)

    def add(self, count: int, run: TrainingRun) -> tuple[LocalPeer, ...]:
        """See :meth:`hivenb.Swarm.add_local_peers`."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LocalPeerError(f"cannot add {count!r} peers; give a whole number of at least 1")
        with self._lock:
            new = [self._launch(run) for _ in range(count)]
            try:
                for peer in new:
                    peer.wait_until_started(START_TIMEOUT)
            except BaseException:
                self._end(new, timeout=0.0)
                raise
            self._peers += new
            if run.status.state.is_active:
                self.begin(run, run.options)
            return tuple(new)

    def begin(self, run: TrainingRun, options: Options) -> None:
        """Let the peers of a run train with these options from now on."""
        for peer in self._peers:
            if peer.is_of(run):
                peer.begin(options)

    def remove(self, count: int | None) -> None:
        """See :meth:`hivenb.Swarm.remove_local_peers`."""
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise LocalPeerError(f"cannot remove {count!r} peers; give a whole number, or None for all")
        with self._lock:
            staying = 0 if count is None else max(0, len(self._peers) - count)
            leaving, self._peers = self._peers[staying:], self._peers[:staying]
            self._end(leaving, LEAVE_TIMEOUT)

    def close(self) -> None:
        """Let all leave. May be called twice."""
        self.remove(None)
        self._folder.cleanup()
        atexit.unregister(self.close)

    def _end(self, peers: list[LocalPeer], timeout: float) -> None:
        for peer in peers:
            peer.ask_to_leave()
        deadline = time.monotonic() + timeout
        for peer in peers:
            peer.wait_until_gone(max(0.0, deadline - time.monotonic()))

    def _launch(self, run: TrainingRun) -> LocalPeer:
        self._added += 1
        recipe = make_recipe(run, self._swarm.addresses, seed=self._added)
        log_path = Path(self._folder.name) / f"peer-{self._added}.log"
        start_server()
        context = mp.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_become_peer,
            args=(recipe, theirs, os.getpid(), str(log_path)),
            name=f"hivenb-peer-{self._added}",
            daemon=False,  # it has children of its own
        )
        with interrupts_blocked():
            process.start()
        theirs.close()
        return LocalPeer(self._added, run, process, ours, log_path)


def start_server() -> None:
    """Start the process that local peers are forked from, unless it runs already. Returns at once.

    Its imports take several seconds. A program that will need local peers calls this before its own imports, so
    that both happen at the same time.
    """
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with interrupts_blocked():
        forkserver.ensure_running()


def make_recipe(run: TrainingRun, initial_peers: tuple[str, ...], seed: int) -> bytes:
    """A run's model, data and options, packed for a process that does not share this one's ``__main__``.

    :raises LocalPeerError: if the model or the data cannot be packed
    """
    data = run.data[0] if isinstance(run.data, (tuple, list)) else run.data
    try:
        return cloudpickle.dumps(
            PeerRecipe(
                model=copy.deepcopy(run.model).cpu(),
                data=data,
                options=run.options,
                initial_peers=initial_peers,
                trainer_kwargs={k: v for k, v in run.trainer_kwargs.items() if k not in _NOT_FOR_PEERS},
                seed=seed,
            )
        )
    except Exception as e:
        raise LocalPeerError(
            f"the model or the data cannot be sent to another process ({type(e).__name__}: {e}); keep open files, "
            "locks and generators out of them"
        ) from e


def _become_peer(recipe: bytes, connection: Connection, parent_pid: int, log_path: str) -> None:
    # a module of its own, so that a kernel that only adds peers does not import what they need
    from hivenb.app.local_peer import main

    main(recipe, connection, parent_pid, log_path)
