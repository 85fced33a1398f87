"""A plain Trainer goes on when a part of its peer is killed, or says what has ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import hivemind
import psutil
import pytest
import tiny
from lightning import Callback
from processes import SHARER

from hivenb.engine.process.child import shared_locks_held
from hivenb.errors import ProcessEndedError
from hivenb.strategy import HivemindStrategy
from strategy.peers import PATIENCE, Peer, Start, meet, stop

pytestmark = pytest.mark.process

#: Seconds within which the end of a part is to be known.
NOTICED_WITHIN = 10.0

WAYS = [pytest.param({}, id="synchronous"), pytest.param(tiny.DELAYS, id="delayed", marks=pytest.mark.long)]


def part_of(pid: int, part: str) -> int:
    """A process among the children of a peer: ``daemon``, ``dht``, which has started that, or an ``averager``."""
    children = psutil.Process(pid).children(recursive=True)
    daemon = next(child for child in children if child.name() == "p2pd")
    if part == "daemon":
        return daemon.pid
    if part == "dht":
        return daemon.ppid()
    others = (child for child in children if child.ppid() == pid and SHARER not in " ".join(child.cmdline()))
    return next(child.pid for child in others if child.pid != daemon.ppid())


@pytest.mark.parametrize("delays", WAYS)
@pytest.mark.slow
def test_the_peers_of_a_script_meet_again(start_peer: Start, delays: dict[str, Any]) -> None:
    settings = {"peers": 2, "epochs": None, "strategy": delays}
    first = start_peer(0, settings)
    second = start_peer(1, settings, addresses=first.wait_until(lambda: first.addresses, "its addresses"))
    peers: list[Peer] = [first, second]
    epoch = meet(peers, since=1)
    for part in ("daemon", "dht", "averager"):
        for victim in peers:
            os.kill(part_of(victim.process.pid, part), signal.SIGKILL)
            epoch = meet(peers, since=epoch + 3)
    stop(peers)


class Kill(Callback):
    """Kills a part of a plain DHT in the middle of training, and notes when."""

    def __init__(self, dht: hivemind.DHT, part: str):
        self._dht, self._part = dht, part
        self.at = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 20 and not self.at:
            self.at = time.monotonic()
            daemon = next(child for child in psutil.Process(self._dht.pid).children() if child.name() == "p2pd")
            os.kill(daemon.pid if self._part == "daemon" else self._dht.pid, signal.SIGKILL)


@pytest.mark.parametrize("part", ["daemon", "dht"])
def test_a_plain_dht_that_was_lent_is_not_started_anew_and_the_error_says_so(part: str) -> None:
    dht = hivemind.DHT(start=True, **tiny.LOOPBACK)
    try:
        kill = Kill(dht, part)
        strategy = HivemindStrategy(64, dht=dht, matchmaking_time=2.0, **tiny.own_run())
        watchdog = threading.Timer(PATIENCE, os._exit, [1])
        watchdog.start()
        with pytest.raises(ProcessEndedError, match=r"DHT \(process \d+\).* has ended.*(hivemind|started anew)"):
            tiny.trainer(strategy, max_epochs=-1, callbacks=[kill]).fit(tiny.PacedModel(), tiny.loader())
        watchdog.cancel()
        assert time.monotonic() - kill.at < NOTICED_WITHIN
    finally:
        with shared_locks_held():  # it may be answering, and would take the lock along that each answer takes
            dht.terminate()
            dht.join()
