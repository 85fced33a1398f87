"""Children that a keyboard interrupt cannot hit, that print into no cell, and that none of hivemind's locks dies with.

Jupyter sends SIGINT to the whole process group of a kernel. So each child ignores it from its first instruction on.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from hivemind.utils import get_logger
from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.mpfuture import MPFuture, SharedBytes

from hivenb._fresh_locks import free_in_children
from hivenb._interrupts import interrupts_blocked
from hivenb._library_warnings import raise_no_warnings
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.known_process import wait_for_exit
from hivenb.engine.process.shared_memory import too_little
from hivenb.engine.process.socket_folder import place_sockets_of_multiprocessing, sockets_of_torch

# -- abandoned locks -------------------------------------------------------------------------------------------------
#
# Locks that a process has taken along when it was killed, and that nobody else would ever get.


logger = get_logger(__name__)

#: Seconds after which a lock that the living hold for microseconds is held by the dead.
_HELD_BY_THE_DEAD = 2.0

#: How often this process has released each lock that it did not hold, which the lock counts as if it had.
_released: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

#: Two threads that find the same lock abandoned would release it twice, the second time from somebody living.
_one_frees = threading.Lock()
free_in_children(_one_frees)


def free_abandoned(locks: Iterable[Any]) -> list[Any]:
    """Release those locks of several processes that one of them was killed with.

    :param locks: of ``multiprocessing``; one that a thread of this process holds stays as it is
    :returns: those that were released
    """
    with _one_frees:
        return [lock for lock in locks if _free_if_abandoned(lock)]


def _free_if_abandoned(lock: Any) -> bool:
    if lock.acquire(timeout=_HELD_BY_THE_DEAD):
        lock.release()
        return False
    if lock._semlock._count() + _released.get(lock, 0):  # of those that hold it, it knows in this process only
        return False
    logger.warning("A process was killed while it held a lock that others need; the lock is free again")
    _released[lock] = _released.get(lock, 0) + 1
    lock.release()
    return True


# -- end with parent -------------------------------------------------------------------------------------------------
#
# Children that never outlive their parent, however it ends.
#
# Jupyter kills a kernel with SIGKILL, when no exit handler runs. So each child of ours watches its parent, and the
# system kills a program that is not ours with its parent.


def end_with(pid: int) -> None:
    """Let this process end as soon as another one has ended, whatever it is doing."""
    BackgroundThread(target=_exit_with, args=(pid,), name=f"watch-{pid}").start()


def _exit_with(pid: int) -> None:
    wait_for_exit(pid)
    os._exit(1)


def tied_to_parent(command: list[str], settings: str = "") -> list[str]:
    """The same command, in a session of its own and killed by the kernel when the calling process dies.

    For a program that is not ours, and so can neither ignore SIGINT nor watch its parent.

    :param settings: for its environment, ``NAME=VALUE``, with spaces between several
    """
    # -I and -S: no site packages and no environment, so that the interpreter in between is there for milliseconds
    return [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("_exec_tied.py")),
        str(os.getpid()),
        settings,
        *command,
    ]


# -- child process ---------------------------------------------------------------------------------------------------


#: How long a process that is ended by force is waited for: to let go of a lock, and to be gone.
_FORCE_SECONDS = 1.0

#: Answers (hivemind/utils/mpfuture.py:SharedBytes) for which a process asks torch's shared memory manager once.
#: hivemind asks for 16 at a time, several times in an epoch: whoever asks while the manager does not answer within a
#: second, on a machine that swaps or that has slept, is ended by torch.
_ANSWERS = 2**16 - 64  # the manager takes 64 for itself

#: How many of them are left when a process asks for more.
_FEW_ANSWERS = 2**10

#: Where hivemind looks up how many it asks for. The environment of a kernel or a script is not ours to change.
_ANSWERS_VARIABLE = "HIVEMIND_SHM_BUFFER_SIZE"

#: Where children that are forked from now on write what they print, as a file descriptor; ``None`` for where their
#: parent writes. In a notebook that would be whichever cell ran last.
child_output: int | None = None


def settle_as_child(parent_pid: int | None = None) -> None:
    """Make the calling process a well-behaved child: deaf to SIGINT, silent, and gone once its parent is gone.

    To be called on the main thread of the child, before anything else.

    :param parent_pid: the process to outlive by no means; by default the one that forked this process
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what its parent does then
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.setdefault(_ANSWERS_VARIABLE, str(_ANSWERS))
    raise_no_warnings()
    if parent_pid is None:
        # not getppid(), if there is a choice: the parent may have been killed in between
        parent = mp.parent_process()
        parent_pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    end_with(parent_pid)
    # Python looks at old objects only once their number has grown by a quarter, and goes by that of the parent, most of
    # which are frozen here: what is in a circle, with its tensors, would pile up for hours.
    gc.collect()
    if child_output is not None:
        redirect_output(child_output)


def give_up_input() -> None:
    """Let this process, which was forked, have no input: what there is to read is its parent's.

    A thread of the parent may be reading it. Whoever closes ``sys.stdin`` would wait for that thread, which is not
    here, for ever.
    """
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process
    os.dup2(sys.stdin.fileno(), 0)


