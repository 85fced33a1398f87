from __future__ import annotations

import os
import signal
import threading

import pytest
import tiny

from hivenb.options import Options
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_peer_that_fails_while_training_leaves_the_run_alone(swarm, eventually):
    class Mortal(tiny.TinyModel):
        home = os.getpid()

        def training_step(self, batch, batch_idx):
            threading.Event().wait(0.01)
            if batch_idx == 3 and os.getpid() != self.home:
                raise ArithmeticError("the peer's own")
            return super().training_step(batch, batch_idx)

    run = TrainingRun(Mortal(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=64), accelerator="cpu")
    (peer,) = swarm.add_local_peers(1, run)
    run.start()
    eventually(lambda: peer.state == "failed", PATIENCE)
    assert any("the peer's own" in line for line in peer.log)
    assert run.wait(epochs=3, timeout=PATIENCE)


def test_of_one_that_was_killed_its_last_words_are_the_signal(swarm, eventually):
    run = TrainingRun(
        tiny.TinyModel(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=64), accelerator="cpu"
    )
    (peer,) = swarm.add_local_peers(1, run)
    os.kill(peer.pid, signal.SIGKILL)
    eventually(lambda: peer.state == "failed", PATIENCE)
    assert peer.log, "it has said something, which has nothing to do with its end"
    assert peer.last_words == "it was killed by signal 9 (SIGKILL), often by the system when memory runs out"
