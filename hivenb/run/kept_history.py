"""The history of a run, kept in a file, so that another run of its name shows what was before, after a restart too.

Files are small: what a person sees on a chart, and no more. Each run writes one of its own, by a thread of its own, and
locks it for as long as it does, so that kernels side by side do not get in each other's way.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import re
import secrets
import threading
import time
from pathlib import Path

import numpy as np

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.errors import TrainingError
from hivenb.figures.earlier_history import MAX_BYTES, event_line, header_line, joined, point_line, read_history
from hivenb.figures.history import History, Series, Snapshot

logger = logging.getLogger(__name__)

#: A folder for histories in place of that in the user's state directory; ``off`` to keep none, unless a run is told to.
VARIABLE = "HIVENB_HISTORY"

#: Seconds between two writes of a run that has just begun; doubled after each :data:`_BYTES_AT_ONE_PACE` bytes.
WRITE_EVERY = 2.0
_BYTES_AT_ONE_PACE = 256 << 10

#: Points of a series in one write of such a run, at most; halved as often.
_AT_ONCE = 16

#: Earlier runs of one name that are shown, and those whose files are kept.
SHOWN, KEPT = 5, 20

#: Seconds that the end of a run waits for its last write; a disk may be slow, or gone.
_LAST_WRITE = 5.0

_FILE = re.compile(r"history-\d{8}T\d{6}-\d+-[0-9a-f]{8}\.jsonl")


def folder_of(run_id: str, asked: bool | str | Path) -> Path | None:
    """Where the histories of a run of some name are kept; ``None`` for nowhere.

    By default that is below the user's state directory, apart for each working directory.

    :param asked: as given to :class:`hivenb.TrainingRun`
    :raises TrainingError: if it is something else than a switch or a folder
    """
    if not isinstance(asked, (bool, str, Path)):
        raise TrainingError(f"keep_history={asked!r} is neither True nor False, nor a folder")
    name = f"{_safe(run_id)}-{_digest(run_id)}"
    if not isinstance(asked, bool):
        return Path(asked).expanduser() / name
    variable = os.environ.get(VARIABLE, "")
    if not asked or variable == "off":
        return None
    if variable:
        return Path(variable).expanduser() / name
    try:
        here = Path.cwd()
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except (OSError, RuntimeError):  # a folder that was deleted, or a user without one
        return None
    return state / "hivenb" / "histories" / f"{_safe(here.name)}-{_digest(str(here))}" / name


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)[:40].lstrip(".") or "run"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


class KeptHistory:
    """What is kept of the history of one run.

    :param history: of the run
    :param folder: for runs of its name; ``None`` to keep nothing
    :param run: its name
    :param model: name of the model's class; histories of others are not shown
    """

    def __init__(self, history: History, folder: Path | None, run: str, model: str):
        self._history, self._folder, self._run, self._model = history, folder, run, model
        self._file: int | None = None
        self._path: Path | None = None
        self._written = 0
        self._until: dict[str, float] = {}
        self._events_until = -math.inf
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble = False

    def earlier(self) -> Snapshot | None:
        """What the newest runs of that name have left, other than those that are at work at the moment."""
        found: list[Snapshot] = []
        for path in self._files():
            if len(found) == SHOWN:
                break
            try:
                if _is_being_written(path):
                    continue
                model, snapshot = read_history(path)
            except (OSError, ValueError, RecursionError) as error:
                logger.info(f"{path} is left out of the earlier history of {self._run!r}: it {error}")
                continue
            if model == self._model and (snapshot.series or snapshot.events):
                found.append(snapshot)
        return joined(found[::-1])

    def begin(self) -> None:
        """Write from now on, on a thread of its own."""
        if self._folder is None or self._trouble:
            return
        self._ends = threading.Event()
        self._thread = BackgroundThread(target=self._write_on, name="hivenb-history")
        self._thread.start()

    def end(self) -> None:
        """Write what is left, and close the file; another :meth:`begin` goes on with it."""
        thread, self._thread = self._thread, None
        self._ends.set()
        if thread is not None:
            thread.join(_LAST_WRITE)

    @property
    def _pace(self) -> int:
        return self._written // _BYTES_AT_ONE_PACE

    def _write_on(self) -> None:
        try:
            ends = self._ends
            while not ends.wait(WRITE_EVERY * 2**self._pace):
                self._write()
            self._write()
        except OSError as error:
            self._trouble = True
            logger.info(f"the history of {self._run!r} is kept no longer: {error}")
        finally:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
                os.close(self._file)
                self._file = None

    def _write(self) -> None:
        snapshot = self._history.snapshot()
        lines = [*self._new_points(snapshot), *self._new_events(snapshot)]
        if not lines or self._written > MAX_BYTES // 2:
            return
        if self._file is None:
            self._open()
        if self._written == 0:
            lines.insert(0, header_line(self._run, self._model, snapshot.started_at))
        data = "".join(lines).encode()
        self._written += len(data)
        while data and self._file is not None:
            data = data[os.write(self._file, data) :]

    def _open(self) -> None:
        assert self._folder is not None
        if self._path is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"history-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
            self._path = self._folder / name
            self._drop_oldest()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _new_points(self, snapshot: Snapshot) -> list[str]:
        """What has come to each series since the last write, in the fewer points, the longer it lasts."""
        lines = []
        most = max(1, _AT_ONCE >> self._pace)
        for name, series in snapshot.series.items():
            new = np.flatnonzero(series.times > self._until.get(name, -math.inf))
            for part in np.array_split(new, min(most, len(new))) if len(new) else ():
                at = part[-1]
                when = snapshot.started_at + float(series.times[at])
                lines.append(point_line(name, when, _mean(series, part), series.epochs[at], series.samples[at]))
            if len(new):
                self._until[name] = float(series.times[-1])
        return lines

    def _new_events(self, snapshot: Snapshot) -> list[str]:
        new = [event for event in snapshot.events if event.time > self._events_until]
        if new:
            self._events_until = new[-1].time
        return [event_line(event, snapshot.started_at) for event in new]

    def _files(self) -> list[Path]:
        """Those of this name, newest first."""
        try:
            found = [] if self._folder is None else [one for one in self._folder.iterdir() if _FILE.fullmatch(one.name)]
        except OSError:  # there is no such folder yet, or nobody may look into it
            return []
        return sorted((one for one in found if one != self._path), key=lambda path: path.name, reverse=True)

    def _drop_oldest(self) -> None:
        for path in self._files()[KEPT - 1 :]:
            with contextlib.suppress(OSError):
                if not _is_being_written(path):
                    path.unlink()


def _mean(series: Series, new: np.ndarray) -> float:
    values = series.values[new]
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _is_being_written(path: Path) -> bool:
    """Whether a run of some kernel has a file open for its history."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
