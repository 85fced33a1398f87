"""Gradient and state averagers that can be born on any thread and change nothing but what they are asked to."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from functools import partial
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.optim.grad_averager import GradientAverager as _GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as _PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager
from hivemind.p2p import ServicerBase
from hivemind.utils import get_logger

from hivenb.engine import codecs as _codecs  # noqa: F401 - a peer without a codec decodes what others send, too
from hivenb.engine.processes import SettledProcess

logger = get_logger(__name__)

#: Looks at the swarm in a row that find nobody else before a search for a group is given up; one may miss a record.
ALONE_AFTER = 2


class SettledAverager(SettledProcess, DecentralizedAverager):
    """Base to put *behind* a class of hivemind's averagers: what creating one, and waiting for it, should be like.

    Behind, because hivemind's classes reach :meth:`step` through ``super()``.
    """

    _rounds: weakref.WeakSet[StepControl]

    def __init__(self, *args: Any, **kwargs: Any):
        self._rounds = weakref.WeakSet()
        self._expected: int | None = None
        self._seen_alone = 0
        self._retired = False
        self._group_size_is_fixed = kwargs.get("target_group_size") is not None
        super().__init__(*args, **kwargs)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # Replaces hivemind/averaging/averager.py:DecentralizedAverager.run_in_background, which sets SIGINT to be
        # ignored in the caller: an error off the main thread, and the end of the interrupt button on it.
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # hivemind/p2p/servicer.py makes the class's name a part of the name of each RPC, and peers of plain
        # hivemind know the names of hivemind's own classes only.
        upstream = next(base for base in cls.__mro__ if base.__module__.startswith("hivemind."))
        return ServicerBase._get_handle_name.__func__(upstream, namespace, method_name)

    # -- in the process that trains -----------------------------------------------------------------------------

    def step(self, *args: Any, wait: bool = True, **kwargs: Any) -> Any:
        control = super().step(*args, wait=False, **kwargs)
        self._rounds.add(control)
        if self._retired:
            control.cancel()
        return control.result() if wait else control

    def retire(self) -> None:
        """Give up the rounds that still look for a group, and all later ones, so that nobody waits for them.

        A round whose peers are exchanging data already comes to its end. May be called from any thread.
        """
        self._retired = True
        for control in list(self._rounds):
            if not control.done() and control.stage is not AveragingStage.RUNNING_ALLREDUCE:
                with contextlib.suppress(InvalidStateError):  # another thread was quicker
                    control.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_parent_pid"):  # else the constructor has failed, and hivemind's method would print that
            super().__del__()

    def expect_peers(self, count: int) -> None:
        """Let a group be complete as soon as that many peers have met, instead of after ``matchmaking_time``.

        :param count: peers known to be in the run, this one included. A ``target_group_size`` of the user's own
          choice stays as it is
        """
        if count <= 1:
            self._seen_alone += 1
            if self._seen_alone >= ALONE_AFTER:
                self._give_up_searches()
            return
        self._seen_alone = 0
        if count != self._expected and not self._group_size_is_fixed:
            self._expected = count
            self._outer_pipe.send(("_expect_peers", [count], {}))

    def _give_up_searches(self) -> None:
        """Cancel the rounds that look for a group when everybody else has left: hivemind would until their timeout."""
        for control in list(self._rounds):
            if not control.done() and control.stage is AveragingStage.LOOKING_FOR_GROUP:
                with contextlib.suppress(InvalidStateError):  # another thread was quicker
                    control.cancel()

    # -- in the averager's own process --------------------------------------------------------------------------

    async def add_p2p_handlers(self, *args: Any, **kwargs: Any) -> None:
        _keep_tasks_alive()
        await super().add_p2p_handlers(*args, **kwargs)

    async def _expect_peers(self, count: int) -> None:
        matchmaking = self._matchmaking
        # a group of one would turn everybody away; the key manager's own size stays open, it draws from it
        matchmaking.target_group_size = max(2, count)
        async with matchmaking.lock_request_join_group:
            # hivemind looks at the size only when somebody joins, so one that has shrunk is looked at here
            complete = len(matchmaking.current_followers) + 1 >= matchmaking.target_group_size
            if complete and matchmaking.is_looking_for_group and not matchmaking.assembled_group.done():
                await matchmaking.leader_assemble_group()

    async def _shutdown(self, timeout: float | None) -> None:
        await super()._shutdown(timeout)
        # hivemind leaves its other tasks behind, and asyncio complains of each of them at the end of the process
        # (_run, in _run_internal, is the loop that waits for this very task)
        others = {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") != "_run"}
        others -= {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=timeout)
        await self._p2p.shutdown()  # removes its socket from /tmp

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        _keep_tasks_alive()  # a client has no handlers
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        except Exception as e:
            # whoever asked for the round has the error in its future; here it would only be printed by asyncio
            logger.debug(f"A round of averaging ended with {e!r}")


class WeighedBySamples(_GradientAverager):
    """Mixin to put *before* a gradient averager, so that batches of different sizes count by their samples."""

    def load_accumulators_into_averager_(self) -> None:
        # hivemind/optim/grad_averager.py divides a sum in units of the first batch by the number of batches: with a
        # dataset's small last batch as the first one of an epoch, gradients are too large by a factor of about 30.
        times = self.local_times_accumulated
        if not self.reuse_grad_buffers and self._anchor_batch_size:
            self.local_times_accumulated = self.local_samples_accumulated / self._anchor_batch_size
        try:
            super().load_accumulators_into_averager_()
        finally:
            self.local_times_accumulated = times


class GradientAverager(WeighedBySamples, _GradientAverager, SettledAverager):
    """``hivemind``'s ``GradientAverager`` that can be created on any thread."""


