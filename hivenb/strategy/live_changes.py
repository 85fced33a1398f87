"""Other options for an optimizer that trains: set where they can be set, or handed over to its successor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import hivemind

from hivenb.compression import codec
from hivenb.engine.averaging.extensions.buffers import ModuleBuffers
from hivenb.engine.averaging.module_rest import ModuleRest
from hivenb.engine.averaging.torch_optimizer_state import group_settings, restore_group_settings
from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.checkpoint import EpochSchedulers
from hivenb.engine.optimizer.handover import Handover, release, set_live, take_over
from hivenb.engine.optimizer.optimizer import Optimizer, default_next_chunk_timeout
from hivenb.engine.process.restart_count import RestartCount
from hivenb.errors import OptionsError, ProcessEndedError
from hivenb.options.choices import outer_optimizer_factory
from hivenb.options.declarations import TakesEffect
from hivenb.options.kinds import Compression
from hivenb.options.options import FIELDS, Options
from hivenb.strategy.checks import SUMS_BY_HAND
from hivenb.strategy.trains import Trains

#: Options that the engine's optimizer takes.
_ENGINES = tuple(
    name
    for name, info in FIELDS.items()
    if name == "run_id" or info.takes_effect in (TakesEffect.IN_PLACE, TakesEffect.REBUILD)
)

#: Those of them that are codecs.
_CODECS = frozenset(name for name in _ENGINES if isinstance(FIELDS[name].kind, Compression))

#: Where the classes of a codec must come from, so that the process of an averager that runs already knows them.
_KNOWN_HOMES = ("hivemind.", "hivenb.")


def engine_settings(options: Options) -> dict[str, Any]:
    """Keyword arguments of the engine's optimizer; all of them, because its defaults are not the documented ones."""
    settings = {name: getattr(options, name) for name in _ENGINES}
    for name in _CODECS:
        settings[name] = codec(settings[name])
    if settings["allreduce_timeout"] is None:
        settings["allreduce_timeout"] = options.averaging_timeout
    if settings["next_chunk_timeout"] is None:
        settings["next_chunk_timeout"] = default_next_chunk_timeout(options.matchmaking_time)
    for name in ("offload_optimizer", "delay_optimizer_step"):
        settings[name] = bool(settings[name])
    return settings


def with_buffers(settings: Mapping[str, Any], module: Any, rest: ModuleRest | None = None) -> dict[str, Any]:
    """Keyword arguments of the engine's optimizer, among them the module's buffers, if they are to be averaged.

    :param settings: such arguments, ``average_buffers``, ``robust_aggregation`` and those of an outer optimizer
    :param module: a ``torch.nn.Module`` on its device
    :param rest: what of it no round averages, which others may download
    """
    settings = dict(settings)
    if rest is not None:
        settings["averager_opts"] = {**(settings.get("averager_opts") or {}), "module_rest": rest}
    if (rule := settings.pop("robust_aggregation", None)) is not None:
        settings["averager_opts"] = {**(settings.get("averager_opts") or {}), "robust_aggregation": rule}
    fragments = settings.pop("outer_fragments", 1)
    if (factory := outer_optimizer_factory(settings.pop("outer_optimizer", None))) is not None:
        own = {
            "outer_optimizer": factory,
            "outer_fragments": fragments,
            "pseudo_gradient_compression": settings.get("grad_compression"),
        }
        settings["averager_opts"] = {**(settings.get("averager_opts") or {}), **own}
    if not settings.pop("average_buffers", False):
        return settings
    buffers = ModuleBuffers(module, without=settings.get("extra_tensors", ()))
    if not buffers:
        return settings
    return {**settings, "averager_opts": {**(settings.get("averager_opts") or {}), "module_buffers": buffers}}


def check_change(before: Options, after: Options, training: Trains | None = None) -> None:
    """Refuse what cannot be changed while a run trains.

    :param training: to be changed; ``None`` if there is none
    :raises OptionsError: naming the option, and what to do instead
    """
    if before.run_id != after.run_id:
        raise OptionsError(
            f"run_id={after.run_id!r} would be another run, while this peer trains in {before.run_id!r}: stop it first"
        )
    if training is None or before.reuse_grad_buffers == after.reuse_grad_buffers:
        return
    if not training.lightning_module.automatic_optimization:
        raise OptionsError(SUMS_BY_HAND)
    if getattr(training.precision_plugin, "scaler", None) is not None:
        raise OptionsError(
            "reuse_grad_buffers cannot be changed while gradients are scaled (precision='16-mixed'): stop first"
        )


def reconfigured(
    optimizer: Optimizer,
    before: Options,
    after: Options,
    differing: Collection[str],
    make: Callable[..., Optimizer],
    otherwise: Callable[[Handover, Exception], Optimizer],
) -> tuple[Optimizer, Exception | None]:
    """The optimizer with other options, to be called between two of its steps.

    :param optimizer: as it trains with the options ``before``
    :param differing: names of the options that differ
    :param make: makes an optimizer from keyword arguments
    :param otherwise: called where nothing can be made with the old options, either: makes a successor all the same
    :returns: the same optimizer, where all that changes can be set in it, otherwise its successor; and ``None``, or
      what went wrong with the new options: then it has the old ones
    """
    old, new = engine_settings(before), engine_settings(after)
    changed = {name for name in new if name in differing or (name.endswith("_timeout") and old[name] != new[name])}
    can_be_set = (
        all(FIELDS[name].takes_effect is TakesEffect.IN_PLACE for name in changed)
        # with local updates, hivemind averages differences then, in other tensors
        and not (after.use_local_updates and "delay_state_averaging" in changed)
        and all(type(new[name]).__module__.startswith(_KNOWN_HOMES) for name in changed & _CODECS)
    )
    if can_be_set:
        try:
            set_live(optimizer, {name: new[name] for name in changed})
        except Exception as e:
            set_live(optimizer, {name: old[name] for name in changed})
            return optimizer, e
        return optimizer, None
    handover = release(optimizer)
    try:
        return take_over(handover, make, offload=new.pop("offload_optimizer"), **new), None
    except Exception as e:
        error = e
    try:
        return take_over(handover, make, offload=old.pop("offload_optimizer"), **old), error
    except Exception as e:  # as where memory has run out, or the DHT has just ended
        return otherwise(handover, e), error


