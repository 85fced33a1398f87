from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
import torch

import hivenb
from hivenb.engine.network.dht import DHT
from hivenb.engine.progress.peer_reports import PeerInfo
from hivenb.errors import TrainingError
from hivenb.history import History
from hivenb.options import Options
from hivenb.run import monitor as module
from hivenb.run.monitor import Monitor, gpu_bytes, resident_bytes, short_id
from hivenb.run.status import RunState
from hivenb.swarm.members import Presence
from hivenb.training import TrainingRun

#: Seconds within which a peer that was killed is to be shown as gone: about two, or more on a busy machine.
GONE_WITHIN = 8.0


@pytest.fixture(scope="module")
def swarm() -> Iterator[hivenb.Swarm]:
    with hivenb.Swarm("monitored") as opened:
        yield opened


def run_of(run_id: str, swarm: hivenb.Swarm) -> TrainingRun:
    options = Options(target_batch_size=512, run_id=run_id, matchmaking_time=2.0)
    model = tiny.in_large_batches(tiny.PacedModel())
    return TrainingRun(model, tiny.large_batches(), swarm=swarm, options=options, accelerator="cpu")


def presence(run: TrainingRun, peer_id: str) -> Presence | None:
    return next((member.presence for member in run.members if member.peer.peer_id == peer_id), None)


def events(history: History, kind: str) -> list[str]:
    return [event.text for event in history.snapshot().events if event.kind == kind]


@contextlib.contextmanager
def reads(dht: DHT, key: str, answer: Callable[[Any], Any] = lambda future: future) -> Iterator[list[threading.Thread]]:
    """Notes which thread reads a key of the DHT, each time that one does.

    :param answer: what it gets, for the future that it would get
    """
    threads, get = [], dht.get

    def noted(asked: Any, *args: Any, **kwargs: Any) -> Any:
        found = get(asked, *args, **kwargs)
        if asked != key:
            return found
        threads.append(threading.current_thread())
        return answer(found)

    dht.get = noted  # type: ignore[method-assign]
    try:
        yield threads
    finally:
        del dht.get


def test_it_sees_peers_come_and_go(swarm, eventually):
    history = History()
    monitor = Monitor(swarm, "seen", history, samples=lambda: 41)
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
    assert snapshot.series["peers"].samples.max() == total.samples.max() == 41
    seen = history.version
    monitor.close()
    assert history.version == seen
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


@pytest.mark.slow
def test_while_a_run_trains_its_tracker_alone_reads_who_is_there(swarm, eventually):
    run = run_of("read", swarm)
    (local,) = swarm.add_local_peers(1, run)
    run.start()
    eventually(lambda: presence(run, local.peer_id) is Presence.HERE, 60)
    assert run.wait(epochs=1, timeout=60)
    with reads(swarm.dht, "read_progress") as threads:
        before = len(run.history.snapshot().series["peers"].values)
        assert run.wait(epochs=2, timeout=60)
        eventually(lambda: len(run.history.snapshot().series["peers"].values) >= before + 4)
        assert set(threads) == {run.strategy.optimizer.tracker}
        assert {peer.peer_id for peer in swarm.peers()} == {swarm.peer_id, local.peer_id}
        assert threading.current_thread() in threads, "whoever asks from outside reads"
    swarm.remove_local_peers(1)
    eventually(lambda: presence(run, local.peer_id) is Presence.AWAY)
    eventually(lambda: f"peer {short_id(local.peer_id)} left" in events(run.history, "peer"))
    assert [peer.is_self for peer in run.peers()] == [True]
    run.stop()


def test_a_peer_killed_is_soon_shown_as_gone_and_what_it_put_in_stays(swarm, eventually):
    run = run_of("killed", swarm)
    (local,) = swarm.add_local_peers(1, run)
    run.start()
    eventually(lambda: presence(run, local.peer_id) is Presence.HERE, 60)
    # of an epoch that is jumped over, as at first, nothing counts; what one that was ended came to stays
    met = run.status.epoch
    eventually(lambda: run.status.epoch >= met + 2, 60)
    eventually(lambda: all(member.samples > 0 for member in run.members), 60)
    local.kill()
    eventually(lambda: presence(run, local.peer_id) is Presence.GONE, GONE_WITHIN)
    assert run.strategy.optimizer.tracker.look.gone == {local.peer_id}
    assert local.peer_id not in {peer.peer_id for peer in run.peers()}
    assert run.status.num_peers == 1
    eventually(lambda: f"peer {short_id(local.peer_id)} left without a goodbye" in events(run.history, "peer"))
    assert all(member.samples > 0 for member in run.members)
    run.stop()
    assert presence(run, local.peer_id) is Presence.UNKNOWN


