"""The server of local peers as a copy of this process, where memory is scarce.

PyTorch, Lightning and hivemind take some 340 MB of a process that imports them. What is forked from it shares these
with it; a server that imports them itself has them once more. Binder gives a notebook 2 GB in all.

Why not everywhere: a copy keeps what its original frees, such as a dataset; its peers have the user's own modules as
they were when it was made; and CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from types import FunctionType, SimpleNamespace
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

from hivenb.engine.process.child_process import give_up_input
from hivenb.system.process_tree import count_as_helper

#: Set to 1 before the kernel starts, the server is a copy of it.
VARIABLE = "HIVENB_PEERS_SHARE_MEMORY"


def is_wanted() -> bool:
    """Whether this process is to be copied, and can be."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def ensure_copy_runs(imports: Sequence[str]) -> None:
    """Start multiprocessing's server of forks as a copy of this process, unless it runs already, in whatever way.

    :param imports: names of modules that the copy is to have
    """
    for name in imports:
        importlib.import_module(name)
    _ensure_running(forkserver._forkserver)


def _copy_this_process(_program: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Instead of :func:`multiprocessing.util.spawnv_passfds`: run what an interpreter would be given, in a fork."""
    pid = os.fork()
    if pid != 0:
        count_as_helper(pid)
        return pid
    try:
        gc.freeze()  # before anything is collected, which writes to all objects, and so copies the pages they are in
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        give_up_input()
        _forget_classes()
        _let_go_of_pipes(but=descriptors)
        exec(arguments[-1], {})
    except SystemExit:
        pass  # all that it serves have ended
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _forget_classes() -> None:
    """Know no class of the notebook: a peer is to unpack those that its recipe brings, not to find what was copied.

    cloudpickle remembers what it has packed. It takes that instead of what comes with the same mark.
    """
    _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.clear()


def _let_go_of_pipes(but: Sequence[int]) -> None:
    """Hold no end of a pipe, as a new program would not: whoever waits for the last one to close it would wait for us.

    Their numbers stay taken, as objects that believe to own them may still close them.
    """
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in but and _is_pipe(descriptor):
                os.dup2(nothing.fileno(), descriptor, inheritable=False)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # that of the listing itself
        return False


# Python's own, but for how it starts a program
_ensure_running: Callable[[Any], None] = FunctionType(
    vars(forkserver.ForkServer)["ensure_running"].__code__,
    {**vars(forkserver), "util": SimpleNamespace(**{**vars(util), "spawnv_passfds": _copy_this_process})},
)
