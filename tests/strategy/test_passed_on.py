"""Every further keyword reaches the one whom it is for: hivemind's optimizer, its parts, or the DHT's daemon."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hivemind.compression import SizeAdaptiveCompression
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from lightning import Callback
from tiny import LOOPBACK, TinyModel, loader, own_run, trainer

import hivenb
from hivenb.compression import Float16Compression, ScaledFloat16Compression, Uniform8BitQuantization
from hivenb.strategy import HivemindStrategy

EXTRA = torch.ones(3)


def to_state_averager(name: str) -> Callable[[Any], Any]:
    return lambda optimizer: getattr(optimizer.state_averager, name)


#: keyword, value, where it has to be found, and as what if not as it was given
PASSED_ON: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "use_local_updates": (True, lambda o: o.use_local_updates, True),
    "average_state_every": (3, lambda o: o.average_state_every, 3),
    "client_mode": (True, lambda o: [o.client_mode, o.state_averager.client_mode], [True, True]),
    "auxiliary": (True, lambda o: o.auxiliary, True),
    "average_opt_statistics": (("exp_avg",), to_state_averager("opt_keys_for_averaging"), ("exp_avg",)),
    "extra_tensors": ((EXTRA,), lambda o: o.state_averager.extra_tensors[0] is EXTRA, True),
    "load_state_compression": (
        Float16Compression(),
        lambda o: type(o.state_averager.state_compression),
        Float16Compression,
    ),
    "state_averaging_compression": (
        "uniform8bit",
        lambda o: type(o.state_averager.allreduce_kwargs["compression"]),
        Uniform8BitQuantization,
    ),
    "grad_compression": (
        SizeAdaptiveCompression(100, ScaledFloat16Compression(), Uniform8BitQuantization()),
        lambda o: o.grad_averager.allreduce_kwargs["compression"].threshold,
        100,
    ),
    "grad_averager_factory": (
        partial(PowerSGDGradientAverager, averager_rank=1),
        lambda o: (isinstance(o.grad_averager, PowerSGDGradientAverager), o.grad_averager.rank),
        (True, 1),
    ),
    "allreduce_timeout": (7.0, lambda o: [o.state_averager._allreduce_timeout, o.allreduce_timeout], [7.0, 7.0]),
    "next_chunk_timeout": (8.0, lambda o: o.grad_averager.next_chunk_timeout, 8.0),
    "load_state_timeout": (9.0, lambda o: o.load_state_timeout, 9.0),
    "shutdown_timeout": (4.0, lambda o: [o.state_averager.shutdown_timeout, o.shutdown_timeout], [4.0, 4.0]),
    "averager_opts": (
        {"part_size_bytes": 2**16},
        lambda o: [a.allreduce_kwargs["part_size_bytes"] for a in (o.state_averager, o.grad_averager)],
        [2**16, 2**16],
    ),
    "tracker_opts": ({"min_refresh_period": 0.25}, lambda o: o.tracker.min_refresh_period, 0.25),
    "performance_ema_alpha": (0.25, lambda o: o.tracker.performance_ema.alpha, 0.25),
}


class Look(Callback):
    def __init__(self, look: Callable[[Any], Any]):
        self._look = look

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = self._look(trainer.strategy.optimizer)


@pytest.mark.parametrize("name", PASSED_ON)
def test_it_reaches_hivemind(swarm: hivenb.Swarm, name: str) -> None:
    value, find, expected = PASSED_ON[name]
    look = Look(find)
    settings = {"matchmaking_time": 0.5, "averaging_timeout": 20.0, **own_run(), name: value}
    strategy = HivemindStrategy(16, dht=swarm.dht, **settings)
    model = TinyModel(optimizer=torch.optim.Adam)
    trainer(strategy, max_epochs=1, callbacks=[look]).fit(model, loader(16, 8))
    assert look.seen == expected
    assert strategy.hivemind_epoch == (0 if name == "auxiliary" else 1)


class TestTheStrategysOwnDht:
    @pytest.mark.process
    def test_takes_what_a_dht_takes(self, tmp_path: Path) -> None:
        """Read off the command line of its daemon, and off what it tells others."""
        identity = tmp_path / "identity"
        announced = "/ip4/198.51.100.7/tcp/4001"
        keywords = {
            "identity_path": str(identity),
            "use_relay": True,
            "use_auto_relay": True,
            "announce_maddrs": [announced],
            "startup_timeout": 77.0,
        }
        ids = []
        for _ in range(2):
            strategy = HivemindStrategy(16, **LOOPBACK, **keywords)
            try:
                ids.append(strategy.dht.peer_id)
                assert strategy.dht.kwargs["startup_timeout"] == 77.0
                assert any(str(address).startswith(announced) for address in strategy.dht.get_visible_maddrs())
                (daemon,) = (
                    child for child in psutil.Process(strategy.dht.pid).children(True) if "p2pd" in child.name()
                )
                assert {"-relay=1", "-autoRelay=1", f"-id={identity}"} <= set(daemon.cmdline())
            finally:
                strategy.dht.shutdown()
        assert ids[0] == ids[1], "the identity is kept"

    @pytest.mark.process
    def test_in_client_mode_nobody_can_connect_to_it(self) -> None:
        strategy = HivemindStrategy(16, client_mode=True, **LOOPBACK)
        try:
            assert strategy.dht.client_mode
        finally:
            strategy.dht.shutdown()

    @pytest.mark.process
    def test_the_old_way_to_see_what_it_was_given(self) -> None:
        strategy = HivemindStrategy(16, **LOOPBACK)
        try:
            assert strategy.dht.kwargs["nat_port_map"] is False
            assert strategy.num_peers == 1
        finally:
            strategy.dht.shutdown()
