"""The checks after a fault see what they are to see, and a living swarm withstands a few faults.

All faults, one by one or hundreds at random: ``python -m tests.faults``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import field as fields
from faults.__main__ import all_faults, attempt
from faults.case import BrokeError
from faults.field import SETTINGS, Field, check_checkpoint


class Peer:
    """What a field knows of a peer that has ended such epochs, with such parameters."""

    def __init__(self, epochs: list[int], value: float = 1.0):
        self.moments = [SimpleNamespace(epoch=epoch, report=object()) for epoch in epochs]
        self._value = value

    def history(self) -> dict[int, list[torch.Tensor]]:
        return {moment.epoch: [torch.tensor([self._value])] for moment in self.moments}


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(SETTINGS, lambda *args, **kwargs: pytest.fail("started"), str(tmp_path))


def with_peers(field: Field, *peers: Any) -> None:
    field.peers = list(peers)
    field._numbers = {peer: number for number, peer in enumerate(peers)}


def test_every_fault_has_a_name_and_says_what_happens() -> None:
    for name, fault in all_faults().items():
        assert name == fault.name
        assert fault.about.endswith(".")
    assert sum(fault.repeats for fault in all_faults().values()) >= 10


def test_parameters_that_differ_or_are_not_finite_are_seen(field: Field) -> None:
    with_peers(field, Peer([5], 1.0), Peer([5], 1.0))
    assert field._agree(5)
    with_peers(field, Peer([5], 1.0), Peer([5], 1.1))
    assert not field._agree(5)
    with_peers(field, Peer([5], 1.0), Peer([5], float("nan")))
    with pytest.raises(BrokeError, match="not finite in epoch 5"):
        field._agree(5)


def test_a_peer_that_goes_back_or_begins_with_less_than_there_was_is_seen(field: Field) -> None:
    with_peers(field, Peer([5, 6, 7]))
    field.note()
    field._check_course(field.peers[0])
    with_peers(field, Peer([5, 7, 6]))
    with pytest.raises(BrokeError, match=r"gone back: \[5, 7, 6\]"):
        field._check_course(field.peers[0])
    with_peers(field, Peer([7]))
    with pytest.raises(BrokeError, match="begun at epoch 7, when the swarm had ended 7"):
        field._check_course(field.peers[0])


def test_a_checkpoint_that_is_damaged_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    check_checkpoint(str(path))
    torch.save({"state_dict": {"weight": torch.ones(100)}}, path)
    check_checkpoint(str(path))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BrokeError, match="cannot be loaded"):
        check_checkpoint(str(path))
    torch.save({"state_dict": {"weight": torch.full((100,), torch.nan)}}, path)
    with pytest.raises(BrokeError, match="not finite"):
        check_checkpoint(str(path))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.process
def test_a_process_that_is_left_is_seen_and_ended(
    field: Field, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "GONE_WITHIN", 0.2)
    field._doomed = {psutil.Process(sleeper.pid)}
    with pytest.raises(BrokeError, match=rf"left behind: {sleeper.pid} sleep 600"):
        field._check_processes()
    assert sleeper.wait(10) == -9
    field._check_processes()


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_swarm_withstands_a_few_faults() -> None:
    names = ["killed-reducing", "p2pd-killed"]
    outcomes = attempt(names, seed=1)
    assert [(name, held) for name, held, _ in outcomes] == [(name, True) for name in names], outcomes
