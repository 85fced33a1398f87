"""Where local peers are forked: a server process that has imported all that they need before."""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from hivenb._interrupts import interrupts_blocked
from hivenb.engine.process.child import give_up_input
from hivenb.engine.process.socket_folder import place_sockets_of_multiprocessing
from hivenb.errors import LocalPeerError
from hivenb.system.process_tree import count_as_helper

# -- copied server ---------------------------------------------------------------------------------------------------
#
# The server of local peers as a copy of this process, where memory is scarce.
#
# PyTorch, Lightning and hivemind take some 340 MB of a process that imports them. What is forked from it shares these
# with it; a server that imports them itself has them once more. Binder gives a notebook 2 GB in all.
#
# Why not everywhere: a copy keeps what its original frees, such as a dataset; its peers have the user's own modules as
# they were when it was made; and CUDA does not survive a fork.


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


# -- main module -----------------------------------------------------------------------------------------------------
#
# The module ``__main__``: processes forked from a server start without that of their parent, and get it on demand.
#
# multiprocessing imports the main module of the parent anew in each process that it does not simply fork. A script
# that is not guarded by ``if __name__ == "__main__":`` runs once more then. What a peer needs of it travels with its
# recipe, by value; what refers to something in it by its name is the exception.


_MAIN = ("init_main_from_name", "init_main_from_path")


def main_module() -> dict[str, str]:
    """How to import the main module of this process in another one; empty if that cannot be done, as in a notebook."""
    return {key: value for key, value in spawn.get_preparation_data("").items() if key in _MAIN}


class ProcessWithoutMain(mp.context.ForkServerProcess):
    """A process forked from a server, that does not import the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _PopenWithoutMain(process_obj)


def _prepared_without_main(name: str) -> dict[str, Any]:
    return {key: value for key, value in spawn.get_preparation_data(name).items() if key not in _MAIN}


class _PopenWithoutMain(popen_forkserver.Popen):
    # Python's own, but for what it takes for ``spawn``, which is all that says whether to import the main module
    _launch: Callable[..., None] = FunctionType(
        vars(popen_forkserver.Popen)["_launch"].__code__,
        {**vars(popen_forkserver), "spawn": SimpleNamespace(get_preparation_data=_prepared_without_main)},
    )


def unpack(packed: bytes, main: dict[str, str]) -> Any:
    """Unpack what cloudpickle has packed in another process; its main module is imported only if it has to be.

    :param packed: what was packed
    :param main: what :func:`main_module` gave there
    :raises LocalPeerError: if it refers to the main module by name, which cannot be imported
    """
    sys.modules["__main__"] = ModuleType("__main__")  # not that of the server, which is multiprocessing's own
    try:
        return _loaded(packed)
    except AttributeError as e:
        if "__main__" not in str(e):
            raise
        missing = e
    try:
        _import(main)
        return _loaded(packed)
    except BaseException as e:
        where = next(iter(main.values()), "the notebook")
        raise LocalPeerError(
            f"the model or the data refer by name to something in {where} ({missing}), which cannot be imported in "
            f"another process ({type(e).__name__}: {e}). Put what they refer to into a module of its own, and in a "
            'script, put what starts the swarm under if __name__ == "__main__":'
        ) from e


def _loaded(packed: bytes) -> Any:
    """What was packed; classes and functions that came by value are found by their names from now on.

    Whoever pickles them again, without cloudpickle, needs that: Lightning drops hyperparameters that it cannot pickle.
    """
    loaded = cloudpickle.loads(packed)
    # not isinstance(), which looks at attributes, and so wakes what is there to be loaded later
    named = [thing for thing in gc.get_objects() if issubclass(type(thing), (type, FunctionType))]
    for thing in named:
        if thing.__module__ == "__main__" and thing.__qualname__.isidentifier():
            setattr(sys.modules["__main__"], thing.__qualname__, thing)
    return loaded


def _import(main: dict[str, str]) -> None:
    process: Any = mp.current_process()
    process._inheriting = True  # what multiprocessing knows this moment by, and refuses to start processes in it
    try:
        spawn.prepare(dict(main))
    finally:
        del process._inheriting


# -- forking ---------------------------------------------------------------------------------------------------------


#: The program that a local peer runs: a module with a function ``main``. Named as one names the program of any other
#: process, not imported: it is built on all that is above this package, and a kernel that only adds peers needs none of
#: what they need.
PROGRAM = "hivenb.app.local_peer"

#: Imported once by the process that all local peers are forked from: they share its memory and start at once.
PRELOADED = ["hivenb.app._local_peer_preload"]

#: Whether the server has had all its imports. If it has ended since, an interrupt waits for those of the next one.
_has_server = False


def start_server() -> None:
    """Start the process that local peers are forked from, unless it runs already. Returns at once.

    Its imports take several seconds. A program that will need local peers calls this before its own imports, so
    that both happen at the same time.

    :raises PlatformError: if there is no folder for its socket
    """
    place_sockets_of_multiprocessing()
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with interrupts_blocked():
        resource_tracker.ensure_running()  # which does not block SIGINT any more then, for what is started next
    with interrupts_blocked():
        if is_wanted():
            ensure_copy_runs([PROGRAM])
        else:
            forkserver.ensure_running()


def wait_for_server() -> None:
    """Wait for the imports of the server, the first time; an interrupt ends the wait.

    What the server is asked for meanwhile is a process that ends by itself, also if nobody knows of it.
    """
    global _has_server
    if not _has_server:
        start_server()
        process = ProcessWithoutMain(target=int)
        process.start()
        process.join()
        _has_server = True


def fork_peer(name: str, packed_recipe: bytes, log_path: Path) -> tuple[BaseProcess, Connection]:
    """Start a local peer, when the server can be asked: see :func:`wait_for_server`.

    :param name: of the process
    :param packed_recipe: what :func:`hivenb.peers.peer_recipe.make_recipe` gave
    :param log_path: where it is to write what it logs
    :returns: its process, and a connection for orders and reports
    """
    start_server()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = ProcessWithoutMain(
        target=_run_program,
        args=(PROGRAM, packed_recipe, main_module(), theirs, os.getpid(), str(log_path)),
        name=name,
        daemon=False,  # it has children of its own
    )
    with interrupts_blocked():
        process.start()
    theirs.close()
    return process, ours


def _run_program(program: str, *arguments: Any) -> None:
    importlib.import_module(program).main(*arguments)
