"""Learning rates move with the swarm epochs, whoever steps what in Lightning."""

from __future__ import annotations

import copy
import csv
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import QUIET, TinyModel, loader, own_run, parameters, trainer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, ReduceLROnPlateau

import hivenb
from hivenb.engine.averaging.torch_optimizer_state import group_settings
from hivenb.engine.optimizer.checkpoint import EpochSchedulers
from hivenb.strategy import HivemindStrategy
from strategy.against_torch import CASES, TwoGroups, by_torch

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "averaging in background": {"delay_state_averaging": True},
    "offloaded": {"offload_optimizer": True},
    "all delays": {
        "offload_optimizer": True,
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
    },
}

halving = partial(ExponentialLR, gamma=0.5)


def strategy(swarm: hivenb.Swarm, **kwargs: Any) -> HivemindStrategy:
    return HivemindStrategy(16, dht=swarm.dht, matchmaking_time=0.5, averaging_timeout=20.0, **own_run(), **kwargs)


class Seen(Callback):
    """The learning rate, and the swarm epoch, before each batch."""

    def __init__(self) -> None:
        self.rates: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        optimizer = trainer.strategy.optimizer
        self.rates.append((optimizer.local_epoch, optimizer.opt.param_groups[0]["lr"]))


def seen_rates(swarm: hivenb.Swarm, model: TinyModel, **kwargs: Any) -> list[float]:
    """The rate after each of eight batches, of which two make a swarm epoch."""
    seen = Seen()
    trainer(strategy(swarm, **kwargs), max_epochs=1, callbacks=[seen]).fit(model, loader(64, 8))
    assert [epoch for epoch, _ in seen.rates] == [0, 1, 1, 2, 2, 3, 3, 4]
    return [rate for _, rate in seen.rates]


class Configured(TinyModel):
    """With what ``configure_optimizers`` is to return for its schedulers."""

    def __init__(self, schedulers: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self._schedulers = schedulers

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], self._schedulers(optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_scheduler_fn_moves_with_the_epochs_of_the_swarm(swarm: hivenb.Swarm, mode: str) -> None:
    seen = Seen()
    chosen = strategy(swarm, scheduler_fn=halving, **MODES[mode])
    trainer(chosen, max_epochs=1, callbacks=[seen]).fit(TinyModel(lr=1.0), loader(64, 8))
    assert [epoch for epoch, _ in seen.rates] == [0, 1, 1, 2, 2, 3, 3, 4]
    if mode != "all delays":  # there the rate changes when the step in the background does
        assert [rate for _, rate in seen.rates] == [0.5**epoch for epoch, _ in seen.rates]
    assert chosen.optimizer is not None
    assert chosen.optimizer.opt.param_groups[0]["lr"] == 0.5**4


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    ("frequency", "rates"),
    [(1, [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]), (2, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25])],
)
def test_one_from_the_model_moves_with_the_epochs_of_the_swarm(
    swarm: hivenb.Swarm, interval: str, frequency: int, rates: list[float]
) -> None:
    """Whatever the epochs of its own data are: a peer that joins later has the same rate."""

    def schedulers(optimizer: torch.optim.Optimizer) -> Any:
        return [{"scheduler": halving(optimizer), "interval": interval, "frequency": frequency}]

    assert seen_rates(swarm, Configured(schedulers)) == rates


@pytest.mark.parametrize(
    ("schedulers", "options", "is_said"),
    [
        (lambda optimizer: [halving(optimizer)], {}, True),
        (lambda optimizer: [{"scheduler": halving(optimizer), "interval": "step"}], {}, False),
        (lambda optimizer: [halving(optimizer)], {"scheduler_fn": halving}, False),
        (lambda optimizer: [], {"scheduler_fn": halving}, False),
    ],
    ids=["by default", "on purpose", "replaced", "scheduler_fn"],
)
def test_who_counts_in_passes_is_told_what_moves_it(
    swarm: hivenb.Swarm, schedulers: Any, options: dict[str, Any], is_said: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy(swarm, **options), max_epochs=1).fit(Configured(schedulers), loader(64, 8))
    said = [one for one in caught if 'interval="epoch", Lightning\'s default, move once in' in str(one.message)]
    assert len(said) == is_said


