"""Processes in network namespaces: hosts of their own, on one machine."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNET = 0x40000000


def enter(space: str) -> None:
    """Move the calling thread into a network namespace, and all threads and processes that it starts from now on.

    :param space: name of the namespace
    :raises OSError: if that is not allowed
    """
    with open(f"/run/netns/{space}") as opened:
        move_to(opened.fileno())


def move_to(network: int) -> None:
    """The same, for a descriptor of a namespace.

    :raises OSError: if that is not allowed
    """
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "a network namespace cannot be entered")