def set_scheduler(
    optimizer: Optimizer, make_scheduler: Callable[[Any], EpochSchedulers] | None
) -> Callable[[Optimizer], None]:
    """Give an optimizer that trains another scheduler, as if it had been there from the first epoch on.

    :param make_scheduler: a function of the torch optimizer; ``None`` to stay at the present rate
    :returns: what puts the former scheduler and its rates back, in that optimizer or its successor
    :raises Exception: what the function raises; the former scheduler stays
    """
    optimizer.finish_delayed_updates()
    former, settings = optimizer.state_averager.scheduler, group_settings(optimizer.opt)

    def put_back(present: Optimizer) -> None:
        restore_group_settings(present.opt, settings)
        present.state_averager.scheduler = former

    try:
        scheduler = None
        if make_scheduler is not None:
            for group in optimizer.opt.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
            scheduler = make_scheduler(optimizer.opt)
            while scheduler.epoch < optimizer.local_epoch:
                scheduler.step()
    except Exception:
        put_back(optimizer)
        raise
    optimizer.state_averager.scheduler = scheduler
    return put_back


# -- recovery --------------------------------------------------------------------------------------------------------
#
# What is to be done when a process has ended that training needs: averagers are made anew, and training goes on.


class Recovery:
    """Lets a training go on with new averagers when those of its optimizer have ended, by themselves or with the DHT.

    :param training: whose optimizer it is. To be called on the training thread, between two of its steps
    :param make: makes an optimizer from keyword arguments
    :param go_on_with: called with the optimizer that training goes on with
    """

    def __init__(self, training: Trains, make: Callable[..., Optimizer], go_on_with: Callable[[Optimizer], None]):
        self._training, self._make, self._go_on_with = training, make, go_on_with
        self._count = RestartCount()
        #: an optimizer that a change of options has ended, and why none could be made in its place
        self._lost: tuple[Optimizer, ProcessEndedError] | None = None

    def recover(self, failure: ProcessEndedError | None = None) -> bool:
        """Start averagers anew that have ended.

        :param failure: of the step before, if it has failed with that. Then they are made anew also if they live: they
            may be about to end with the DHT, or an answer of theirs may be lost with that of a process that was killed
        :returns: whether any were
        :raises ProcessEndedError: if what has ended cannot be started anew, or has ended too often of late
        """
        optimizer = self._training.optimizer
        if self._lost is not None and self._lost[0] is optimizer:
            raise self._lost[1]
        if optimizer is None:
            return False
        # training would go on without an averager: each round fails at once
        averagers = (optimizer.state_averager, optimizer.grad_averager)
        ended = next((one.ended for one in averagers if one is not None and one.ended is not None), failure)
        if ended is None:
            return False
        self._go_on_with(self._successor(optimizer, ended))
        self._training.notify(f"{ended.title} was started anew", f"{ended}. It was started anew, and training goes on")
        return True

    def recovering(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a step; give it up if it cannot go on since a process has ended, and recover.

        :returns: what it gives; ``None`` if it was given up
        """
        try:
            return step(*args, **kwargs)
        except ProcessEndedError as e:
            if not self.recover(e):
                raise
        return None

    def rescue(self, handover: Handover, error: Exception) -> Optimizer:
        """Make a successor with the options that are in force, where that has just failed.

        :raises ProcessEndedError: if it fails again and again; training ends with it at its next batch
        """
        optimizer = self._training.optimizer
        assert optimizer is not None  # whose handover it is
        words = f"the averagers could not be made anew: {str(error) or repr(error)}"
        ended = error if isinstance(error, ProcessEndedError) else ProcessEndedError(words)
        try:
            return self._successor(optimizer, ended, handover)
        except ProcessEndedError as e:
            self._lost = optimizer, e
            raise

    def _successor(self, optimizer: Optimizer, ended: ProcessEndedError, handover: Handover | None = None) -> Optimizer:
        while True:
            self._count.add(ended)
            _require(optimizer.dht, ended)  # which has ended its averagers by then
            handover = handover or release(optimizer)
            settings = engine_settings(self._training.options)
            try:
                return take_over(handover, self._make, offload=settings.pop("offload_optimizer"), **settings)
            except ProcessEndedError as e:
                ended = e  # it has ended once more
            except Exception as e:
                raise ProcessEndedError(f"{ended}. It could not be started anew: {str(e) or repr(e)}") from e


def _require(dht: hivemind.DHT, ended: ProcessEndedError) -> None:
    """Wait for a DHT that is started anew.

    :param ended: what has ended
    :raises ProcessEndedError: if the DHT could not be started anew, or is not one that is
    """
    if isinstance(dht, DHT):
        dht.require()
    elif not dht.is_alive():
        raise ProcessEndedError(f"{ended}. It belongs to a DHT of plain hivemind's (dht=...), which only you can start")
