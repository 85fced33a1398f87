from __future__ import annotations

import threading
import time

import numpy as np
import psutil
import tiny
import torch

import hivenb
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.history import History
from hivenb.options import Options
from hivenb.run.monitor import Monitor, gpu_bytes, resident_bytes
from hivenb.swarm.roster import Presence
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
        eventually(lambda: "left" in " ".join(event.text for event in history.snapshot().events), 60)
        eventually(lambda: len(monitor.peers) == 1, 60)
        run.stop()
    finally:
        monitor.close()
    snapshot = history.snapshot()
    assert {event.text.split()[-1] for event in snapshot.events if event.kind == "peer"} >= {"joined", "left"}
    assert snapshot.series["peers"].highs.max() == 2
    assert snapshot.last("swarm_samples_per_second") >= 0
    for name in ("bytes_sent", "bytes_received"):
        total = snapshot.series[name]
        assert np.all(np.diff(total.values) >= 0)
        assert total.values[-1] > 0
    seen = history.version
    monitor.close()
    assert history.version == seen
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


def test_a_peer_killed_is_shown_as_gone_within_ten_seconds_and_what_it_put_in_stays(swarm, eventually):
    options = Options(target_batch_size=512, run_id="killed", matchmaking_time=2.0)
    run = TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, options=options, accelerator="cpu")
    (local,) = swarm.add_local_peers(1, run)
    run.start()

    def presence() -> Presence | None:
        return next((m.presence for m in run.roster.members if m.peer.peer_id == local.peer_id), None)

    eventually(lambda: presence() is Presence.HERE, 60)
    eventually(lambda: all(member.samples > 0 for member in run.roster.members), 60)
    local.kill()
    ghost_after = time.monotonic()
    eventually(lambda: presence() in (Presence.GHOST, Presence.GONE), 10)
    assert time.monotonic() - ghost_after <= 10
    assert local.peer_id not in {peer.peer_id for peer in run.peers()}
    assert run.status.num_peers == 1
    eventually(lambda: "left without a goodbye" in " ".join(event.text for event in run.history.snapshot().events))
    assert all(member.samples > 0 for member in run.roster.members)
    run.stop()
    assert presence() is Presence.UNKNOWN


def test_it_ends_quietly_with_the_swarm(swarm):
    monitor = Monitor(swarm, "none", History())
    monitor.start()
    swarm.close()  # while it looks, or before
    monitor.close()
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


def test_totals_go_on_where_an_earlier_start_has_left_them(swarm):
    history = History()
    history.record("bytes_sent", 5000.0)
    history.record("bytes_received", 7000.0)
    monitor = Monitor(swarm, "again", history)
    peer = PeerInfo("12D3KooWself0001", 14, 410, 130.0, False, 0.4, True)
    swarm.peers = lambda run_id: (peer,)
    monitor.start()
    monitor.close()
    monitor.on_epoch(15)
    assert history.snapshot().series["bytes_sent"].epochs.tolist() == [0, 0, 15]
    assert 5000 <= history.snapshot().last("bytes_sent") < 100_000
    assert 7000 <= history.snapshot().last("bytes_received") < 100_000


def test_memory_is_that_of_this_process():
    rss = psutil.Process().memory_info().rss
    assert abs(resident_bytes() - rss) < 0.2 * rss


def test_gpu_memory_is_that_of_tensors_and_unknown_without_any():
    if not torch.cuda.is_available():
        assert gpu_bytes() is None
        return
    torch.cuda.init()
    before = gpu_bytes()
    held = torch.zeros(10_000_000, device="cuda")
    assert before is not None
    assert gpu_bytes() - before >= held.nbytes
