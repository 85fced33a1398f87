"""A module that callbacks have is not read; a copy of what was trained is, or whoever reads waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hivemind.averaging import DecentralizedAverager

from hivenb.engine.averaging import module_access
from hivenb.engine.averaging.extensions.buffers import ModuleBuffers
from hivenb.engine.averaging.module_access import ModuleAccess
from hivenb.engine.optimizer.optimizer import Optimizer


def read_in_a_thread(access: ModuleAccess) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def read() -> None:
        with access.reading() as kept:
            found.append(kept)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, found


def test_the_module_itself_is_read_while_training_has_it() -> None:
    with ModuleAccess().reading() as kept:
        assert kept is None


def test_whoever_reads_waits_until_it_is_back() -> None:
    access = ModuleAccess()
    access.release()
    thread, found = read_in_a_thread(access)
    thread.join(0.2)
    assert not found
    access.acquire()
    thread.join(10)
    assert found == [None]


def test_what_was_kept_is_read_instead_whatever_the_module_becomes() -> None:
    access, weight = ModuleAccess(), torch.ones(3)
    access.release()
    thread, found = read_in_a_thread(access)
    access.keep([weight])
    weight.fill_(7.0)
    thread.join(10)
    ((kept,),) = found
    torch.testing.assert_close(kept, torch.ones(3))
    access.acquire()
    with access.reading() as now:
        assert now is None


def test_it_is_not_lent_in_the_middle_of_a_read() -> None:
    access = ModuleAccess()
    lending = threading.Thread(target=access.release, daemon=True)
    with access.reading():
        lending.start()
        lending.join(0.2)
        assert lending.is_alive()
    lending.join(10)
    assert not lending.is_alive()


def test_who_reads_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_access, "LONGEST_WAIT", 0.1)
    access = ModuleAccess()
    access.release()
    with pytest.raises(TimeoutError, match="a callback, or a hook of the module"), access.reading():
        pass
    access.end()
    with pytest.raises(TimeoutError, match="training has ended"), access.reading():
        pass


def test_it_is_lent_when_a_round_in_the_background_has_read_it() -> None:
    access, update = ModuleAccess(), Future[object]()
    access.expect_read()
    waiting = threading.Thread(target=access.wait_until_read, args=([update],), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    access.note_read()
    waiting.join(10)
    assert not waiting.is_alive()
    access.expect_read()
    update.set_result(None)
    access.wait_until_read([update])  # it has failed before it read anything


def test_buffers_that_were_kept_are_those_that_are_downloaded() -> None:
    norm = torch.nn.BatchNorm1d(3)
    buffers = ModuleBuffers(norm)
    buffers.keep()
    norm.running_mean.fill_(7.0)
    assert buffers.state()[0].tolist() == [0.0] * 3
    buffers.let_go()
    assert buffers.state()[0].tolist() == [7.0] * 3


def test_training_does_not_wait_for_a_state_of_a_process_that_never_answers(
    make_optimizer: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_optimizer([torch.nn.Parameter(torch.ones(3))]).state_averager
    is_asked, ask = threading.Event(), DecentralizedAverager.get_group_bits

    def noting(averager: DecentralizedAverager, wait: bool = True) -> Any:
        is_asked.set()
        return ask(averager, wait)

    monkeypatch.setattr(DecentralizedAverager, "get_group_bits", noting)
    os.kill(own.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        state = threads.submit(own.get_current_state)
        assert is_asked.wait(20)
        try:
            threads.submit(own.let_go_of_optimizer).result(20)
        finally:
            os.kill(own.pid, signal.SIGKILL)
        metadata, (parameter,), _ = state.result(20)
    assert metadata["group_bits"] == ""
    assert torch.equal(parameter, torch.ones(3))
