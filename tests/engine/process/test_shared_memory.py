"""What is said of a machine whose processes can share too little memory, or no locks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hivenb.engine.process import shared_memory
from hivenb.errors import PlatformError


@pytest.mark.parametrize(("needed", "is_refused"), [(30 * 2**20, False), (50 * 2**20, True)])
def test_too_little_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch, needed: int, is_refused: bool) -> None:
    room = SimpleNamespace(f_frsize=4096, f_blocks=64 * 2**20 // 4096, f_bavail=40 * 2**20 // 4096)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: room)
    if not is_refused:
        shared_memory.require_shared_memory(needed)
        return
    with pytest.raises(PlatformError, match=r"/dev/shm has 40 of its 64 MB left, and this model needs 50 MB.*shm-size"):
        shared_memory.require_shared_memory(needed)


def test_where_there_is_no_such_folder_nothing_is_refused() -> None:
    shared_memory.require_shared_memory(2**60, "/nowhere")