def redirect_output(descriptor: int) -> None:
    """Let all that this process prints, and the children it will have, go to a file descriptor, line by line."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        # not only the descriptor: a kernel's sys.stdout sends what it is given to the notebook by itself
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1, errors="replace"))


def prepare_answers() -> None:
    """Start what answers of processes of hivemind's need, out of reach of interrupts, and free what it waits for.

    A process of plain hivemind's that was killed while it answered has taken a lock along, and nobody watched it.

    An interrupt that hits torch's manager of shared memory as it starts would end it, and torch waits for it for ever,
    and lets no other thread of Python run (``torch/lib/libshm/core.cpp``, ``start_manager``).

    :raises PlatformError: if there is no folder for the sockets of processes, or they cannot share memory
    """
    place_sockets_of_multiprocessing()
    with interrupts_blocked(), sockets_of_torch():
        free_abandoned(shared_locks())
        try:
            make_room_for_answers()
            MPFuture()
        except RuntimeError as e:  # torch's
            raise too_little(e) from e


def make_room_for_answers() -> None:
    """Let this process have shared memory for many answers, if little is left, whatever hivemind would ask for.

    Without effect where somebody has said how many hivemind is to ask for.
    """
    if _has_room_for_answers() or _ANSWERS_VARIABLE in os.environ:
        return
    if SharedBytes._lock.acquire(block=False):  # whoever has it is taking an answer, or is ending a process
        try:
            if not _has_room_for_answers():
                buffer = torch.empty([_ANSWERS], dtype=torch.uint8).share_memory_()
                SharedBytes._pid, SharedBytes._buffer, SharedBytes._index = os.getpid(), buffer, 0
        finally:
            SharedBytes._lock.release()


def _has_room_for_answers() -> bool:
    buffer = SharedBytes._buffer
    is_own = buffer is not None and SharedBytes._pid == os.getpid()
    return is_own and len(buffer) - SharedBytes._index >= _FEW_ANSWERS


class ChildProcess(mp.process.BaseProcess):
    """Mixin for hivemind's processes: forked whatever the default start method is, and settled before they run.

    Works around ``hivemind/averaging/averager.py`` (``DecentralizedAverager`` uses the default start method, under
    which it cannot be pickled from Python 3.14 on) and the lack of any tie to the parent in both of hivemind's
    process classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare_answers()
        super().__init__(*args, **kwargs)

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return mp.context.ForkProcess._Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        # that of the default start method does nothing if that is spawn: the child would then hand out descriptors in
        # its parent's name, and who waits for the answer to such a message would wait for ever
        mp.context.ForkProcess._after_fork()  # type: ignore[attr-defined]
        settle_as_child()  # the last before run(), which each class of hivemind's has for itself

    def start(self) -> None:
        if getattr(mp.current_process(), "_inheriting", False):
            # as multiprocessing refuses what it does not fork: see its "Safe importing of main module"
            raise RuntimeError("no process can be started while another process imports the main module of its parent")
        with interrupts_blocked():
            super().start()

    def _bootstrap(self, *args: Any, **kwargs: Any) -> Any:
        # A collection of garbage writes to all objects that it looks at, and so copies the pages that parent and child
        # share; what is frozen it does not look at. Not in the parent, whose own objects may be frozen as well, as
        # those of a local peer are: there is no way to freeze some of them for a while.
        gc.freeze()
        give_up_input()  # before multiprocessing closes it
        return super()._bootstrap(*args, **kwargs)  # type: ignore[misc]

    def terminate(self) -> None:
        with interrupts_blocked(), shared_locks_held() as missed:
            super().terminate()
            self.join(_FORCE_SECONDS)
            if self.is_alive():  # it is stopped, or listens to no signal
                super().kill()
                self.join(_FORCE_SECONDS)
        free_abandoned(missed)

    def kill(self) -> None:
        with interrupts_blocked(), shared_locks_held() as missed:
            super().kill()
            self.join(_FORCE_SECONDS)
        free_abandoned(missed)


def shared_locks() -> tuple[Any, ...]:
    """The locks that all processes of hivemind's share that one process has started."""
    return MPFuture._initialization_lock, MPFuture._update_lock, SharedBytes._lock, _AsyncContextWrapper.EXECUTOR_LOCK


@contextlib.contextmanager
def shared_locks_held() -> Iterator[list[Any]]:
    """Hold what all processes of hivemind's that one process has started share, so that none dies holding it.

    Gives those that were not to be had in time.

    Locks of ``hivemind/utils/mpfuture.py``, which are taken for each answer of one process to another, and of
    ``hivemind/utils/asyncio.py`` would stay taken: nothing of hivemind's would ever answer again.
    """
    missed: list[Any] = []
    with contextlib.ExitStack() as held:
        for lock in shared_locks():
            # one that is not to be had belongs to somebody who hangs, perhaps the very process to end
            if lock.acquire(timeout=_FORCE_SECONDS):
                held.callback(lock.release)
            else:
                missed.append(lock)
        yield missed