def test_several_move_together(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    """Each with its own frequency; a checkpoint has the state of each, and plain Lightning can go on with it."""

    def schedulers(optimizer: torch.optim.Optimizer) -> Any:
        return [
            {"scheduler": halving(optimizer), "interval": "step"},
            {"scheduler": ExponentialLR(optimizer, gamma=0.1), "interval": "step", "frequency": 2},
        ]

    seen = Seen()
    fitter = trainer(strategy(swarm), max_epochs=1, callbacks=[seen])
    fitter.fit(Configured(schedulers), loader(64, 8))
    assert [rate for _, rate in seen.rates][1::2] == pytest.approx([0.5, 0.025, 0.0125, 0.000625])
    fitter.save_checkpoint(tmp_path / "two.ckpt")
    plain = Trainer(**QUIET, max_steps=9)
    plain.fit(Configured(schedulers), loader(64, 8), ckpt_path=tmp_path / "two.ckpt")
    assert plain.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.000625 * 0.5)


def test_a_checkpoint_of_plain_lightning_goes_on_at_its_rate(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    """It knows of no swarm epochs: its schedule goes on from where it was, at once."""
    model = partial(TinyModel, lr=1.0, scheduler=partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)))
    plain = Trainer(**QUIET, max_epochs=3)
    plain.fit(model(), loader(64, 16))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    seen = Seen()
    trainer(strategy(swarm), max_epochs=4, callbacks=[seen]).fit(
        model(), loader(64, 16), ckpt_path=tmp_path / "plain.ckpt"
    )
    assert [rate for _, rate in seen.rates] == pytest.approx([1 / 5, 1 / 6, 1 / 7, 1 / 8])


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
def test_one_that_is_made_already_may_be_given(swarm: hivenb.Swarm, mode: str) -> None:
    model = TinyModel(lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.configure_optimizers = lambda: optimizer
    rates = seen_rates(swarm, model, scheduler_fn=halving(optimizer), **MODES[mode])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}]


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (lambda: Configured(plateau), {}, "ReduceLROnPlateau follows a metric that each peer measures"),
        (TinyModel, {"scheduler_fn": ReduceLROnPlateau}, "ReduceLROnPlateau follows a metric"),
        (TinyModel, {"scheduler_fn": halving(torch.optim.SGD([torch.zeros(1)]))}, "belongs to another optimizer"),
    ],
    ids=["plateau", "plateau by scheduler_fn", "of another optimizer"],
)
def test_what_cannot_follow_the_swarm_is_refused(
    swarm: hivenb.Swarm, model: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        trainer(strategy(swarm, **kwargs), max_epochs=1).fit(model(), loader())


def configured(swarm: hivenb.Swarm, schedulers: Any, **kwargs: Any) -> HivemindStrategy:
    """Trained for eight swarm epochs."""
    chosen = strategy(swarm, **kwargs)
    trainer(chosen, max_epochs=2).fit(Configured(schedulers), loader(64, 16))
    assert chosen.hivemind_epoch == 8
    assert chosen.optimizer is not None
    return chosen


@pytest.mark.parametrize("mode", MODES)
class TestFromTheModel:
    """Whoever steps: a scheduler keeps its own optimizer, and what it sets there is carried over."""

    def test_moves_with_the_epochs_of_the_swarm(self, swarm: hivenb.Swarm, mode: str) -> None:
        made: list[Any] = []

        def schedulers(optimizer: torch.optim.Optimizer) -> Any:
            made.append(halving(optimizer))
            return made

        chosen = configured(swarm, schedulers, **MODES[mode])
        assert chosen.optimizer.opt.param_groups[0]["lr"] == 0.5**8
        assert made[0].get_last_lr() == [0.5**8]
        stepping, own = chosen.optimizer.opt, made[0].optimizer
        assert (stepping is own) == (mode in ("synchronous", "averaging in background"))

    def test_may_set_whatever_a_group_has(self, swarm: hivenb.Swarm, mode: str) -> None:
        class Decaying(LRScheduler):
            def step(self, epoch: Any = None) -> None:
                self.optimizer.param_groups[0]["weight_decay"] += 0.25

        chosen = configured(swarm, lambda optimizer: [Decaying(optimizer)], **MODES[mode])
        # its own first step, as each scheduler makes one when it is made, and one for each epoch
        assert chosen.optimizer.opt.param_groups[0]["weight_decay"] == 9 * 0.25

    def test_may_look_at_the_state(self, swarm: hivenb.Swarm, mode: str) -> None:
        seen: list[float] = []

        def rate(epoch: int) -> float:
            state = optimizer.state[optimizer.param_groups[0]["params"][0]]
            seen.append(float(state["step"]) if state else -1.0)
            return 1.0

        model = TinyModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.configure_optimizers = lambda: ([optimizer], [LambdaLR(optimizer, rate)])
        trainer(strategy(swarm, **MODES[mode]), max_epochs=2).fit(model, loader(64, 16))
        assert seen == [-1.0, *range(1, 9)]

    def test_sees_a_rate_that_somebody_else_sets(self, swarm: hivenb.Swarm, mode: str) -> None:
        class Raise(Callback):
            def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
                trainer.strategy.optimizer.finish_delayed_updates()
                if trainer.current_epoch == 1:
                    trainer.strategy.optimizer.opt.param_groups[0]["lr"] *= 8

        chosen = strategy(swarm, **MODES[mode])
        schedulers = lambda optimizer: [halving(optimizer)]  # noqa: E731
        trainer(chosen, max_epochs=2, callbacks=[Raise()]).fit(Configured(schedulers), loader(64, 16))
        assert chosen.optimizer is not None
        assert chosen.optimizer.opt.param_groups[0]["lr"] == 8 * 0.5**8

    def test_goes_on_from_a_checkpoint(self, swarm: hivenb.Swarm, tmp_path: Path, mode: str) -> None:
        """In the swarm at the rate that it had there, and in plain Lightning."""
        schedulers = lambda optimizer: [{"scheduler": halving(optimizer), "interval": "step"}]  # noqa: E731
        fitter = trainer(strategy(swarm, **MODES[mode]), max_epochs=1)
        fitter.fit(Configured(schedulers), loader(64, 16))
        fitter.save_checkpoint(tmp_path / "four.ckpt")
        again = strategy(swarm, **MODES[mode])
        trainer(again, max_epochs=2).fit(Configured(schedulers), loader(64, 16), ckpt_path=tmp_path / "four.ckpt")
        assert again.optimizer is not None
        assert again.hivemind_epoch == 8
        assert again.optimizer.opt.param_groups[0]["lr"] == 0.5**8
        plain = Trainer(**QUIET, max_epochs=2)
        plain.fit(Configured(schedulers), loader(64, 16), ckpt_path=tmp_path / "four.ckpt")
        assert plain.optimizers[0].param_groups[0]["lr"] == 0.5**8


class WarmUp(TinyModel):
    """As Lightning's documentation does it: without a scheduler."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
            group.update(momentum=0.5)


@pytest.mark.parametrize("mode", MODES)
def test_a_rate_that_a_hook_sets_counts(swarm: hivenb.Swarm, mode: str) -> None:
    model, plain = WarmUp(momentum=0.9), WarmUp(momentum=0.9)
    chosen = strategy(swarm, **MODES[mode])
    trainer(chosen, max_epochs=2).fit(model, loader(64, 16))
    Trainer(**QUIET, max_epochs=2).fit(plain, loader(64, 16))
    assert chosen.optimizer is not None
    (group,) = chosen.optimizer.opt.param_groups
    assert (group["lr"], group["momentum"]) == (0.1 / 8, 0.5)
    (shown,) = chosen.optimizer.param_groups
    assert [id(one) for one in shown["params"]] == [id(one) for one in model.parameters()]
    if mode != "all delays":
        for one, other in zip(parameters(model), parameters(plain), strict=True):
            torch.testing.assert_close(one, other)


class Switch(Callback):
    """Moves the optimizer into host memory and back in the middle of a training."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (3, 7):
            chosen = trainer.strategy
            chosen.change_options(chosen.options.replace(offload_optimizer=not chosen.options.offload_optimizer))


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("name", ["OneCycleLR, with betas", "SequentialLR of LinearLR and CosineAnnealingLR"])
def test_a_change_in_the_middle_keeps_the_schedule(swarm: hivenb.Swarm, name: str, offloaded: bool) -> None:
    case = CASES[name]
    reference = by_torch(case, "synchronous")
    model, chosen = TwoGroups(case), strategy(swarm, offload_optimizer=offloaded)
    trainer(chosen, max_epochs=3, callbacks=[Switch()]).fit(model, loader(64, 16))
    assert chosen.optimizer is not None
    assert group_settings(chosen.optimizer.opt) == reference.settings
    for one, other in zip(parameters(model), reference.parameters, strict=True):
        torch.testing.assert_close(one, other)


def test_a_schedule_moves_through_epochs_that_others_have_made() -> None:
    """As that of a newcomer does, whose optimizer has made no step: torch is not to warn of it."""
    optimizer = torch.optim.SGD(TinyModel().parameters(), lr=0.08)
    schedule = EpochSchedulers([(ExponentialLR(optimizer, 0.5), 1, None)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Change(Callback):
    """Changes options after the second batch, and notes what Lightning had been shown and has been shown then.

    :param changes: of the options
    """

    def __init__(self, **changes: Any):
        self._changes = changes
        self.shown: list[tuple[Any, Any, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            chosen = trainer.strategy
            self._note(chosen)
            chosen.change_options(chosen.options.replace(**self._changes))
            self._note(chosen)

    def _note(self, chosen: HivemindStrategy) -> None:
        self.shown.append((chosen.optimizers, chosen.optimizers[0], chosen.lr_scheduler_configs))


@pytest.mark.parametrize(
    ("changes", "stay"),
    [
        ({"matchmaking_time": 1.0}, (True, True, True)),
        ({"scheduler_fn": halving}, (False, True, False)),
        ({"offload_optimizer": True}, (False, False, False)),
    ],
    ids=["nothing that Lightning knows", "another schedule", "another optimizer"],
)
def test_lightning_is_shown_again_what_has_changed_and_nothing_else(
    swarm: hivenb.Swarm, changes: dict[str, Any], stay: tuple[bool, ...]
) -> None:
    change = Change(**changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")  # torch's, of what it takes for a wrong order
        trainer(strategy(swarm), max_epochs=1, callbacks=[change]).fit(TinyModel(), loader(64, 16))
    before, after = change.shown
    assert tuple(one is other for one, other in zip(before, after, strict=True)) == stay


def test_an_optimizer_that_was_in_host_memory_has_the_models_parameters_again(swarm: hivenb.Swarm) -> None:
    """A model that gives the same one each time would train copies of its parameters, and not itself."""

    class Offload(Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            trainer.strategy.change_options(trainer.strategy.options.replace(offload_optimizer=True))

    model, plain = TinyModel(), TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.configure_optimizers = lambda: optimizer
    own = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    plain.configure_optimizers = lambda: own
    for callbacks in ([Offload()], []):
        trainer(strategy(swarm), max_epochs=1, callbacks=callbacks).fit(model, loader(64, 16))
        Trainer(**QUIET, max_epochs=1).fit(plain, loader(64, 16))
    for one, other in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert one is other
    for one, other in zip(parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(one, other)


class TestWarnings:
    def test_scheduler_fn_replaces_one_from_the_model(self, swarm: hivenb.Swarm) -> None:
        with pytest.warns(UserWarning, match="scheduler_fn replaces the scheduler"):
            configured(swarm, lambda optimizer: [halving(optimizer)], scheduler_fn=halving)

    def test_a_hook_that_would_move_schedulers_does_not(self, swarm: hivenb.Swarm) -> None:
        class Own(Configured):
            def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
                scheduler.step(epoch=self.current_epoch)

        with pytest.warns(UserWarning, match=r"Own\.lr_scheduler_step does not move the scheduler"):
            trainer(strategy(swarm), max_epochs=1).fit(Own(lambda one: [halving(one)]), loader(64, 16))


MADE: dict[str, Any] = {
    "scheduler_fn": lambda: (TinyModel(lr=1.0), {"scheduler_fn": halving}),
    "from the model": lambda: (TinyModel(lr=1.0, scheduler=halving), {}),
    "none": lambda: (TinyModel(lr=1.0), {}),
}


@pytest.mark.parametrize("mode", ["synchronous", "offloaded"])
@pytest.mark.parametrize("made", MADE)
def test_lightnings_monitor_sees_the_rate_once(swarm: hivenb.Swarm, tmp_path: Path, made: str, mode: str) -> None:
    model, kwargs = MADE[made]()
    columns = monitored(strategy(swarm, **kwargs, **MODES[mode]), model, tmp_path)
    assert columns == {"lr-SGD": [1.0] * 8 if made == "none" else [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]}


def test_lightnings_monitor_knows_the_name_that_it_was_given(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    model = Configured(lambda optimizer: [{"scheduler": halving(optimizer), "name": "rate"}])
    assert list(monitored(strategy(swarm, offload_optimizer=True), model, tmp_path)) == ["rate"]


def monitored(chosen: HivemindStrategy, model: TinyModel, folder: Path) -> dict[str, list[float]]:
    """What ``LearningRateMonitor`` logs in eight batches, of which two make a swarm epoch."""
    logger = CSVLogger(folder)
    trainer(chosen, max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]).fit(
        model, loader(64, 8)
    )
    with (Path(logger.log_dir) / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    found = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    return {name: values for name, values in found.items() if name not in ("epoch", "step")}


def test_a_module_sees_all_of_its_scheduler(swarm: hivenb.Swarm) -> None:
    seen = []

    class Looking(Configured):
        def on_train_batch_end(self, *args: Any) -> None:
            own: Any = self.lr_schedulers()
            seen.append((own.last_epoch, own.base_lrs, own.gamma))

    chosen = strategy(swarm)
    trainer(chosen, max_epochs=1).fit(Looking(lambda optimizer: [halving(optimizer)]), loader(64, 8))
    assert seen == [(epoch, [1.0], 0.5) for epoch in (0, 1, 1, 2, 2, 3, 3, 4)]
    shown: Any = chosen.lr_scheduler_configs[0].scheduler
    assert copy.copy(shown).last_epoch == copy.deepcopy(shown).last_epoch == 4
    with pytest.raises(AttributeError, match="no_such"):
        shown.no_such  # noqa: B018


def test_other_callbacks_know_the_rate_from_the_first_pass_on(swarm: hivenb.Swarm, tmp_path: Path) -> None:
    class AtEnds(Callback):
        """What there is to stop by, or to save by, at the end of each pass."""

        def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
            at_ends.append(float(trainer.callback_metrics["lr-SGD"]))

    at_ends: list[float] = []
    monitor = LearningRateMonitor()
    model = Configured(lambda optimizer: [{"scheduler": halving(optimizer), "interval": "epoch"}])
    logger = CSVLogger(tmp_path)
    trainer(strategy(swarm), max_epochs=3, callbacks=[monitor, AtEnds()], logger=logger).fit(model, loader(32, 16))
    assert at_ends == monitor.lrs["lr-SGD"] == [1.0, 0.25, 0.0625]

    within = LearningRateMonitor()
    one = trainer(strategy(swarm), max_epochs=1, callbacks=[within], logger=logger, log_every_n_steps=1)
    one.fit(Configured(model._schedulers), loader(64, 16))
    assert within.lrs["lr-SGD"] == [1.0, 1.0, 0.5, 0.25, 0.125], "when the pass begins, and before each batch"
