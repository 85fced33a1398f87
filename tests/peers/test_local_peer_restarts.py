"""Local peers that die are started again if asked to: real ones that are killed, and how often at most."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tiny

import hivenb
from hivenb.engine.process.restart_count import MOST_RESTARTS
from hivenb.options import Options
from hivenb.peers.followed_run import Followers
from hivenb.peers.local_peers import LocalPeerRestarts
from hivenb.run.local_peer_count import LocalPeerCount
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0


class Run:
    """What of a run its restarts need."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.followers = Followers(self.said.append)


class Peer:
    """Looks like a local peer, dead or alive."""

    def __init__(self, number: int, state: str = "training"):
        self.number, self.state, self.last_words = number, state, "MemoryError"


def test_one_that_dies_again_and_again_is_given_up(eventually: Callable[..., None], caplog: Any) -> None:
    run, started = Run(), []

    def start_again(dead: Any, run: Any) -> None:
        started.append(dead.number)
        restarts.watch([Peer(dead.number + 1, "failed")], run)  # type: ignore[list-item]

    restarts = LocalPeerRestarts(start_again)
    with caplog.at_level(logging.WARNING):
        restarts.watch([Peer(1, "failed")], run)  # type: ignore[list-item, arg-type]
        eventually(lambda: run.said and "not started" in run.said[-1], 20.0)
    assert started == list(range(1, MOST_RESTARTS + 1))
    assert run.said[0] == "local peer 1 has died: it is started again"
    assert "MemoryError" in caplog.text
    eventually(lambda: not restarts._is_working)


@pytest.mark.parametrize("end", ["left", "removed", "closed"])
def test_one_that_was_to_go_is_not_started_again(eventually: Callable[..., None], end: str) -> None:
    run, one = Run(), Peer(1)
    restarts = LocalPeerRestarts(lambda *args: pytest.fail("started again"))
    restarts.watch([one], run)  # type: ignore[list-item, arg-type]
    if end == "left":
        one.state = "left"
    elif end == "removed":
        restarts.forget([one])  # type: ignore[list-item]
        one.state = "failed"
    else:
        restarts.close()
        one.state = "failed"
    eventually(lambda: not restarts._is_working)
    assert run.said == []


@pytest.mark.process
@pytest.mark.slow
def test_one_that_is_killed_comes_back_and_trains(swarm: hivenb.Swarm, eventually: Callable[..., None]) -> None:
    options = Options(target_batch_size=256, run_id="again", matchmaking_time=2.0)
    model = tiny.in_large_batches(tiny.PacedModel())
    run = TrainingRun(model, tiny.large_batches(), swarm=swarm, options=options, accelerator="cpu")
    run.start()
    (first,) = swarm.add_local_peers(1, run, restart=True)
    eventually(lambda: run.status.num_peers == 2, PATIENCE)
    first.kill()
    eventually(lambda: run.local_peers and run.local_peers[0] is not first, PATIENCE)
    (second,) = run.local_peers
    assert (second.number, second.state) == (2, "training")
    eventually(lambda: second.peer_id in {peer.peer_id for peer in run.peers()}, PATIENCE)
    events = [event.text for event in run.history.snapshot().events if event.kind == "peer"]
    assert "local peer 1 has died: it is started again" in events
    assert any("local peer 1 has died" in line for line in run.log_lines)
    count = LocalPeerCount(run)
    count.restart = False
    second.kill()
    eventually(lambda: run.local_peers[0].state == "failed", PATIENCE)
    eventually(lambda: not swarm.local._restarts._is_working, PATIENCE)
    assert run.local_peers == (second,)
    swarm.remove_local_peers()
    run.stop()


@pytest.mark.process
@pytest.mark.slow
def test_one_that_is_banned_stays_out_and_others_come_back(
    swarm: hivenb.Swarm, eventually: Callable[..., None]
) -> None:
    options = Options(target_batch_size=384, run_id="bans", matchmaking_time=2.0)
    model = tiny.in_large_batches(tiny.PacedModel())
    run = TrainingRun(model, tiny.large_batches(), swarm=swarm, options=options, accelerator="cpu")
    run.start()
    bad, good = swarm.add_local_peers(2, run, restart=True)
    eventually(lambda: run.status.num_peers == 3, PATIENCE)
    swarm.ban(str(bad.peer_id))
    eventually(lambda: bad.state in ("left", "failed"), PATIENCE)
    assert bad.why_ended == "it was banned from the swarm"
    good.kill()  # it came by the invite that is good no more
    eventually(lambda: run.local_peers[-1].number == 3, PATIENCE)
    again = run.local_peers[-1]
    eventually(lambda: again.peer_id in {peer.peer_id for peer in run.peers()}, PATIENCE)
    assert bad in run.local_peers
    swarm.remove_local_peers()
    run.stop()
