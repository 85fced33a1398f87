from __future__ import annotations

import threading

import psutil
import tiny

import hivenb
from hivenb.history import History
from hivenb.monitor import Monitor, resident_bytes
from hivenb.options import Options
from hivenb.training import TrainingRun


def test_it_sees_peers_come_and_go(swarm, eventually):
    history = History()
    monitor = Monitor(swarm, "seen", history)
    assert monitor.peers == ()
    monitor.start()
    try:
        assert history.snapshot().last("peers") is None
        options = Options(target_batch_size=64, run_id="seen")
        run = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=options, accelerator="cpu")
        run.start()
        eventually(lambda: len(monitor.peers) == 1)
        eventually(lambda: (history.snapshot().last("samples_per_second") or 0) > 0)
        with hivenb.Swarm.join(swarm.invite, "guest") as guest:
            other = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=guest, options=options, accelerator="cpu")
            other.start()
            eventually(lambda: len(monitor.peers) == 2, 60)
            eventually(lambda: "joined" in " ".join(event.text for event in history.snapshot().events))
        eventually(lambda: len(monitor.peers) == 1, 60)
        run.stop()
    finally:
        monitor.close()
    snapshot = history.snapshot()
    assert {event.text.split()[-1] for event in snapshot.events if event.kind == "peer"} >= {"joined", "left"}
    assert snapshot.series["peers"].highs.max() == 2
    assert snapshot.last("swarm_samples_per_second") >= 0
    seen = history.version
    monitor.close()
    assert history.version == seen
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


def test_it_ends_quietly_with_the_swarm(swarm):
    monitor = Monitor(swarm, "none", History())
    monitor.start()
    swarm.close()  # while it looks, or before
    monitor.close()
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


def test_memory_is_that_of_this_process():
    rss = psutil.Process().memory_info().rss
    assert abs(resident_bytes() - rss) < 0.2 * rss
