"""The plain Lightning script that does what a run does, in the names that things have where the run is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import lightning

from hivenb.peers.followed_run import FollowedRun
from hivenb.run.fit import TRAINER_DEFAULTS

#: Of what a run gives its Trainer by itself, what says how it trains, and not how quiet it is.
_TELLING = ("accelerator", "devices", "max_epochs")

#: What the model and the data are called where they have no name.
_MODEL, _DATA, _TRAINING, _VALIDATION = "model", "data", "train_loader", "val_loader"


def script_of(run: FollowedRun, *, is_active: bool, names: Mapping[str, Any] | None = None) -> str:
    """Python that runs as it stands in a cell of the run's notebook, and in a script that defines what it names.

    :param run: whose options, model, data and Trainer it takes
    :param is_active: whether the run trains: the script then trains a copy of the model, which two cannot share
    :param names: variables; by default those of the notebook
    """
    known = vars(sys.modules["__main__"]).copy() if names is None else names
    return run.options.to_code(
        name_of(run.model, known) or _MODEL,
        _data_expression(run.data, known),
        trainer={name: TRAINER_DEFAULTS[name] for name in _TELLING} | dict(run.trainer_kwargs),
        copies=is_active,
    )


def name_of(value: Any, names: Mapping[str, Any]) -> str | None:
    """The expression by which something can be had: the name of a variable, or an attribute of one.

    :param value: what is looked for
    :param names: variables
    """
    own = [(name, one) for name, one in names.items() if not name.startswith("_") and value is not None]
    for name, one in own:
        if one is value:
            return name
    for name, one in own:
        for attribute, part in _attributes(one):
            if part is value:
                return f"{name}.{attribute}"
    return None


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    held = None if isinstance(owner, (type, ModuleType)) else getattr(owner, "__dict__", None)
    if isinstance(held, dict):
        yield from ((name, part) for name, part in held.copy().items() if not name.startswith("_"))


def _data_expression(data: Any, names: Mapping[str, Any]) -> str:
    """What follows the model in ``trainer.fit``; empty if nothing does."""
    if data is None:
        return ""
    whole = name_of(data, names)
    if isinstance(data, lightning.LightningDataModule):
        return f"datamodule={whole or _DATA}"
    if not isinstance(data, tuple):
        return whole or _collected(data, names) or _DATA
    # a model may bring its training data itself
    parts = ["None" if one is None else name_of(one, names) or _collected(one, names) for one in data]
    while parts and parts[-1] == "None":
        parts.pop()
    if whole is not None and None in parts:
        return f"*{whole}"
    return ", ".join(part or other for part, other in zip(parts, (_TRAINING, _VALIDATION), strict=False))


def _collected(data: Any, names: Mapping[str, Any]) -> str | None:
    """The expression for loaders that are held by a list or a dict, if each of them has a name."""
    if type(data) not in (list, dict) or not data:
        return None
    parts = data.values() if isinstance(data, dict) else data
    found = [name_of(one, names) or _collected(one, names) for one in parts]
    if None in found:
        return None
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(data, found, strict=True)) + "}"
    return f"[{', '.join(map(str, found))}]"
