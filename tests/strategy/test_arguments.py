"""What the strategy takes, and what it says about what it cannot take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import LOOPBACK, TinyModel, loader, trainer

import hivenb
from hivenb.engine.network.addresses import has_ipv6
from hivenb.errors import SwarmError
from hivenb.strategy import DEFAULT_HOST_MADDRS, HivemindStrategy

PEER = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"
OTHER = "/ip4/10.0.0.7/tcp/31338/p2p/12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"

#: As documented for Lightning, in this order; `dht` is ours.
DOCUMENTED = {
    "target_batch_size": inspect.Parameter.empty,
    "run_id": "lightning_run",
    "batch_size": None,
    "delay_state_averaging": False,
    "delay_optimizer_step": None,
    "delay_grad_averaging": False,
    "offload_optimizer": None,
    "reuse_grad_buffers": False,
    "scheduler_fn": None,
    "matchmaking_time": 5.0,
    "averaging_timeout": 30.0,
    "verbose": False,
    "averager_opts": None,
    "host_maddrs": None,
    "initial_peers": None,
    "dht": None,
    "optimizer_kwargs": inspect.Parameter.empty,
}


@pytest.fixture(autouse=True)
def no_peers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INITIAL_PEERS", "PL_INITIAL_PEERS"):
        monkeypatch.delenv(name, raising=False)


def test_the_signature_is_the_documented_one() -> None:
    signature = inspect.signature(HivemindStrategy.__init__)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    assert {name: p.default for name, p in signature.parameters.items()} == DOCUMENTED
    assert list(signature.parameters) == list(DOCUMENTED)
    assert signature.parameters["optimizer_kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert hivenb.HivemindStrategy is HivemindStrategy
    assert issubclass(HivemindStrategy, Strategy)
    assert HivemindStrategy.strategy_name == "hivemind"


def test_before_it_trains() -> None:
    strategy = HivemindStrategy(target_batch_size=8)
    assert strategy.num_peers == 1
    assert strategy.hivemind_epoch == 0
    assert strategy.is_global_zero
    assert strategy.optimizer is None
    strategy.barrier("anywhere")


def test_where_its_own_dht_would_listen() -> None:
    assert DEFAULT_HOST_MADDRS == ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
    listens_at = HivemindStrategy(8)._dht_kwargs["host_maddrs"]
    assert listens_at[:2] == list(DEFAULT_HOST_MADDRS)
    assert listens_at[2:] == (["/ip6/::/tcp/0", "/ip6/::/udp/0/quic-v1"] if has_ipv6() else [])
    assert HivemindStrategy(8, host_maddrs=["/ip4/127.0.0.1/tcp/0"])._dht_kwargs["host_maddrs"] == [
        "/ip4/127.0.0.1/tcp/0"
    ]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"no_such_option": 1}, ["'no_such_option'", "grad_compression", "startup_timeout", "identity_path"]),
        ({"target_batch_size": 0}, ["target_batch_size=0", "at least 1"]),
        ({"delay_grad_averaging": True}, ["delay_optimizer_step=True", "delay_state_averaging=True"]),
        (
            {"delay_optimizer_step": True, "offload_optimizer": False},
            ["offload_optimizer=True", "delay_state_averaging=True"],
        ),
        ({"averaging_timeout": 1.0}, ["averaging_timeout", "matchmaking_time"]),
        ({"run_id": "a.b"}, ["run_id='a.b'"]),
        ({"scheduler_fn": "cosine"}, ["scheduler_fn"]),
        ({"averager_opts": {"no_such": 1}}, ["no_such"]),
        ({"initial_peers": ["not an address"]}, ["'not'", "one looks like /ip4/"]),
        ({"initial_peers": "/ip4/127.0.0.1/tcp/1"}, ["does not say whose it is"]),
        ({"initial_peers": "hivenb://xyz"}, ["damaged"]),
        ({"host_maddrs": "localhost"}, ["host_maddrs='localhost'", "Must begin with /", "one looks like /ip4/"]),
        ({"host_maddrs": ["/ip4/0.0.0.0/tcp/0", "/ip4/999.0.0.1/tcp/0"]}, ["host_maddrs='/ip4/999.0.0.1/tcp/0'"]),
        ({"announce_maddrs": [":80"]}, ["announce_maddrs=':80'"]),
        ({"auxiliary": True, "client_mode": True}, ["auxiliary=True", "client_mode=True"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_said_at_once(keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        HivemindStrategy(**{"target_batch_size": 8, **keywords})
    for word in words:
        assert word in str(caught.value)


def test_one_address_of_its_own_needs_no_list() -> None:
    chosen = HivemindStrategy(8, host_maddrs="/ip4/127.0.0.1/tcp/0", announce_maddrs=PEER)
    assert chosen._dht_kwargs["host_maddrs"] == ["/ip4/127.0.0.1/tcp/0"]
    assert chosen._dht_kwargs["announce_maddrs"] == [PEER]


@pytest.mark.parametrize("given", [PEER, [PEER], f" {PEER} ,{OTHER}", [PEER, OTHER], f"{PEER},{OTHER},{PEER}"])
def test_initial_peers_may_be_written_in_many_ways(given: Any) -> None:
    expected = [PEER, OTHER] if OTHER in str(given) else [PEER]
    assert HivemindStrategy(8, initial_peers=given)._dht_kwargs["initial_peers"] == expected


@pytest.mark.parametrize("variable", ["INITIAL_PEERS", "PL_INITIAL_PEERS"])
def test_initial_peers_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, f"{PEER},{OTHER}")
    assert HivemindStrategy(8)._dht_kwargs["initial_peers"] == [PEER, OTHER]
    assert HivemindStrategy(8, initial_peers=[OTHER])._dht_kwargs["initial_peers"] == [OTHER]
    monkeypatch.setenv(variable, "rubbish")
    with pytest.raises(MisconfigurationException, match=f"environment variable {variable}: 'rubbish'"):
        HivemindStrategy(8)


def test_the_documented_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITIAL_PEERS", PEER)
    monkeypatch.setenv("PL_INITIAL_PEERS", OTHER)
    assert HivemindStrategy(8)._dht_kwargs["initial_peers"] == [PEER]
    monkeypatch.setenv("INITIAL_PEERS", " ")
    assert HivemindStrategy(8)._dht_kwargs["initial_peers"] == [OTHER]


def test_keywords_go_where_they_belong() -> None:
    strategy = HivemindStrategy(
        8, grad_compression="float16", startup_timeout=99.0, client_mode=True, announce_maddrs=[PEER]
    )
    assert strategy.options.grad_compression == "float16"
    assert strategy._dht_kwargs["startup_timeout"] == 99.0
    assert strategy._dht_kwargs["announce_maddrs"] == [PEER]
    assert strategy._dht_kwargs["client_mode"] is True
    assert strategy.options.client_mode is True


class TestBorrowedDht:
    @pytest.mark.parametrize(
        ("keyword", "value"),
        [
            ("host_maddrs", ["/ip4/127.0.0.1/tcp/0"]),
            ("initial_peers", [PEER]),
            ("startup_timeout", 60.0),
            ("identity_path", "key"),
        ],
    )
    def test_takes_no_settings_of_another(self, swarm: hivenb.Swarm, keyword: str, value: Any) -> None:
        with pytest.raises(MisconfigurationException, match=keyword):
            HivemindStrategy(8, dht=swarm.dht, **{keyword: value})

    def test_needs_no_peers_from_the_environment(self, swarm: hivenb.Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INITIAL_PEERS", "rubbish")
        assert HivemindStrategy(8, dht=swarm.dht).dht is swarm.dht


@pytest.mark.process
def test_peers_that_are_gone_are_said_to_be_as_when_joining() -> None:
    strategy = HivemindStrategy(8, initial_peers=PEER, **LOOPBACK)
    with pytest.raises(SwarmError, match=r"none of the peers answers: .*31337.*Is the swarm still open there"):
        trainer(strategy, max_epochs=1).fit(TinyModel(), loader())
    assert strategy._dht is None


def test_two_devices_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"one device for each Trainer, and got 2.*devices=1"):
        trainer(HivemindStrategy(8), devices=2)


class TwoOptimizers(TinyModel):
    automatic_optimization = False  # else Lightning itself refuses them

    def configure_optimizers(self) -> Any:
        halves = ([self.layer.weight], [self.layer.bias])
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class PlateauModel(TinyModel):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class NoOptimizer(TinyModel):
    def configure_optimizers(self) -> None:
        return None


class Annealing:
    """A scheduler as of timm, which is none of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class AnnealedModel(TinyModel):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [Annealing(optimizer)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # else Lightning itself refuses it
        scheduler.step(1)


@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        (TwoOptimizers, {}, "gave 2 optimizers"),
        (NoOptimizer, {}, r"NoOptimizer\.configure_optimizers returned None.*return one"),
        (PlateauModel, {}, "ReduceLROnPlateau"),
        (AnnealedModel, {}, r"Annealing\.step needs epoch, and"),
    ],
    ids=["two optimizers", "no optimizer", "plateau", "step with arguments"],
)
def test_a_model_that_cannot_be_trained_with_is_refused(model: Any, keywords: dict[str, Any], message: str) -> None:
    strategy = HivemindStrategy(8, **LOOPBACK, **keywords)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(strategy, max_epochs=1).fit(model(), loader(8))
    assert strategy._dht is None, "nothing was started, or it is ended"


@pytest.mark.process
def test_a_batch_without_a_size_is_an_error_that_names_the_remedy() -> None:
    class Opaque(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return index

    class Model(TinyModel):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(torch.ones(1, 4)).mean()

    data = torch.utils.data.DataLoader(Opaque(), batch_size=2, collate_fn=lambda items: object())
    with pytest.raises(MisconfigurationException, match=r"HivemindStrategy\(batch_size=\.\.\.\)"):
        trainer(HivemindStrategy(4, **LOOPBACK), max_epochs=1).fit(Model(), data)
    strategy = HivemindStrategy(4, batch_size=2, **LOOPBACK)
    trainer(strategy, max_epochs=1).fit(Model(), data)
    assert strategy.hivemind_epoch == 1


def test_a_module_that_knows_no_trainer_yet_can_be_connected() -> None:
    strategy, model = HivemindStrategy(1, **LOOPBACK), TinyModel()
    strategy.connect(model)
    assert strategy.lightning_module is model
