"""What the documentation of Collaborative Training shows runs as it stands, but for where things are imported from.

Nothing is set that a snippet does not set: the DHT listens where the documentation says that it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning import Callback
from tiny import TinyModel, loader, parameters

#: What has to be written instead, and nothing else. What hivemind 1.1.12 no longer exports, hivenb does.
IMPORTS = {
    "from lightning_hivemind.strategy import": "from hivenb.strategy import",
    "from pytorch_lightning.strategies import": "from hivenb.strategy import",
    "from hivemind import": "from hivenb.compression import",
}

START = """
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(strategy=HivemindStrategy(target_batch_size=8192), accelerator="gpu", devices=1)
"""

OVERLAP = """
import torch
from functools import partial
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=8192,
        delay_state_averaging=True,
        delay_grad_averaging=True,
        delay_optimizer_step=True,
        offload_optimizer=True,
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=...),
    ),
    accelerator="gpu",
    devices=1,
)
"""

OFFLOAD = """
import torch
from functools import partial
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=8192,
        offload_optimizer=True,
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=...),
    ),
    accelerator="gpu",
    devices=1,
)
"""

REUSE = """
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(target_batch_size=8192, reuse_grad_buffers=True), accelerator="gpu", devices=1
)
"""

FLOAT16 = """
from hivemind import Float16Compression
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=target_batch_size,
        grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(),
    ),
    accelerator="gpu",
    devices=1,
)
"""

SIZE_ADAPTIVE = """
from hivemind import Float16Compression, SizeAdaptiveCompression, Uniform8BitQuantization
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

compression = SizeAdaptiveCompression(
    threshold=2 ** 16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
)
trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=target_batch_size,
        grad_compression=compression,
        state_averaging_compression=compression,
    ),
    accelerator="gpu",
    devices=1,
)
"""

POWER_SGD = """
from functools import partial
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from lightning import Trainer
from lightning_hivemind.strategy import HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=8192,
        grad_averager_factory=partial(PowerSGDGradientAverager, averager_rank=32, min_compression_ratio=0.5),
    ),
    accelerator="gpu",
    devices=1,
)
"""

SNIPPETS = {
    "start": START,
    "overlap": OVERLAP,
    "offload": OFFLOAD,
    "reuse buffers": REUSE,
    "float16": FLOAT16,
    "size adaptive": SIZE_ADAPTIVE,
    "PowerSGD": POWER_SGD,
}

#: Those that train here; what the others choose beside that, test_training.py and test_passed_on.py train with.
TRAINED = ("start", "overlap", "PowerSGD")


#: How documentation before lightning-hivemind spells the same.
OLDER = {
    "from lightning import Trainer": "import pytorch_lightning as pl",
    "from lightning_hivemind.strategy import": "from pytorch_lightning.strategies import",
    "= Trainer(": "= pl.Trainer(",
}


class Look(Callback):
    """What is there while it trains, up to the second swarm epoch."""

    addresses: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ()
    num_peers = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        strategy = trainer.strategy
        if not self.addresses:
            self.addresses = tuple(map(str, strategy.dht.get_visible_maddrs()))
            self.host_maddrs = tuple(strategy.dht.kwargs["host_maddrs"])
            self.num_peers = strategy.num_peers
        trainer.should_stop = strategy.hivemind_epoch >= 2


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a Trainer with nothing said logs and saves in the current folder
    monkeypatch.chdir(tmp_path)
    for name in ("INITIAL_PEERS", "PL_INITIAL_PEERS"):
        monkeypatch.delenv(name, raising=False)


def run(source: str) -> Any:
    """The trainer that a snippet makes."""
    changes = {**IMPORTS, "gamma=...": "gamma=0.5"}
    if not torch.cuda.is_available():
        changes['accelerator="gpu"'] = 'accelerator="cpu"'
    for old, new in changes.items():
        source = source.replace(old, new)
    names: dict[str, Any] = {"target_batch_size": 8192}
    exec(compile(source, "<documentation>", "exec"), names)
    return names["trainer"]


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_makes_a_trainer(name: str) -> None:
    assert run(SNIPPETS[name]).strategy.options.target_batch_size == 8192
    older = run(older_documentation(SNIPPETS[name]))
    assert isinstance(older, pytorch_lightning.Trainer)
    assert older.strategy.options.target_batch_size == 8192


@pytest.mark.process
@pytest.mark.parametrize("name", TRAINED)
def test_a_snippet_runs_and_trains(name: str) -> None:
    model, look = TinyModel(optimizer=torch.optim.Adam), Look()
    model.configure_callbacks = lambda: [look]
    before = parameters(model)
    trainer = run(SNIPPETS[name])
    trainer.fit(model, loader(4 * 4096, 4096))
    assert trainer.strategy.hivemind_epoch == 2
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)
    assert all(not torch.equal(old, new) for old, new in zip(before, parameters(model), strict=True))
    rate = trainer.strategy.optimizer.opt.param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * 0.5**2 if "gamma" in SNIPPETS[name] else 0.05)
    assert look.num_peers == 1
    assert look.host_maddrs[:2] == ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
    assert all(one.startswith("/ip6/::/") for one in look.host_maddrs[2:]), "where this machine has it"
    assert any("/tcp/" in address for address in look.addresses)
    assert any("/quic" in address for address in look.addresses)
    assert list(Path().glob("lightning_logs/version_0/checkpoints/*.ckpt")), "as without a strategy"
    assert trainer.strategy._dht is None, "the DHT ends with the training"


class OlderModel(pytorch_lightning.LightningModule):
    """A model of the other one of Lightning's packages, that stops by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.trainer.should_stop = strategy.hivemind_epoch >= 2

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def older_documentation(source: str) -> str:
    for new, old in OLDER.items():
        assert new in source
        source = source.replace(new, old)
    return source


@pytest.mark.process
def test_a_snippet_of_the_older_documentation_runs_and_trains() -> None:
    trainer, model = run(older_documentation(OVERLAP)), OlderModel()
    assert isinstance(trainer, pytorch_lightning.Trainer)
    before = parameters(model)
    trainer.fit(model, loader(4 * 4096, 4096))
    assert (trainer.strategy.hivemind_epoch, trainer.global_step) == (2, 4)
    assert all(not torch.equal(old, new) for old, new in zip(before, parameters(model), strict=True))
    assert trainer.strategy.optimizer.opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**2)
    assert trainer.strategy._dht is None
