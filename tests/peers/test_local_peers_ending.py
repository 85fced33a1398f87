"""Local peers end with the swarm, and with their parent, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import processes
import psutil
import pytest
import tiny

import hivenb
from hivenb.errors import LocalPeerError, SwarmError
from hivenb.options import Options
from hivenb.peers import local_peers
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

#: The peers' processes are forked from one that imports torch first, which takes its time on a busy machine.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


SCRIPT = """
import os, time
import torch
from torch import nn
import lightning
import hivenb, tiny

class Model(lightning.LightningModule):  # of __main__
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    swarm = hivenb.Swarm()
    run = hivenb.TrainingRun(Model(), tiny.loader(), swarm=swarm, accelerator="cpu",
                             options=hivenb.Options(target_batch_size=64))
    swarm.add_local_peers(2, run)
    run.start()
    while run.status.num_peers < 3:
        assert run.wait(epochs=1, timeout=60)
    print("together", flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("group", [False, pytest.param(True, marks=pytest.mark.long)])
def test_they_end_with_a_parent_that_is_killed(tmp_path, group):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path), "PATH": ""}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as parent:
        try:
            assert parent.stdout.readline() == "together\n"
            everybody = psutil.Process(parent.pid).children(recursive=True)
            # the DHT and its daemon, two averagers; twice more for the peers; the peers; their server
            assert len(everybody) >= 3 * 4 + 2 + 1
        finally:
            (os.killpg if group else os.kill)(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert alive == [], [process.cmdline() for process in alive]


def test_closing_the_swarm_ends_them_and_their_folder(tmp_path, eventually):
    before = processes.passing()
    with hivenb.Swarm("closing") as swarm:
        run = TrainingRun(
            tiny.TinyModel(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=64), accelerator="cpu"
        )
        (peer,) = swarm.add_local_peers(1, run)
        folder = peer._log_path.parent
        assert list(folder.iterdir())
        run.start()
        assert run.wait(epochs=2, timeout=PATIENCE)
        run.stop()
        assert peer.state == "left"
        assert list(folder.glob("hivenb-run-*")) == [], "with its model and optimizer"
    assert not folder.exists()
    assert processes.passing() <= before


class HeldOnArrival(tiny.TinyModel):
    """Who unpacks it leaves a note, and comes no further."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return hold, (self.folder,)


class HeldInSetup(tiny.TinyModel):
    """Who sets up its training anywhere else leaves a note, and comes no further; it has joined the swarm by then."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.home = folder, os.getpid()

    def configure_optimizers(self):
        if os.getpid() != self.home:
            hold(self.folder)
        return super().configure_optimizers()


def hold(folder):
    (folder / str(os.getpid())).touch()
    threading.Event().wait()


@pytest.mark.parametrize("model", [HeldOnArrival, HeldInSetup])
def test_a_swarm_closes_while_peers_are_being_added(swarm, tmp_path, eventually, model):
    before = processes.passing()
    run = TrainingRun(model(tmp_path), tiny.loader(), swarm=swarm, options=Options(target_batch_size=64))
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(swarm.add_local_peers, 2, run)
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, PATIENCE)
        began = time.monotonic()
        assert swarm.local_peers == ()
        swarm.remove_local_peers()
        swarm.close()
        assert time.monotonic() - began < 30, "as long as peers may take to start is 120 s"
        with pytest.raises(LocalPeerError, match="closed before the peers on this machine had started"):
            adding.result(1)
    assert not any(psutil.pid_exists(int(note.name)) for note in tmp_path.iterdir())
    assert psutil.wait_procs(processes.passing() - before, timeout=10)[1] == []
    with pytest.raises(SwarmError, match="is closed"):
        swarm.add_local_peers(1, run)


def test_a_peer_that_nobody_knows_of_yet_when_the_swarm_closes_is_ended(swarm, monkeypatch, eventually):
    run = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=64))
    before, launched, fork_peer = processes.passing(), threading.Event(), local_peers.fork_peer
    forked = []

    def fork_and_dawdle(*args):
        made = fork_peer(*args)
        forked.append(made[0])
        launched.set()
        eventually(lambda: swarm.local._is_closed, PATIENCE)
        return made

    monkeypatch.setattr(local_peers, "fork_peer", fork_and_dawdle)
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(swarm.add_local_peers, 2, run)
        assert launched.wait(PATIENCE)
        swarm.close()
        with pytest.raises(LocalPeerError, match="closed before"):
            adding.result(1)
    (process,) = forked
    assert not psutil.pid_exists(process.pid)
    assert psutil.wait_procs(processes.passing() - before, timeout=10)[1] == []
