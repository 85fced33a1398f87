"""Scripts that start local peers: real ones, run as people run them, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hivenb.peers.fork_server import VARIABLE

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

#: Seconds that a script may take on a busy machine.
PATIENCE = 170

MODEL = """
import dataclasses, os, sys, time
import torch
from lightning import LightningModule
from torch.utils.data import DataLoader, Dataset
import hivenb

with open("runs.txt", "a") as file:
    file.write(f"{__name__} {os.getpid()}\\n")

@dataclasses.dataclass
class Config:
    width: int = 4

class Points(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.full((WIDTH,), index / 64)
        return x, x[:2]

WIDTH = 4

def stack(items):
    xs, ys = zip(*items)
    return torch.stack(xs), torch.stack(ys)

class Model(LightningModule):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(config.width, 2)
    def training_step(self, batch, batch_idx):
        assert isinstance(self.hparams.config, Config)
        time.sleep(0.05)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

BY_NAME = """
class One:
    def __reduce__(self):
        return "ONE"
ONE = One()
"""

TRAIN = """
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(Model(Config()), DataLoader(Points(), batch_size=8, collate_fn=stack), swarm=swarm,
                         accelerator="cpu", options=hivenb.Options(target_batch_size=64, matchmaking_time=2.0))
try:
    (peer,) = swarm.add_local_peers(1, run)
except hivenb.LocalPeerError as error:
    print(f"LocalPeerError: {error}")
    sys.exit(1)
run.start()
end = time.monotonic() + 60
while time.monotonic() < end:
    run.wait(epochs=1, timeout=60)
    if run.history.snapshot().last("group_size") == 2:
        print("trained together")
        break
swarm.remove_local_peers()
print(peer.state, *peer.log[-1:] if peer.state == "failed" else "")
swarm.close()
"""


def indented(code: str) -> str:
    return code.replace("\n", "\n    ")


INTERPRETERS = [
    pytest.param((), id="by path"),
    pytest.param(("-m", "script"), id="by name", marks=pytest.mark.long),
]


def run_script(folder: Path, code: str, *interpreter: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and in which processes the script ran under which name."""
    script = folder / "script.py"
    script.write_text(code)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])
    done = subprocess.run(
        [sys.executable, *(interpreter or [str(script)])],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=PATIENCE,
        check=False,
    )
    runs = [line.split()[0] for line in (folder / "runs.txt").read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, runs


@pytest.mark.parametrize("interpreter", INTERPRETERS)
# Peers that train from a copied server, tests/kernel/test_end.py has as well.
@pytest.mark.parametrize(
    "is_copied", [pytest.param(False, id="on its own"), pytest.param(True, id="from a copy", marks=pytest.mark.long)]
)
def test_a_script_without_a_guard_has_local_peers_and_runs_once(
    tmp_path: Path, interpreter: tuple[str, ...], is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(int(is_copied)))
    code, output, runs = run_script(tmp_path, MODEL + TRAIN, *interpreter)
    assert code == 0, output
    assert "trained together" in output
    assert "left" in output
    assert runs == ["__main__"]


@pytest.mark.long
def test_what_is_pickled_by_name_is_there_where_the_script_has_a_guard(tmp_path: Path) -> None:
    guarded = 'if __name__ == "__main__":' + indented(TRAIN.replace("Model(Config())", "make()"))
    made = "\ndef make():\n    model = Model(Config())\n    model.one = ONE\n    return model\n"
    code, output, runs = run_script(tmp_path, MODEL + BY_NAME + made + guarded)
    assert code == 0, output
    assert "trained together" in output
    assert runs == ["__main__", "__mp_main__"]


def test_what_is_pickled_by_name_without_a_guard_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    unguarded = TRAIN.replace("run.start()", "").replace("Model(Config())", "model")
    code, output, runs = run_script(
        tmp_path, MODEL + BY_NAME + "\nmodel = Model(Config())\nmodel.one = ONE\n" + unguarded
    )
    assert code == 1, output
    assert "LocalPeerError" in output
    assert "refer by name to something in" in output
    assert 'if __name__ == "__main__":' in output
    assert runs == ["__main__", "__mp_main__"]
