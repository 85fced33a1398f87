"""The script of a run does what the run does, with whatever data, and needs nothing put into it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hivenb.options.options import Options
from hivenb.run.script import name_of, script_of

#: What a person has in a notebook, or at the head of a script.
PRELUDE = """
from types import SimpleNamespace

import lightning
from lightning import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from tiny import TinyModel as Tiny, loader


class TinyModel(Tiny):
    def training_step(self, batch, batch_idx):
        while isinstance(batch, dict) or isinstance(batch[0], list):  # of the first of several loaders
            batch = batch["a"] if isinstance(batch, dict) else batch[0]
        return super().training_step(batch, batch_idx)


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader(64, 16)


model = TinyModel()
train_loader, val_loader = loader(64, 16), loader(16, 16)
pair = (loader(64, 16), loader(16, 16))
datamodule = Data()
combined = CombinedLoader({"a": loader(64, 16)}, "min_size")
task = SimpleNamespace(train=loader(64, 16), validation=None)
"""

#: What a run was given as its data, and what follows the model in ``fit``, alone and beside the run.
FORMS = {
    "train_loader": ("train_loader", "train_loader"),
    "(train_loader, val_loader)": ("train_loader, val_loader",) * 2,
    "[train_loader, val_loader]": ("[train_loader, val_loader]",) * 2,
    "({'a': train_loader}, [val_loader])": ("{'a': train_loader}, [val_loader]",) * 2,
    "combined": ("combined",) * 2,
    "(train_loader, None)": ("train_loader",) * 2,
    "pair": ("*pair",) * 2,
    "datamodule": ("datamodule=datamodule", "datamodule=copy.deepcopy(datamodule)"),
    "(task.train, task.validation)": ("task.train",) * 2,
    "(None, val_loader)": ("None, val_loader",) * 2,
    "(None, None)": ("",) * 2,
    "None": ("",) * 2,
}

#: Those that a Trainer takes in a way of their own, and that a fresh process trains with; each opens a swarm there.
TRAINED = ("({'a': train_loader}, [val_loader])", "combined", "pair", "datamodule")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(PRELUDE, found)
    return found


def run_of(names: dict[str, Any], data: str, **trainer_kwargs: Any) -> Any:
    options = Options(target_batch_size=16, delay_state_averaging=True, run_id="as shown")
    return SimpleNamespace(model=names["model"], data=eval(data, names), options=options, trainer_kwargs=trainer_kwargs)


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


@pytest.mark.parametrize("data", FORMS)
def test_it_trains_with_the_data_of_the_run(names: dict[str, Any], data: str) -> None:
    alone, beside = FORMS[data]
    run = run_of(names, data)
    given = f", {alone}" if alone else ""
    assert last_line(script_of(run, is_active=False, names=names)) == f"trainer.fit(model{given})"
    copied = script_of(run, is_active=True, names=names)
    assert last_line(copied) == f"trainer.fit(copy.deepcopy(model){f', {beside}' if beside else ''})"
    assert copied.startswith("import copy\n")


def test_it_says_what_the_trainer_of_the_run_was_given(names: dict[str, Any]) -> None:
    text = script_of(
        run_of(names, "pair", precision="bf16-mixed", callbacks=[SimpleNamespace()]), is_active=False, names=names
    )
    assert '    max_epochs=-1,\n    precision="bf16-mixed",\n    # callbacks: an object of your own' in text
    short = script_of(run_of(names, "pair", max_epochs=3), is_active=False, names=names)
    assert 'lightning.Trainer(strategy=strategy, accelerator="auto", devices=1, max_epochs=3)\n' in short


def test_what_has_no_name_is_had_from_the_run_or_asked_for(names: dict[str, Any]) -> None:
    run = run_of(names, "(loader(64, 16), loader(16, 16))")
    run.model = names["TinyModel"]()
    named = script_of(run, is_active=False, names={"_": run.model, "run": run})
    assert last_line(named) == "trainer.fit(run.model, *run.data)"
    unnamed = script_of(run, is_active=False, names={})
    assert last_line(unnamed) == "trainer.fit(model, train_loader, val_loader)"
    assert "# `model` is your LightningModule, `train_loader, val_loader` your data." in unnamed
    run.data = names["Data"]()
    assert last_line(script_of(run, is_active=False, names={})) == "trainer.fit(model, datamodule=data)"


def test_a_variable_comes_before_an_attribute() -> None:
    wanted = object()
    owner = SimpleNamespace(part=wanted, _hidden=wanted)
    assert name_of(wanted, {"owner": owner, "own": wanted}) == "own"
    assert name_of(wanted, {"other": SimpleNamespace(), "owner": owner}) == "owner.part"
    assert name_of(wanted, {"_": wanted, "module": sys, "kind": Path}) is None
    assert name_of(None, {"nothing": None}) is None


@pytest.mark.process
@pytest.mark.slow
def test_it_runs_as_it_stands_in_a_script(names: dict[str, Any], tmp_path: Path) -> None:
    """One form after the other, in a fresh process."""
    parts = [PRELUDE]
    for data in TRAINED:
        text = script_of(run_of(names, data, max_epochs=1, logger=False), is_active=data == "pair", names=names)
        parts.append(text + "assert strategy.hivemind_epoch == 4\nprint('trained')\n")
    for data in ("train_loader", "datamodule"):  # the options alone do not know it
        options = run_of(names, data).options
        parts.append(
            f"data = {data}\n" + options.to_code(trainer={"max_epochs": 1, "logger": False, "accelerator": "cpu"})
        )
        parts.append("print('trained')\n")
    file = tmp_path / "train.py"
    file.write_text("\n".join(parts))
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == len(TRAINED) + 2
