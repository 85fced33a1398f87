"""Where sockets of the file system are put: in a folder that takes them, and whose path leaves room for their names.

A socket's path has 107 bytes at most (https://man7.org/linux/man-pages/man7/unix.7.html). The folders that batch
systems and test runners name in ``TMPDIR`` often leave too few of them: multiprocessing and torch's manager of shared
memory put their sockets there, into folders of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from typing import Any

from hivenb.errors import PlatformError

#: Bytes of a socket's path, without the zero at its end.
LONGEST_PATH = 107

#: Bytes that the path of a folder may have: the longest that comes after it is ``/hivemind-p2pclient-...........sock``.
LONGEST_FOLDER = LONGEST_PATH - 36

#: What multiprocessing puts into its own folder: ``/listener-........``.
_LISTENER = 18

#: Where sockets are put if not in the folder for temporary files.
_ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm")

#: What to do if nothing else is left.
_REMEDY = "Before Python starts, name a folder with a short path in which you may write: export TMPDIR=/tmp"


def temporary_folder() -> str:
    """Python's folder for temporary files.

    :raises PlatformError: if there is none in which this process can write
    """
    try:
        return tempfile.gettempdir()
    except OSError as e:
        named = f"TMPDIR={os.environ['TMPDIR']!r}" if os.environ.get("TMPDIR") else "TMPDIR, which is not set"
        raise PlatformError(
            f"there is no folder for temporary files: neither {named}, nor /tmp or /var/tmp is a folder in which this "
            "process can write, with room on its disk. Make room there, or name a folder with a short path in which "
            "you may write, before Python starts: export TMPDIR=/some/folder"
        ) from e


def socket_folder() -> str:
    """A folder for sockets: that for temporary files if it can be, else one of the system's with a short path.

    :raises PlatformError: if there is none
    """
    usual = temporary_folder()
    others = [os.environ.get("XDG_RUNTIME_DIR", ""), *_ELSEWHERE]
    for folder in (usual, *others):
        if takes_sockets(folder):
            return folder
    length = len(os.fsencode(usual))
    why = (
        f"has a path of {length} bytes, and {LONGEST_FOLDER} is the most that leaves room for the name of a socket"
        if length > LONGEST_FOLDER
        else "takes no sockets"
    )
    raise PlatformError(
        f"there is no folder for the sockets of hivenb's processes: {usual!r}, the folder for temporary files, {why}; "
        f"and none can be made in {', '.join(filter(None, others))}. {_REMEDY}"
    )


def takes_sockets(folder: str) -> bool:
    """Whether a socket can be made in a folder, with a name as long as they have."""
    if not os.path.isabs(folder) or len(os.fsencode(folder)) > LONGEST_FOLDER:
        return False
    path = tempfile.mktemp(prefix="hivenb-", dir=folder)  # not mkstemp(): a file would be in the way
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.bind(path)
        os.unlink(path)
    except OSError:  # not there, read-only, full, or of a kind that has none, as some of those on a network
        return False
    return True


@contextlib.contextmanager
def sockets_of_torch() -> Iterator[None]:
    """Let torch's manager of shared memory, if it is started meanwhile, have its socket where its path fits.

    It looks for ``TMPDIR`` in its environment, which is that of this process. What Python knows of that stays as it is.

    :raises PlatformError: if there is no such place
    """
    os.putenv("TMPDIR", socket_folder())
    try:
        yield
    finally:
        before = os.environ.get("TMPDIR")
        if before is None:
            os.unsetenv("TMPDIR")
        else:
            os.putenv("TMPDIR", before)


def place_sockets_of_multiprocessing() -> None:
    """Let multiprocessing have its folder, of which each process has one, where the paths of its sockets fit.

    Those are of the server that forks local peers, and of who hands out descriptors to other processes. It stays where
    it would be if they fit there. Processes that are made from now on have the same folder.

    :raises PlatformError: if there is no such place
    """
    config: dict[str, Any] = mp.current_process()._config  # type: ignore[attr-defined]
    there = config.get("tempdir")
    if there is not None:
        if len(os.fsencode(there)) + _LISTENER <= LONGEST_PATH:
            return
    elif socket_folder() == temporary_folder():
        return
    made = tempfile.mkdtemp(prefix="pymp-", dir=socket_folder())
    config["tempdir"] = made
    util.Finalize(None, shutil.rmtree, args=(made, True), exitpriority=-100)  # as multiprocessing does with its own
