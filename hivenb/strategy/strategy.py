"""HivemindStrategy: the seam between Lightning's Trainer and hivemind's optimizer."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hivemind
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim.lr_scheduler import LRScheduler

from hivenb._signatures import OwnSignature, keywords_of, with_keywords
from hivenb.engine.averaging.module_rest import ModuleRest
from hivenb.engine.optimizer.checkpoint import epoch_of, factory_like, go_on_from_plain
from hivenb.engine.optimizer.handover import give_back
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.optimizer.skipped_batches import scaler_for
from hivenb.engine.process.freed_memory import give_freed_memory_back, keep_for_what_follows
from hivenb.errors import HivenbError, SwarmError
from hivenb.options.options import Options
from hivenb.strategy.callbacks import FirstCallback
from hivenb.strategy.checks import (
    DEFAULT_HOST_MADDRS,
    check_still_frozen,
    check_trainer,
    dht_settings,
    hold,
    how_to_join,
    invited_run,
    let_go,
    make_known,
    require_room_for,
    sort_keywords,
)
from hivenb.strategy.counted_batches import CountedBatches
from hivenb.strategy.data_order import OrderOfData
from hivenb.strategy.estimated_steps import EstimatedSteps
from hivenb.strategy.fit_without_step import FirstEpoch
from hivenb.strategy.kept_state import trained_names
from hivenb.strategy.lightning_optimizer import SteeredOptimizer
from hivenb.strategy.live_changes import (
    Recovery,
    check_change,
    engine_settings,
    reconfigured,
    set_scheduler,
    with_buffers,
)
from hivenb.strategy.module_hooks import ModuleHooks
from hivenb.strategy.reused_model import LeftModel, fitted_state, in_words, set_up_as, with_description
from hivenb.strategy.rollback import Rollback
from hivenb.strategy.schedulers import HiveMindScheduler, scheduler_maker, schedulers_for_hivemind, shown_to_lightning
from hivenb.strategy.trials import Trials
from hivenb.swarm.agreement.frozen_parameters import RestDeclaration
from hivenb.swarm.agreement.model_record import ModelDeclaration, describe_parameters
from hivenb.swarm.start import start_dht
from hivenb.system.environment import require_linux

# -- one device ------------------------------------------------------------------------------------------------------
#
# What a strategy is that trains one module, which nobody else trains, on one device, without a process group.


class HeldModule:
    """As an attribute of a strategy: a module that it has for itself from the moment on in which it is set.

    What is read is what the strategy's ``__dict__`` holds, without a call: Lightning reads it dozens of times a batch.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, strategy: OneDeviceStrategy, module: Any) -> None:
        # the first that a Trainer does with a module: what is refused here has changed nothing yet
        if module is not None:
            hold(module, strategy)
        vars(strategy)[self._name] = module


class OneDeviceStrategy(SingleDeviceStrategy):
    """Base of :class:`hivenb.HivemindStrategy`: a device of its own, and a module of its own until its teardown."""

    options: Options
    _lightning_module: Any = HeldModule()

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Always empty when read, which makes Lightning hand over the devices that the Trainer was given."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"HivemindStrategy trains on one device for each Trainer, and got {len(devices)}: "
                f"{', '.join(map(str, devices))}. Use devices=1, or devices=[k] to choose one, and let the other "
                "devices join the run as peers of their own"
            )
        self._root_device = devices[0]


# -- hivemind strategy -----------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

__all__ = ["DEFAULT_HOST_MADDRS", "HiveMindScheduler", "HivemindStrategy"]


