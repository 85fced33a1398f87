"""Memory that processes share, and locks in it: what to say of a machine that has none."""

from __future__ import annotations

import multiprocessing as mp
import os

from hivenb.errors import PlatformError

#: Where Linux keeps both (https://man7.org/linux/man-pages/man7/shm_overview.7.html).
FOLDER = "/dev/shm"


def require_locks() -> None:
    """Stop with a clear sentence where processes cannot share a lock, which hivemind makes as it is imported.

    :raises PlatformError: if they cannot
    """
    try:
        mp.Lock()
    except (OSError, ImportError) as e:
        raise PlatformError(
            f"processes of this machine cannot share locks, which are kept in {FOLDER}: {_state()} ({e}). Mount it: "
            f"mount -t tmpfs -o size=2g tmpfs {FOLDER}. A container has it unless it was told otherwise, as by docker "
            "run --read-only without --tmpfs /dev/shm"
        ) from e


def require_shared_memory(needed: int, folder: str = FOLDER) -> None:
    """Stop with a clear sentence where processes cannot share as much memory; they would be killed when they do.

    :param needed: bytes
    :param folder: where the system keeps what processes share
    :raises PlatformError: if there is less
    """
    try:
        free, whole = _megabytes(os.statvfs(folder))
    except OSError:
        return  # it is kept elsewhere
    if needed / 2**20 <= free:
        return
    raise PlatformError(
        f"{folder} has {free:,.0f} of its {whole:,.0f} MB left, and this model needs {needed / 2**20:,.0f} MB of it, "
        f"which a peer shares with its averagers. {PlatformError.MORE_SHARED_MEMORY}"
    )


def too_little(error: Exception) -> PlatformError:
    """What to say when torch gets no shared memory.

    :param error: its own
    """
    return PlatformError(
        f"processes of this machine cannot share memory in {FOLDER}: {_state()} ({error}). "
        f"{PlatformError.MORE_SHARED_MEMORY}"
    )


def _state() -> str:
    if not os.path.isdir(FOLDER):
        return "there is no such folder"
    room = os.statvfs(FOLDER)
    if room.f_flag & os.ST_RDONLY:
        return "it is read-only"
    if not os.access(FOLDER, os.W_OK):
        return "this user may not write there"
    free, whole = _megabytes(room)
    return f"it has {free:,.1f} of its {whole:,.1f} MB left"


def _megabytes(room: os.statvfs_result) -> tuple[float, float]:
    """How many MB of a file system are free, and how many it has."""
    return room.f_bavail * room.f_frsize / 2**20, room.f_blocks * room.f_frsize / 2**20
