"""Local peers train with the run that they were added to: together, coming and going."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import lightning
import processes
import psutil
import pytest
import tiny
import torch
from torch import nn

from hivenb.engine.process.known_process import wait_for_exit
from hivenb.errors import HivenbError, LocalPeerError, SwarmError
from hivenb.options import Options
from hivenb.peers import local_peers
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

#: The peers' processes are forked from one that imports torch first, which takes its time on a busy machine.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def diary_model(folder: Path, pause: float = 0.08) -> lightning.LightningModule:
    """A model of a class that exists nowhere but in this function; it writes down what it becomes and is given."""

    class Diary(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.epoch = 0

        def training_step(self, batch, batch_idx):
            threading.Event().wait(pause)
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def on_train_batch_start(self, batch, batch_idx):
            path = folder / f"first-batch-{os.getpid()}"
            if not path.exists():
                path.write_text(repr(batch[0].tolist()))

        def on_train_batch_end(self, *args):
            epoch = self.trainer.strategy.hivemind_epoch
            if epoch != self.epoch:
                self.epoch = epoch
                torch.save([p.detach().clone() for p in self.parameters()], folder / f"{epoch}-{os.getpid()}.pt")

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Diary()


@pytest.fixture
def diary(tmp_path):
    return tmp_path


@pytest.fixture
def run(swarm, diary):
    return TrainingRun(
        diary_model(diary),
        tiny.large_batches(shuffle=True),
        swarm=swarm,
        options=Options(target_batch_size=512, matchmaking_time=3.0),
        accelerator="cpu",
    )


def group_sizes(run: TrainingRun) -> list[int]:
    series = run.history.snapshot().series.get("group_size")
    return [] if series is None else [int(size) for size in series.highs]


def test_three_peers_become_one_group_and_share_their_parameters(run, swarm, diary, eventually):
    peers = swarm.add_local_peers(2, run)
    assert swarm.local_peers == peers
    assert [peer.state for peer in peers] == ["ready", "ready"]
    assert [repr(peer) for peer in peers] == ["LocalPeer(1, ready)", "LocalPeer(2, ready)"]
    assert len({peer.pid for peer in peers} | {os.getpid()}) == 3
    assert len({peer.peer_id for peer in peers} | {swarm.peer_id}) == 3
    assert "2 local peers" in repr(swarm)

    run.start()
    eventually(lambda: group_sizes(run).count(3) >= 3, PATIENCE)
    assert [peer.state for peer in peers] == ["training", "training"]
    eventually(lambda: run.status.num_peers == 3, PATIENCE)
    assert {peer.peer_id for peer in run.peers()} == {swarm.peer_id, *(peer.peer_id for peer in peers)}
    assert sum(peer.is_self for peer in run.peers()) == 1

    # each starts with another batch
    eventually(lambda: len(list(diary.glob("first-batch-*"))) == 3, PATIENCE)
    assert len({path.read_text() for path in diary.glob("first-batch-*")}) == 3

    swarm.remove_local_peers()
    assert swarm.local_peers == ()
    run.stop()
    # ... and has the same parameters after each epoch; its count of epochs may be another's plus or minus one
    mine, *others = (written_by(diary, pid) for pid in (os.getpid(), *(peer.pid for peer in peers)))
    together = [epoch for epoch, size in enumerate(group_sizes(run), start=1) if size == 3 and epoch in mine]
    shared = [
        epoch
        for epoch in together
        if all(any(same(mine[epoch], state) for state in other.values()) for other in others)
    ]
    assert len(shared) >= 2, (together, shared)
    assert not same(mine[shared[0]], mine[shared[-1]])


def written_by(diary: Path, pid: int) -> dict[int, list[torch.Tensor]]:
    """The parameters of a peer after each of its epochs."""
    return {int(path.name.split("-")[0]): torch.load(path) for path in diary.glob(f"*-{pid}.pt")}


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def test_peers_that_are_killed_or_leave_or_come_later(run, swarm, eventually):
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    first, second = swarm.add_local_peers(2, run)
    eventually(lambda: 3 in group_sizes(run), PATIENCE)

    descendants = psutil.Process(first.pid).children(recursive=True)
    assert descendants
    first.kill()
    assert first.state == "failed"
    assert swarm.local_peers == (first, second)
    assert run.wait(epochs=4, timeout=PATIENCE)
    assert run.exception is None
    assert psutil.wait_procs(descendants, timeout=10)[1] == []

    swarm.remove_local_peers(1)
    assert second.state == "left"
    assert second._process.exitcode == 0
    assert swarm.local_peers == (first,)
    swarm.remove_local_peers(0)
    assert swarm.local_peers == (first,)
    swarm.remove_local_peers(5)
    assert swarm.local_peers == ()
    assert run.wait(epochs=2, timeout=PATIENCE)

    (third,) = swarm.add_local_peers(1, run)
    assert repr(third).startswith("LocalPeer(3, ")
    seen = len(group_sizes(run))
    eventually(lambda: 2 in group_sizes(run)[seen:], PATIENCE)
    assert any("loss" not in line for line in third.log)
    assert run.status.state is RunState.TRAINING


def test_they_live_on_when_the_server_is_killed_that_they_were_forked_from(run, swarm, eventually):
    first, second = swarm.add_local_peers(2, run)
    run.start()
    eventually(lambda: 3 in group_sizes(run), PATIENCE)
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    server.kill()
    assert wait_for_exit(server.pid, 10.0)  # and not server.wait(), which takes its exit code from multiprocessing
    seen = len(group_sizes(run))
    eventually(lambda: 3 in group_sizes(run)[seen:], PATIENCE)
    assert [peer.state for peer in (first, second)] == ["training", "training"]

    first.kill()
    assert wait_for_exit(first.pid, 0.0)
    assert first.state == "failed"
    (third,) = swarm.add_local_peers(1, run)
    swarm.remove_local_peers()
    assert all(wait_for_exit(peer.pid, 0.0) for peer in (second, third))
    assert third.state == "left"


def test_peers_follow_options_that_change_before_the_start(run, swarm, eventually):
    (peer,) = swarm.add_local_peers(1, run)
    run.apply(target_batch_size=256, grad_compression="float16")
    run.start()
    eventually(lambda: 2 in group_sizes(run), PATIENCE)
    swarm.remove_local_peers()
    assert peer._process.exitcode == 0  # of its own accord, not forced


def test_what_cannot_be_added_is_refused(run, swarm):
    for count in (0, -1, 1.5, True, "two"):
        with pytest.raises(LocalPeerError, match="whole number"):
            swarm.add_local_peers(count, run)
        if count != 0:
            with pytest.raises(LocalPeerError, match="whole number"):
                swarm.remove_local_peers(count)
        assert swarm.local_peers == ()
    # of a swarm whose daemon is just ending: whoever starts peers again expects no other errors than ours
    for error, words in (
        (ConnectionRefusedError("gone"), "does not say how it is joined: ConnectionRefusedError"),
        (SwarmError("x"), "x"),
    ):

        def way_in(error=error):
            raise error

        peers = local_peers.LocalPeers(way_in)
        try:
            with pytest.raises(HivenbError, match=words):
                peers.add(1, run)
            assert peers.all == ()
        finally:
            peers.close()


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), OSError(24, "Too many open files")])
def test_where_the_system_has_no_process_to_give_an_error_says_so(run, swarm, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(local_peers, "fork_peer", fail)
    with pytest.raises(LocalPeerError, match=r"could not be started \(.*open files may have run short"):
        swarm.add_local_peers(1, run)
    assert swarm.local_peers == ()


def test_a_peer_that_fails_at_the_start_says_why_and_leaves_nothing(run, swarm):
    before = processes.passing()
    run.trainer_kwargs["accelerator"] = "abacus"
    with pytest.raises(LocalPeerError, match=r"LocalPeer\(1, .*could not start: .*abacus"):
        swarm.add_local_peers(2, run)
    assert swarm.local_peers == ()
    assert psutil.wait_procs(processes.passing() - before, timeout=10)[1] == []
    run.trainer_kwargs["accelerator"] = "cpu"
    (peer,) = swarm.add_local_peers(1, run)
    assert peer.state == "ready"


def scheduled_model(folder: Path) -> lightning.LightningModule:
    """One whose rate follows the length of the training, and which writes down what that is.

    A run's is slow, and waits for the peer's first batch.
    """
    run_pid = os.getpid()

    class Scheduled(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            is_run, end = os.getpid() == run_pid, time.monotonic() + PATIENCE
            while is_run and not any(one.name != str(run_pid) for one in folder.iterdir()):
                assert time.monotonic() < end, "the peer does not train"
                time.sleep(0.05)
            time.sleep(0.1 if is_run else 0.02)
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def on_train_batch_end(self, *args):
            strategy, steps = self.trainer.strategy, self.trainer.global_step
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            with (folder / str(os.getpid())).open("a") as diary:
                diary.write(f"{self.total} {strategy.hivemind_epoch} {rate} {steps} {self.trainer.max_steps}\n")

        def configure_optimizers(self):
            self.total = self.trainer.estimated_stepping_batches
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}

    return Scheduled()


def test_they_have_the_schedule_of_the_run_and_do_not_end_before_it(swarm, tmp_path):
    """Whose length they know: by their own count of batches they would end long before."""
    options = Options(target_batch_size=256, matchmaking_time=2.0)
    data = tiny.loader(count=512, batch_size=32)
    run = TrainingRun(scheduled_model(tmp_path), data, swarm=swarm, options=options, accelerator="cpu", max_steps=32)
    (peer,) = swarm.add_local_peers(1, run)
    run.start()
    assert not run.wait(steps=1000, timeout=PATIENCE)
    assert run.status.state is RunState.FINISHED
    mine, theirs = (
        [[float(number) for number in line.split()] for line in (tmp_path / str(pid)).read_text().splitlines()]
        for pid in (os.getpid(), peer.pid)
    )
    assert {(line[0], line[4]) for line in mine + theirs} == {(4, 32)}
    assert max(line[3] for line in theirs) > 32
    for _, epoch, rate, *_ in mine + theirs:
        assert rate == max(0.0, 1 - epoch / 4)