class HivemindStrategy(OneDeviceStrategy):
    """Train one model together with all peers of a run, over the internet, on machines that come and go.

    Peers accumulate gradients until they have seen ``target_batch_size`` samples between them; then they average
    gradients and parameters, make one step, and a new *swarm epoch* begins. See
    https://learning-at-home.readthedocs.io/en/latest/modules/optim.html for the engine underneath.

    One Trainer drives one device; further devices join as further peers.

    :param target_batch_size: samples that all peers accumulate together before each step; with several peers some more
      or fewer, as each ends with the batch whose end is nearest. The larger, the less often they communicate
    :param run_id: name of this run; peers with the same name and DHT train together
    :param batch_size: samples in each batch of this peer; by default read from each batch
    :param delay_state_averaging: average parameters in the background, while training goes on
    :param delay_optimizer_step: run the optimizer in the background and apply its result in a later step; needs
      ``offload_optimizer`` and ``delay_state_averaging``. By default as ``delay_grad_averaging``
    :param delay_grad_averaging: average gradients in the background; needs ``delay_optimizer_step``. They arrive up to
      one swarm epoch late. Meanwhile this peer computes at a step with its own gradients, unless
      ``delay_compensation=False`` is among the further keywords: at parameters that are older by as much, less is
      learned from as many samples. Digits, by three peers on two cores, then came to an accuracy of 0.9 instead of
      0.99, and with the two other delays to 0.986 instead of 0.989. A lower learning rate or a longer warm-up helps
    :param offload_optimizer: keep the optimizer and its state in host memory, to save memory of the device. By default
      only where ``delay_optimizer_step`` needs it
    :param reuse_grad_buffers: accumulate in the model's own ``.grad``, to save one buffer per parameter; needs
      automatic optimization. The module's ``optimizer_zero_grad`` has no effect meanwhile
    :param scheduler_fn: ``callable(optimizer) -> LRScheduler``, or a scheduler; in place of those that
      ``configure_optimizers`` returns, whose rates are carried over where the optimizer is offloaded
    :param matchmaking_time: seconds to wait for peers when a group forms. Raise it if in a quarter of the swarm epochs
      fewer than 0.9 of the peers average together; lower it for small batches in a fast network
    :param averaging_timeout: seconds after which a round of averaging is given up. Raise it if a quarter of the
      rounds end with local gradients
    :param verbose: log what hivemind does inside, such as rounds and background tasks
    :param averager_opts: further keyword arguments of both averagers
    :param host_maddrs: multiaddresses at which the strategy's own DHT listens, or one
    :param initial_peers: addresses of peers to join: a list, one string with commas, or an invite. By default the
      environment variable ``INITIAL_PEERS``
    :param dht: a running DHT to borrow; the strategy then neither starts nor ends one
    :param optimizer_kwargs: further keyword arguments of ``hivemind.Optimizer`` and, when the strategy starts its
      own DHT, of ``hivemind.DHT``, with ``secret`` beside them: at least 32 characters, which all peers have to know
      that have no invite, by default those of the environment variable ``HIVENB_SECRET``. Without either the run is
      open to all who can reach a peer
    :raises MisconfigurationException: if options are wrong or do not go together
    """

    strategy_name = "hivemind"
    __signature__ = OwnSignature(
        lambda: with_keywords(HivemindStrategy.__init__, keywords_of(Options), is_method=True, takes_more=True)
    )

    #: called with an EpochReport on the training thread after each swarm epoch
    on_epoch: Callable[[EpochReport], None] | None

    def __init__(
        self,
        target_batch_size: int,
        run_id: str = "lightning_run",
        batch_size: int | None = None,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        scheduler_fn: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        verbose: bool = False,
        averager_opts: dict[str, Any] | None = None,
        host_maddrs: list[str] | str | None = None,
        initial_peers: str | Iterable[str] | None = None,
        dht: hivemind.DHT | None = None,
        **optimizer_kwargs: Any,
    ):
        super().__init__()
        require_linux()
        make_known(HivemindStrategy)  # once more, for a package that was imported in the meantime
        try:
            further = sort_keywords(optimizer_kwargs)
            self.options = Options(
                target_batch_size=target_batch_size,
                run_id=invited_run(run_id, initial_peers, borrows=dht is not None),
                batch_size=batch_size,
                delay_state_averaging=delay_state_averaging,
                delay_optimizer_step=delay_optimizer_step,
                delay_grad_averaging=delay_grad_averaging,
                offload_optimizer=offload_optimizer,
                reuse_grad_buffers=reuse_grad_buffers,
                scheduler_fn=scheduler_fn,
                matchmaking_time=matchmaking_time,
                averaging_timeout=averaging_timeout,
                verbose=verbose,
                averager_opts=averager_opts,
                **further.options,
            )
        except HivenbError as e:
            raise MisconfigurationException(str(e)) from e
        #: what the last swarm epoch in the present or last ``fit`` came to; ``None`` before the first
        self.last_epoch_report: EpochReport | None = None
        self._dht, self._owns_dht = dht, dht is None
        self._dht_kwargs = dht_settings(
            initial_peers,
            host_maddrs,
            further.dht,
            borrows=dht is not None,
            client_mode=self.options.client_mode,
        )
        self._optimizer_only_kwargs = further.optimizer
        self._set_up: dict[str, Any] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Have what belongs to a training, or to who follows it, as before the first one."""
        self.on_epoch = None
        #: called on the training thread before the first batch, with the epoch of the state that was taken over from
        #: the others, if one was
        self.on_joined: Callable[[int], None] | None = None
        #: called on the training thread with a few words on what whoever trains should know
        self.on_notice: Callable[[str], None] | None = None
        #: called on the training thread before each batch that a tuner of Lightning's tries out
        self.on_trial: Callable[[], None] | None = None
        #: what was left in the module since it was trained last, for a run that goes on with that; ``None`` to load the
        #: weights of a checkpoint
        self.left: LeftModel | None = None
        #: what ``trainer.estimated_stepping_batches`` says in a ``fit``
        self.estimated_steps = EstimatedSteps(self)
        #: the last good state, and how training returns to it
        self.rollback = Rollback(self)
        self._recovery = Recovery(self, self._make_optimizer, self._go_on_with)
        self._batches = CountedBatches(self, self._recovery, self.rollback)
        self._first_epoch = FirstEpoch(self)
        self._trials = Trials(self)
        self._callback: FirstCallback | None = None
        self._lightning_module = None
        self.optimizers, self.lr_scheduler_configs = [], []
        self._optimizer: Optimizer | None = None
        self._given_optimizer: torch.optim.Optimizer | None = None
        self._configured_schedulers: list[Any] = []
        self._hooks: ModuleHooks | None = None
        self._order_of_data: OrderOfData | None = None
        self._is_set_up = False
        self._declaration: ModelDeclaration | None = None
        self._rest: ModuleRest | None = None
        self._declared_rest: RestDeclaration | None = None

    def _as_at_first(self) -> HivemindStrategy:
        """One that has begun nothing, and has no settings yet."""
        made = type(self).__new__(type(self))
        made._begin_anew()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> HivemindStrategy:
        """One with the same settings that does not train yet, and borrows the same DHT or will start its own."""
        copied = memo[id(self)] = self._as_at_first()
        copied._dht = None if self._owns_dht else self._dht
        for name, value in vars(self).items():
            if name not in vars(copied):
                setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds of it, such as that of a callback that knows its Trainer: enough to look at, validate and
        predict with. Not the DHT, which is a process, nor how to join or open one, in which there may be a secret.
        """
        begun = vars(self._as_at_first())
        state = {name: value for name, value in super().__getstate__().items() if name not in begun}
        own = {"_lightning_module": self._lightning_module, "_dht": None, "_owns_dht": False, "_dht_kwargs": {}}
        return {**state, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin_anew()
        super().__setstate__({**vars(self), **state})

    # -- the swarm ----------------------------------------------------------------------------------------------

    @property
    def dht(self) -> hivemind.DHT:
        """The DHT: the borrowed one, or the strategy's own, which is started when it is first needed.

        :raises SwarmError: if it cannot be started, none of the initial peers answers, or it was lost in a pickle
        """
        if self._dht is None and not self._owns_dht:
            raise SwarmError(
                "this HivemindStrategy comes out of a pickle, which holds no DHT and no way into one. To train, make a "
                "new one, and a Trainer with it"
            )
        if self._dht is None:
            self._dht = start_dht(self._dht_kwargs)
            rank_zero_info(how_to_join(self._dht, self._dht_kwargs["secret"]))
        return self._dht

    @property
    def optimizer(self) -> Optimizer | None:
        """Hivemind's optimizer of the present or last ``fit``; ``None`` before the first."""
        return self._optimizer

    @property
    def num_peers(self) -> int:
        """Peers that train together in this run, this one included; at least 1. Up to a few seconds old."""
        return 1 if self._optimizer is None else max(1, self._optimizer.tracker.global_progress.num_peers)

    @property
    def hivemind_epoch(self) -> int:
        """Global steps that the swarm has made. The Trainer's ``global_step`` counts this peer's batches instead."""
        return 0 if self._optimizer is None else self._optimizer.local_epoch

    @property
    def samples_in_batch(self) -> int:
        """Samples that the present or last batch counts for; 0 before the first, and for an auxiliary peer."""
        return self._batches.samples_in_batch

    @property
    def data_is_exhausted(self) -> bool:
        """Whether the present or last ``fit`` has ended since its data gave no batch any more."""
        return self._callback is not None and self._callback.data_is_exhausted

    def notify(self, mark: str, text: str) -> None:
        """Say something that whoever trains should know, on the training thread.

        :param mark: a few words
        :param text: all of it
        """
        rank_zero_warn(text)
        if self.on_notice is not None:
            self.on_notice(mark)

    # -- what Lightning calls -----------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Training data in the order of this peer; ``Trainer(use_distributed_sampler=False)`` leaves it as it is."""
        loader = super().process_dataloader(dataloader)
        module: Any = self.lightning_module
        if not module.trainer.training:
            return loader
        if self._order_of_data is None:
            joined = self._dht_kwargs.get("initial_peers") if self._dht is None else self._dht.initial_peers
            self._order_of_data = OrderOfData(str(self.dht.peer_id) if joined else None, self.root_device)
        return self._order_of_data.of(loader, module.trainer, is_early=not self._is_set_up)

    def connect(self, model: Any) -> None:
        super().connect(model)
        trainer = getattr(model, "_trainer", None)  # Lightning's property raises where there is none yet
        if trainer is not None and trainer.state.fn == "fit":  # from now on, hooks and callbacks may ask
            self.estimated_steps.stand_in(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module: Any = self.lightning_module
        check_trainer(trainer, module, self.optimizers, self.options)
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = scaler_for(plugin.scaler, self.options.reuse_grad_buffers)
        self._set_up = set_up_as(self.optimizers[0])
        if self.left is None:  # another training, or one that begins at a checkpoint: nothing to return to yet
            self.rollback.begin_anew()
        scheduler = schedulers_for_hivemind(
            self.lr_scheduler_configs,
            self.options.scheduler_fn,
            self.optimizers[0],
            offloaded=bool(self.options.offload_optimizer),
            estimated=self.estimated_steps.told,
        )
        self._given_optimizer, self._configured_schedulers = self.optimizers[0], self.lr_scheduler_configs
        self._optimizer = self._make_first_optimizer(self.optimizers[0], scheduler)
        self._begin_with_rest()
        self._hooks = ModuleHooks(module)
        self._hooks.skip_empty()
        if scheduler is not None:
            self._hooks.warn_of_own_scheduler_step()
        self._hooks.follow(self._optimizer)
        self._batches.begin_anew()
        self._show_to_lightning(self._optimizer, self._hooks)
        self._callback = FirstCallback.among(trainer.callbacks, self)
        self._is_set_up, self._trials = True, Trials(self, self._hooks, self._set_up)
        if self.root_device.type == "cpu":
            keep_for_what_follows()

    def _show_to_lightning(self, optimizer: Optimizer, hooks: ModuleHooks) -> None:
        """Let the Trainer and the module know the optimizer and its schedulers as they are now."""
        self.optimizers, optimizer.on_zero_grad = [optimizer], self._batches.begin_anew
        self.lr_scheduler_configs = shown_to_lightning(optimizer.state_averager.scheduler, self._configured_schedulers)
        if self.options.reuse_grad_buffers:
            hooks.disable_zero_grad()
        else:
            hooks.enable_zero_grad()

    def _go_on_with(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        if self._hooks is not None:
            self._show_to_lightning(optimizer, self._hooks)

    def change_options(self, options: Options) -> None:
        """Train on with other options; to be called on the training thread, between two batches.

        Parameters, optimizer state, schedules, the swarm epoch and the samples of the present one are kept, and so
        is the place in the swarm.

        :raises OptionsError: if an option cannot be changed while training
        :raises Exception: whatever goes wrong with the new options; the old ones stay in force
        """
        before = self.options
        self._recovery.recover()
        is_training = self._optimizer is not None and self._optimizer.is_alive()
        check_change(before, options, self if is_training else None)
        if self._optimizer is None or not is_training:
            self.options = options
            return
        put_scheduler_back, differing = None, before.difference(options)
        if "scheduler_fn" in differing:
            make = None if options.scheduler_fn is None else scheduler_maker(options.scheduler_fn)
            put_scheduler_back = set_scheduler(self._optimizer, make)
        optimizer, error = reconfigured(
            self._optimizer, before, options, differing, self._make_optimizer, self._recovery.rescue
        )
        if error is None:
            self.options = options
        elif put_scheduler_back is not None:
            put_scheduler_back(optimizer)
        if optimizer is not self._optimizer or "scheduler_fn" in differing:
            self._go_on_with(optimizer)
        if error is not None:
            raise error
        self._say_notes(besides=before.notes)

    def roll_back(self, epoch: int | None = None) -> int:
        """Return to the state that was kept last, between two batches.

        Peers that train with this one go on from there when they see it ahead of them: they download the state.

        :param epoch: of the swarm, to go on at; by default the present one, which is for a peer that is alone
        :returns: the epoch of that state
        :raises TrainingError: if there is none
        """
        return self.rollback.roll_back(epoch)

    def _make_first_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> Optimizer:
        require_room_for(optimizer, self.options)
        kwargs = {**engine_settings(self.options), "optimizer": optimizer, "scheduler": scheduler}
        if self.options.offload_optimizer:
            kwargs |= {"optimizer": factory_like(optimizer), "params": optimizer.param_groups}
        module: Any = self.lightning_module
        self._declaration = ModelDeclaration(self.dht, self.options.run_id, describe_parameters(module, optimizer))
        self._rest = self._declared_rest = None
        if self.options.frozen_parameters != "own" and not self.options.auxiliary:
            given = (parameter for group in optimizer.param_groups for parameter in group["params"])
            trained = [parameter for parameter in given if parameter.requires_grad]
            self._rest = ModuleRest(module, trained, buffers_are_averaged=self.options.average_buffers)
        if self._rest:
            downloads = self.options.frozen_parameters == "download"
            self._declared_rest = RestDeclaration(self.dht, self.options.run_id, self._rest, downloads)
        self.last_epoch_report = None
        return self._make_optimizer(**kwargs)

    def _make_optimizer(self, **kwargs: Any) -> Optimizer:
        settings = with_buffers({**kwargs, **self._optimizer_only_kwargs}, self.lightning_module, self._rest)
        return SteeredOptimizer(dht=self.dht, on_epoch=self._epoch_ended, **settings)

    def _begin_with_rest(self) -> None:
        if self._declared_rest is None:
            return
        if one_sided := self._declared_rest.one_sided:
            self.notify(
                "a module with other layers",
                f"only some of the peers have {one_sided[0]} in their module"
                f"{f', and {len(one_sided) - 1} more' if len(one_sided) > 1 else ''}. The optimizer was not given it, "
                "so peers train together all the same; is it the same model at all of them?",
            )
        if self._declared_rest.wanted:
            self._have_rest_in_common()
        else:
            self._declared_rest.declare()

    def _have_rest_in_common(self) -> None:
        """Take over what of the module is no round's, and differs from what the others have."""
        declared, optimizer = self._declared_rest, self._optimizer
        if declared is None or optimizer is None:
            return
        if wanted := declared.wanted:
            optimizer.state_averager.download_rest(wanted)
            frozen = [one for one in wanted.values() if not one.is_moving]
            if frozen:
                rank_zero_info(
                    f"What the optimizer was not given differed from the swarm's, and was taken over from it: "
                    f"{frozen[0].name}{f' and {len(frozen) - 1} more' if len(frozen) > 1 else ''}, "
                    f"{sum(one.nbytes for one in frozen) / 2**20:.1f} MB in all"
                )
            declared.wanted = {}
            declared.declare()

    def _epoch_ended(self, report: EpochReport) -> None:
        self.last_epoch_report = report
        self.rollback.note_epoch(report)
        if self._optimizer is not None:
            check_still_frozen(self.lightning_module, self._optimizer.frozen.unfrozen())
        if self._declaration is not None:
            self._declaration.keep()
        self._say_if_schedule_has_ended(report.epoch)
        if self._declared_rest is not None:
            self._declared_rest.on_epoch()
            self._have_rest_in_common()
        if self.on_epoch is not None:
            self.on_epoch(report)

    def _say_notes(self, besides: Sequence[str] = ()) -> None:
        """Say what whoever trains should know of the options in force.

        :param besides: what was said before
        """
        for text in self.options.notes:
            if text not in besides:
                rank_zero_warn(text)

    def _say_if_schedule_has_ended(self, epoch: int) -> None:
        moved = None if self._optimizer is None else self._optimizer.state_averager.scheduler
        if moved is None or moved.ended_at is None or epoch != moved.ended_at + 1:
            return
        rank_zero_info(
            f"The learning rate schedule was made for {moved.ended_at} swarm epochs, and training goes on with "
            f"its last rate, {moved.optimizer.param_groups[0]['lr']:g}: other peers take part, or the Trainer has not "
            "come to its end yet. For a schedule that is P times as long, give it P times as many steps"
        )
        if self.on_notice is not None:
            self.on_notice("the learning rate schedule has ended")

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Nothing to wait for: peers come and go. From some of its names, it can be told what the Trainer does next."""
        self._trials.see_barrier(name)

    def on_train_start(self) -> None:
        module: Any = self.lightning_module
        if not self._trials.begin(module.trainer):
            self._begin(module.trainer)

    def _begin(self, trainer: Any) -> None:
        """Take part in the swarm."""
        self._first_epoch.begin()
        self._say_notes()
        if self._order_of_data is not None:
            said = self._order_of_data.begin(trainer)
            if said is not None:
                rank_zero_info(said)
                if self.on_notice is not None:
                    self.on_notice("the order of the data may be the same at each peer")
        if self._optimizer is not None:
            moved = self._optimizer.state_averager.scheduler
            self.estimated_steps.check(trainer, () if moved is None else moved.schedulers)
            self._optimizer.begin()
            if self.left is not None:
                has_taken = self._optimizer.state_averager.states_taken > 0
                self._give_way(self._optimizer, self.left.edited, downloads=not has_taken)
            if self.on_joined is not None and self._optimizer.state_averager.states_taken:
                self.on_joined(self._optimizer.local_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called when all callbacks have been; from now on the module is training's."""
        if not self._trials.are_on:
            self._begin_batch(batch)
        elif self.on_trial is not None:
            self.on_trial()

    def _begin_batch(self, batch: Any) -> None:
        self._trials.note_found()
        if self._optimizer is not None:
            self._optimizer.acquire_module()
        self._batches.begin(batch)
        self._first_epoch.see_batch()
        self.estimated_steps.see_batch(self._batches.samples_in_batch)

    # in a trial, what acts on a batch is Lightning's, without the swarm's

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        return step(*args, **kwargs) if self._trials.are_on else self._batches.training_step(step, *args, **kwargs)

    def pre_backward(self, closure_loss: Any) -> None:
        """Called before gradients are computed."""
        if not self._trials.are_on:
            self._batches.before_backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = super().optimizer_step if self._trials.are_on else self._batches.optimizer_step
        return step(optimizer, closure, model, **kwargs)

    def on_train_end(self) -> None:
        if not self._trials.are_on:
            self._first_epoch.end(data_is_exhausted=self.data_is_exhausted)

    def take_up(self, edited: Sequence[str], *, trains_on: bool = True) -> None:
        """Go on with parameters that somebody has changed in the module, on the training thread, between two batches.

        :param edited: their names
        :param trains_on: whether another batch follows
        """
        if self._optimizer is None or not edited:
            return
        module: Any = self.lightning_module
        mine = dict(module.named_parameters())
        values = {name: mine[name].detach().clone() for name in edited if name in mine}
        self._optimizer.finish_delayed_updates()  # which would be put in their place later
        with torch.no_grad():
            for name, value in values.items():
                mine[name].copy_(value)
        self._optimizer.take_over_model()
        if trains_on:
            self._give_way(self._optimizer, edited, downloads=True)

    def _give_way(self, optimizer: Optimizer, edited: Sequence[str], *, downloads: bool) -> None:
        """Let parameters that somebody has changed give way to those of the swarm, if others train them.

        :param downloads: whether the swarm's are still to be downloaded
        """
        if not edited or not optimizer.others_share_state():
            return
        if downloads:
            optimizer.fall_behind()
        self.notify(
            "weights that were changed here gave way to the swarm's",
            f"{in_words(edited)} of the model was changed while this peer did not train, and other peers train this "
            f"run: their weights are taken over in its place. To train yours, give this run a name of its own, "
            "Options(run_id=...), or let the others stop first",
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, for a checkpoint: the first part of it that Lightning asks for.

        Waits for what runs in the background, so that parameters, moments and rates are those of one epoch.
        """
        if self._optimizer is not None and self._optimizer.is_to_be_finished:
            self._optimizer.finish_delayed_updates()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        self._trials.put_scaler_back()  # its state is the next that is restored
        if self.left is None or self._trials.are_on:  # else what it holds goes on
            super().load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        module: Any = self.lightning_module
        state = super().optimizer_state(optimizer)
        return with_description(state, module, optimizer, self._set_up)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        own: list[Any] = self.optimizers
        module: Any = self.lightning_module
        left = None if self._trials.are_on else self.left
        for optimizer, state in zip(own, checkpoint["optimizer_states"], strict=True):
            state = optimizer.frozen.of_trained(state)
            fitted, groups = fitted_state(state, module, optimizer, self._set_up, left=left)
            optimizer.load_state_dict(fitted)
            if epoch_of(state) is None:
                go_on_from_plain(optimizer, checkpoint)
            before = len(state["param_groups"])
            checkpoint["lr_schedulers"] = [
                groups.of_scheduler(one, config.scheduler.state_dict(), before)
                for one, config in zip(checkpoint.get("lr_schedulers", ()), self.lr_scheduler_configs, strict=False)
            ]
            self.rollback.kept.forget_unless(trained_names(module))
            if groups.begun:
                self.rollback.kept.forget()
                logger.info(
                    f"the optimizer begins anew for {in_words(groups.begun)}, and goes on with its state for all else"
                )
        self._trials.end()

    def teardown(self) -> None:
        """End the optimizer's processes and, unless it is borrowed, the DHT. Another ``fit`` starts them again."""
        self.estimated_steps.step_back()
        with contextlib.ExitStack() as afterwards:  # the last one first
            afterwards.callback(give_freed_memory_back)
            afterwards.callback(let_go, self)  # others may have the module
            afterwards.callback(super().teardown)  # moves it to host memory
            try:
                try:
                    if self._optimizer is not None:
                        self._optimizer.shutdown()  # it may step once more, with what hooks do to its gradients
                finally:
                    if self._hooks is not None:
                        self._hooks.restore()
                if self._optimizer is not None:
                    given, self._given_optimizer = self._given_optimizer, None  # a second time would be one too often
                    give_back(self._optimizer, given)
            finally:
                self._is_set_up = False
                self.left = None  # what is loaded from now on, as by trainer.test(ckpt_path=...), is meant
                order, self._order_of_data = self._order_of_data, None
                if order is not None:
                    module: Any = self.lightning_module
                    order.end(module.trainer)
                if self._owns_dht and self._dht is not None:
                    self._dht.shutdown()
                    self._dht = None


make_known(HivemindStrategy)