def test_one_that_pauses_is_away_until_it_goes_on(swarm, eventually):
    run = run_of("paused", swarm)
    run.start()
    eventually(lambda: presence(run, swarm.peer_id) is Presence.HERE, 60)
    run.pause()
    eventually(lambda: presence(run, swarm.peer_id) is Presence.AWAY)
    assert run.peers() == ()
    run.resume()
    eventually(lambda: presence(run, swarm.peer_id) is Presence.HERE)
    run.stop()


def test_a_dht_that_does_not_answer_is_told_with_the_seconds_again_and_again(swarm, eventually, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_TIMEOUT", 2.0)
    run = run_of("unanswered", swarm)
    run.start()
    assert run.wait(epochs=1, timeout=60)
    assert not events(run.history, "run")[1:], "all is well"

    def told() -> list[Any]:
        return [event for event in run.history.snapshot().events if "cannot be read" in event.text]

    with reads(swarm.dht, "unanswered_progress", answer=lambda future: type(future)()):
        eventually(lambda: len(told()) == 2)
        run.stop()
    pattern = r"the swarm cannot be read: the DHT has not answered for (\d+) s; is its process overloaded or gone\?"
    found = [re.fullmatch(pattern, event.text) for event in told()]
    assert [int(match[1]) >= least for match, least in zip(found, (2, 4), strict=True)] == [True, True]
    assert told()[1].time - told()[0].time > 1.9


def test_an_error_of_its_own_fails_the_run_also_while_it_is_paused(swarm, eventually):
    run = run_of("broken", swarm)
    for is_paused in (False, True):
        run.start()
        assert run.wait(epochs=1, timeout=60)
        if is_paused:
            run.pause()
            assert run.wait_for(RunState.PAUSED, timeout=60)
        run.member_list.update = None  # as if hivenb had an error
        with pytest.raises(TrainingError, match=r"the thread that watches the swarm has ended with TypeError"):
            run.wait(timeout=60)
        assert run.status.state is RunState.FAILED
        assert events(run.history, "run")[-1] == "failed: TrainingError"
        del run.member_list.update
    run.start()
    assert run.wait(epochs=1, timeout=60)
    run.stop()


@pytest.mark.process
@pytest.mark.slow
def test_it_ends_quietly_with_the_swarm():
    with hivenb.Swarm("ends") as swarm:
        monitor = Monitor(swarm, "none", History())
        monitor.start()
        # while it looks, or before
    monitor.close()
    assert not any(thread.name == "hivenb-monitor" for thread in threading.enumerate())


def test_totals_go_on_where_an_earlier_start_has_left_them(swarm, monkeypatch):
    history = History()
    history.record("bytes_sent", 5000.0)
    history.record("bytes_received", 7000.0)
    monitor = Monitor(swarm, "again", history, epoch=lambda: 15)
    peer = PeerInfo("12D3KooWself0001", 14, 410, 130.0, False, 0.4, True)
    monkeypatch.setattr(swarm, "peers", lambda run_id: (peer,))
    monitor.start()
    monitor.close()
    monitor.on_epoch()
    assert history.snapshot().series["bytes_sent"].epochs.tolist() == [0, 15, 15], "where it goes on, from the first"
    assert 5000 <= history.snapshot().last("bytes_sent") < 100_000
    assert 7000 <= history.snapshot().last("bytes_received") < 100_000


def test_a_clock_that_differs_is_marked_once_until_it_is_right(swarm, monkeypatch, eventually):
    history = History()
    monitor = Monitor(swarm, "clock", history)
    monkeypatch.setattr(module, "INTERVAL", 0.02)
    swarm.dht._clock.note(60.0)
    monitor.start()
    try:
        eventually(lambda: history.snapshot().events)
        looks = []
        monitor.on_look = looks.append
        eventually(lambda: len(looks) > 3)
        (event,) = history.snapshot().events
        assert "60 s behind those of the other peers" in event.text
    finally:
        swarm.dht._clock.note(0.0)
        monitor.close()


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
