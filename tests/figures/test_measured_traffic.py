"""Traffic: as many bytes as somebody else has counted between the peers; and what is made of the totals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import hivenb
from hivenb.figures.measured_traffic import Traffic, _connections, per_epoch, per_second
from hivenb.history import History
from hivenb.options import Options
from hivenb.training import TrainingRun

RELAY = Path(__file__).parents[1] / "benchmarks" / "codecs.py"


#: In an interpreter of its own, as the benchmark: two peers whose only connection is through a relay that counts.
COUNT_TWICE = """
import runpy, sys, torch
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.figures.measured_traffic import Traffic

if __name__ == "__main__":
    with runpy.run_path(sys.argv[1])["TwoPeers"]() as peers:
        traffics = [Traffic(dht.pid) for dht in peers._dhts]
        before = peers.relay.count
        peers.rounds(GradientAverager, [torch.randn(2**18) for _ in range(2)], repeat=2)
        # one after the other: by the time of the last count the relay has forwarded all that was counted first
        counts = [traffic.read() for traffic in traffics]
        print(peers.relay.count - before, *(f"{count.sent} {count.received}" for count in counts))
"""


@pytest.mark.process
def test_it_counts_what_a_relay_between_two_peers_has_forwarded() -> None:
    command = [sys.executable, "-c", COUNT_TWICE, str(RELAY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    forwarded, *counts = map(int, done.stdout.split())
    assert forwarded > 2 * 2 * 4 * 2**18
    # DHTs have more to say to each other when they have just met, and some of that was under way in the beginning
    assert counts == [pytest.approx(forwarded / 2, rel=0.01)] * 4


@pytest.mark.process
def test_it_says_when_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Traffic(os.getpid()).read() is None, "there is no daemon"

    def refuse() -> Iterator[Any]:
        raise PermissionError
        yield

    with hivenb.Swarm("untold") as swarm:
        traffic = Traffic(swarm.dht.pid)
        assert traffic.read() is not None
        monkeypatch.setattr("hivenb.figures.measured_traffic._connections", refuse)
        assert traffic.read() is None
        assert Traffic(swarm.dht.pid).read() is None
    monkeypatch.undo()
    assert traffic.read() is None, "the daemon has ended"


def test_connections_of_both_families_are_told_apart() -> None:
    import socket

    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            try:
                listener.bind((address, 0))
            except OSError:
                continue  # this machine has no IPv6
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as near, listener.accept()[0] as far:
                near.sendall(bytes(12345))
                far.recv(12345, socket.MSG_WAITALL)
                counts = {inode: count for _, inode, count in _connections()}
                assert counts[os.fstat(far.fileno()).st_ino].received == 12345
                assert counts[os.fstat(near.fileno()).st_ino].sent in (12345, 12346)  # Linux counts the SYN


@pytest.mark.slow
def test_float16_halves_the_bytes_of_an_epoch(swarm: hivenb.Swarm, eventually: Callable[..., None]) -> None:
    plain = _bytes_a_round(swarm, "plain", eventually)
    half = _bytes_a_round(swarm, "half", eventually, grad_compression="float16", state_averaging_compression="float16")
    size = 4 * sum(parameter.numel() for parameter in Wide().parameters())
    assert plain > 2 * size  # gradients and parameters: half of each goes out, and the average of the other half
    assert 0.4 < half / plain < 0.6


class Wide(tiny.TinyModel):
    """As many parameters as it takes to outweigh matchmaking, and few batches that take long, but no computing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(4, 400), torch.nn.Linear(400, 400), torch.nn.Linear(400, 400), torch.nn.Linear(400, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.08)
        return super().training_step(batch, batch_idx)


def _bytes_a_round(swarm: hivenb.Swarm, run_id: str, eventually: Callable[..., None], **options: Any) -> float:
    """What a peer sends in each round, of gradients and state, while it trains with one other."""
    options = {"target_batch_size": 2048, "run_id": run_id, "matchmaking_time": 2.0, **options}
    with hivenb.Swarm.join(swarm.invite, f"guest-{run_id}") as guest:
        runs = [
            TrainingRun(Wide(), tiny.loader(512, 64), swarm=one, options=Options(**options), accelerator="cpu")
            for one in (swarm, guest)
        ]
        for run in runs:
            run.start()
        history = runs[0].history

        def rounds() -> int:
            sizes = history.snapshot().series.get("group_size")
            return 0 if sizes is None else int((sizes.values == 2).sum())

        eventually(lambda: rounds() >= 7, 120)
        for run in runs:
            run.stop()
        snapshot = history.snapshot()
    met = snapshot.series["group_size"]
    _, epochs, growth = per_epoch(snapshot.series["bytes_sent"])
    together = np.isin(epochs, met.epochs[met.values == 2])
    assert together.sum() >= 5
    return float(np.median(growth[together]))  # of most: a look at the counters may fall into the middle of a round


def series(values: list[float], epochs: list[int], capacity: int = 64) -> Any:
    history = History(capacity)
    for second, (value, epoch) in enumerate(zip(values, epochs, strict=True)):
        history.record("total", value, epoch=epoch, time=1000.0 + second)
    return history.snapshot().series["total"]


def test_growth_is_that_of_whole_epochs() -> None:
    total = series([0, 10, 20, 40, 60, 70, 75], [1, 1, 2, 2, 3, 3, 4])
    times, epochs, growth = per_epoch(total)
    assert epochs.tolist() == [3, 4]
    assert growth.tolist() == [40, 15]
    assert times.tolist() == [4, 6]


def test_epochs_that_went_by_unseen_share_the_growth() -> None:
    _, epochs, growth = per_epoch(series([0, 100, 300, 310], [0, 1, 5, 6]))
    assert epochs.tolist() == [5, 6]
    assert growth.tolist() == [50, 10]


def test_growth_is_exact_in_a_series_that_was_merged() -> None:
    count = 4096
    total = series([10.0 * i for i in range(count)], [i // 4 for i in range(count)], capacity=32)
    _, _, growth = per_epoch(total)
    assert len(growth) > 8
    assert np.allclose(growth, 40.0, rtol=0.1)
    _, speed = per_second(total)
    assert np.allclose(speed, 10.0)


def test_a_total_that_begins_anew_gives_no_negative_growth() -> None:
    total = series([100, 200, 300, 0, 50, 60], [4, 5, 6, 0, 1, 2])
    assert per_epoch(total)[2].tolist() == [100, 50, 10]
    assert per_second(total)[1].tolist() == [100, 100, 50, 10]
    assert all(len(part) == 0 for part in per_epoch(series([1], [1])))