class PowerSGDGradientAverager(WeighedBySamples, _PowerSGDGradientAverager, SettledAverager):
    """``hivemind``'s ``PowerSGDGradientAverager`` that can be created on any thread."""


class TrainingStateAverager(_TrainingStateAverager, SettledAverager):
    """``hivemind.TrainingStateAverager`` that can be created on any thread and leaves the parameters as they are."""

    def _init_components(
        self,
        param_groups: Any,
        optimizer_or_factory: Any,
        scheduler_or_factory: Any,
        initialize_optimizer: bool | None,
    ) -> tuple[torch.optim.Optimizer, Any]:
        # Works around hivemind/optim/state_averager.py:initialize_optimizer_state_, a real step with zero gradients
        # that decays the weights and counts as the first one in Adam's bias correction.
        if initialize_optimizer is not False:
            if isinstance(optimizer_or_factory, torch.optim.Optimizer):
                initialize_optimizer_state(optimizer_or_factory)
            else:
                optimizer_or_factory = _initialized_by(optimizer_or_factory)
        return super()._init_components(param_groups, optimizer_or_factory, scheduler_or_factory, False)


def _keep_tasks_alive() -> None:
    """Let the running loop hold each of its tasks until it is done; may be called again.

    asyncio holds them weakly, and hivemind/averaging/averager.py:_run_internal only the newest one. A round that has
    met its peers and waits for its trigger, or a peer's request that waits for that round, would be collected as
    garbage: the peer then waits for averaging_timeout, and the others for a peer that has never really left.
    """
    asyncio.get_running_loop().set_task_factory(_make_kept_task)


_kept_tasks: set[asyncio.Task[Any]] = set()


def _make_kept_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **kwargs)
    _kept_tasks.add(task)
    task.add_done_callback(_kept_tasks.discard)
    return task


def settled_factory(factory: Callable[..., Any] | None) -> Callable[..., Any]:
    """The same factory of a gradient averager, so that what it makes can be created on any thread.

    :param factory: a subclass of ``hivemind.optim.grad_averager.GradientAverager``, a ``functools.partial`` of one,
      or ``None`` for the default
    :raises TypeError: if it is neither; such a factory makes its averager start where we cannot reach it
    """
    if factory is None:
        return GradientAverager
    if isinstance(factory, partial):
        return partial(settled_factory(factory.func), *factory.args, **factory.keywords)
    if not (isinstance(factory, type) and issubclass(factory, _GradientAverager)):
        raise TypeError(
            f"grad_averager_factory is {factory!r}; it must be a subclass of "
            "hivemind.optim.grad_averager.GradientAverager or a functools.partial of one, such as "
            "partial(PowerSGDGradientAverager, averager_rank=32)"
        )
    if issubclass(factory, SettledAverager):
        return factory
    return type(factory.__name__, (WeighedBySamples, factory, SettledAverager), {})


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state tensors of a fresh optimizer (moments, step counts) and leave all else as it was.

    Does nothing if the optimizer has state already. Parameters and gradients are unchanged, and the state is that
    of an optimizer that has not made a step yet.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # SGD would take it into its momentum buffer
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        with torch.no_grad():
            for p, (value, grad) in zip(parameters, kept, strict=True):
                p.copy_(value)
                p.grad = grad
    for state in optimizer.state.values():
        for name, unmade in (("step", 0), ("mu_product", 1)):  # the latter is NAdam's
            if name in state:
                state[name] = torch.full_like(state[name], unmade) if torch.is_tensor(state[name]) else unmade


def _initialized_by(
    factory: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    def create(param_groups: Any) -> torch.optim.Optimizer:
        optimizer = factory(param_groups)
        initialize_optimizer_state(optimizer)
        return optimizer

    return create
