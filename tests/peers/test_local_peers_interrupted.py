"""An interrupt at any moment while local peers are started leaves none behind."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest

from hivenb.peers import local_peers as module
from hivenb.peers.local_peers import LocalPeers


@pytest.mark.process
def test_one_that_was_just_forked_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    resource_tracker.ensure_running()  # which lets interrupts in once it runs
    forked: list[BaseProcess] = []

    def fork_peer(*args: Any) -> tuple[BaseProcess, Connection]:
        ours, _ = mp.Pipe()
        forked.append(mp.get_context("spawn").Process(target=time.sleep, args=(600,)))
        forked[0].start()
        signal.raise_signal(signal.SIGINT)
        return forked[0], ours

    monkeypatch.setattr(module, "fork_peer", fork_peer)
    monkeypatch.setattr(module, "make_recipe", lambda *args, **kwargs: b"")
    peers = LocalPeers()
    try:
        with pytest.raises(KeyboardInterrupt):
            peers.add(1, cast(Any, None), lambda: ())
        (process,) = forked
        assert not process.is_alive()
    finally:
        peers.close()
        forked[0].kill()
