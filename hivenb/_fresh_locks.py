"""Locks that a child finds free, whoever of its parent's threads held them when it was forked."""

from __future__ import annotations

import os
from typing import Any


def free_in_children(lock: Any) -> None:
    """Let a process that is forked from this one have a lock that nobody holds.

    A thread that held it is not there to let it go, as threading and logging know of their own locks.

    :param lock: of threading, which lives as long as this process does
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
