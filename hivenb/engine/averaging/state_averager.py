"""The averager of parameters and optimizer statistics, which changes nothing but what it is asked to.

What goes wrong in a step of the user's own optimizer, hooks and schedulers is raised where training goes on:
``hivemind/optim/state_averager.py:_do`` logs it, and lets training go on with whatever is in the averaging buffers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionBase, NoCompression
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager
from hivemind.optim.state_averager import dump_optimizer_state
from hivemind.utils import get_logger

from hivenb.engine.averaging.extensions.buffers import AveragedBuffers, ModuleBuffers
from hivenb.engine.averaging.extensions.early_rounds import MOST_BESIDE_GRADIENTS, EarlyRounds, has_begun
from hivenb.engine.averaging.extensions.extension import ServedState, Tail, split_tails
from hivenb.engine.averaging.extensions.outer_optimizer import OuterOptimizer, OuterRounds
from hivenb.engine.averaging.module_access import ModuleAccess
from hivenb.engine.averaging.module_changes import ChangesMeanwhile, ChangesOfModule
from hivenb.engine.averaging.rest_download import SharesRest
from hivenb.engine.averaging.round import Round
from hivenb.engine.averaging.state_download import Download
from hivenb.engine.averaging.torch_optimizer_state import (
    add_change,
    group_settings,
    initialize_optimizer_state,
    initialized_by,
    lay_out_like_parameters,
    restore_group_settings,
    restore_switches,
    state_mismatch,
)
from hivenb.engine.exchange.exact_tensors import SendsExactly
from hivenb.engine.trust.aggregation import NORM_BOUND
from hivenb.errors import ProcessEndedError, SwarmError

logger = get_logger(__name__)

#: What hivemind asks for before each batch.
_ONLY_APPLIES = {"apply_delayed_updates": True}

#: Seconds between two looks whether a process that has not answered is still there.
_LOOK_AGAIN = 0.1


class _Finished(threading.Event):
    """What hivemind sets when a part of a step is over, also while it handles an error of it, which it then forgets.

    :param note: called with that error, before anybody else can know that the step is over
    """

    def __init__(self, note: Callable[[BaseException], None]):
        super().__init__()
        self._note = note

    def set(self) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._note(error)
        super().set()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy without anything that could have ended."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class TrainingStateAverager(_TrainingStateAverager, SharesRest):
    """``hivemind.TrainingStateAverager`` that can be created on any thread and leaves the parameters as they are.

    A round of averaging that fails is no error of a step: it is missed. The parameters are then those of the last step
    that the optimizer has finished: an offloaded optimizer works on copies, of which only finished steps get into the
    model; otherwise the averaging buffers keep the parameters while a step is made, which costs no memory and, where
    the round before has left them there, no time. With local updates, a step for each batch, what a step has half done
    stays.

    :param module_buffers: that peers average; ``None`` if there are none, or they are not to be averaged
    :param module_rest: what of the module no round averages
    :param outer_optimizer: a factory of torch optimizers that is called with a list of parameters; ``None`` to average
      the parameters themselves
    :param pseudo_gradient_compression: the codec of what peers average then
    :param outer_fragments: pieces of the model, of which each round synchronizes one
    :param robust_aggregation: the rule by which what is finite is averaged
    """

    title = "the averager of the state"

    #: a peer has one set of parameters, however many samples it has seen
    weights_are_samples = False

    #: the outer optimizer in its rounds; ``None`` without one
    outer_rounds: OuterRounds | None = None

    #: states that were taken over
    states_taken = 0

    _failure: BaseException | None = None
    _is_settled = False
    _is_raised = False
    _is_held_back = False

    #: 1 while the epoch is counted and its step is still to be made; hivemind counts at once and makes the step later
    _steps_to_come = 0

    #: whether the optimizer is in the middle of a step, or was when that failed; guarded by ``lock_optimizer``
    _is_half_done = False

    #: how often each parameter was written to when the averaging buffers were the same
    _same_as_buffers: list[int] | None = None

    #: whether the averaging buffers hold the parameters from before the step that is under way
    _parameters_are_kept = False

    _is_step_left_out = False
    _group_bits: str | None = None

    #: whether the module goes on while a round averages what is loaded next
    _goes_on_meanwhile = False

    #: whether the model has other parameters than the averages that it got last
    _has_changed_meanwhile = False

    #: what the model would have were it not ahead of an offloaded optimizer; ``None`` while it is not
    _behind_model: Sequence[torch.Tensor] | None = None

    def __init__(
        self,
        *args: Any,
        module_buffers: ModuleBuffers | None = None,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        pseudo_gradient_compression: CompressionBase | None = None,
        outer_fragments: int = 1,
        robust_aggregation: str = NORM_BOUND,
        **kwargs: Any,
    ):
        self.robust_aggregation = robust_aggregation
        self.module_buffers = module_buffers
        self._averaged_buffers = None if module_buffers is None else AveragedBuffers(module_buffers)
        self._early = EarlyRounds(at_once=module_buffers is None)
        self.extensions = (self._early, *([] if self._averaged_buffers is None else [self._averaged_buffers]))
        self._make_outer = outer_optimizer
        self._outer_settings = pseudo_gradient_compression or NoCompression(), outer_fragments
        self._module_access = ModuleAccess()
        self._changes, self._meanwhile = ChangesOfModule(), ChangesMeanwhile()
        #: what was downloaded for extensions, and not taken over yet
        self._tails: dict[str, Tail] | None = None
        self._without_gradient: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        super().__init__(*args, **kwargs)
        self.finished_optimizer_step = _Finished(self._note)
        self.finished_averaging_round = _Finished(self._note)

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        if self._make_outer is not None:  # before the process is forked, which shares its memory
            copies = [self._make_host_tensor(one, force_copy=True) for one in self.main_parameters]
            outer = OuterOptimizer(self._make_outer, copies)
            self.outer_rounds = OuterRounds(outer, *self._outer_settings, partial(_parameters_of, self.optimizer))
            self.extensions = (self.outer_rounds, *self.extensions)  # what it changes of the tensors comes first
        return super()._init_averaged_tensors()

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
                optimizer_or_factory = initialized_by(optimizer_or_factory)
        optimizer, scheduler = super()._init_components(param_groups, optimizer_or_factory, scheduler_or_factory, False)
        self._hooks = (
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_pre_hook(self._leave_out_frozen_parameters),
            optimizer.register_step_post_hook(self._put_gradients_back),
        )
        return optimizer, scheduler

    def _make_host_tensor(self, source_tensor: torch.Tensor, force_copy: bool = False) -> torch.Tensor:
        # Replaces the method of hivemind/optim/state_averager.py, which makes all of single precision, doubles as well,
        # and copies the layout of the source: an offloaded optimizer would work on another one than its gradients have
        if self.reuse_tensors and not force_copy:
            return super()._make_host_tensor(source_tensor)
        dtype = torch.promote_types(source_tensor.dtype, torch.float32)
        host = torch.empty(source_tensor.shape, dtype=dtype, device="cpu").copy_(source_tensor.detach())
        return host.share_memory_().requires_grad_(source_tensor.requires_grad)

    # -- what others ask of it --------------------------------------------------------------------------------

    @property
    def is_in_a_step(self) -> bool:
        """Whether the optimizer is in the middle of a step, or was when that failed."""
        return self._is_half_done

    @property
    def epoch_of_parameters(self) -> int:
        """The swarm epoch whose step the parameters have; in the background, it may be still to come."""
        return self.local_epoch - self._steps_to_come

    @property
    def is_a_step_behind(self) -> bool:
        """Whether the step of this peer's epoch is still to be made, in the background."""
        return self._steps_to_come > 0

    @property
    def outer(self) -> OuterOptimizer | None:
        """The outer optimizer."""
        return None if self.outer_rounds is None else self.outer_rounds.outer

    @property
    def pseudo_gradient_compression(self) -> CompressionBase:
        """The codec of what peers average for an outer optimizer."""
        return self._outer_settings[0] if self.outer_rounds is None else self.outer_rounds.compression

    @pseudo_gradient_compression.setter
    def pseudo_gradient_compression(self, codec: CompressionBase) -> None:
        if self.outer_rounds is not None:
            self.outer_rounds.compression = codec

    @property
    def state_compression(self) -> CompressionBase:
        """The codec of a download."""
        return self._state_compression

    @state_compression.setter
    def state_compression(self, codec: CompressionBase) -> None:
        self._state_compression = codec if self.module_buffers is None else SendsExactly(codec)

    @property
    def why_buffers_skipped(self) -> str | None:
        """Why the buffers were left out of a round or a download, in words; ``None`` if they never were."""
        return None if self._averaged_buffers is None else self._averaged_buffers.why_skipped

    def take_over_parameters(self) -> None:
        """Let the model and the averaging buffers have the parameters that the torch optimizer has been given."""
        self.forget_changes()
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()

    def move_schedulers(self) -> None:
        """Move the schedulers to the present epoch."""
        self._update_scheduler()

    def take_in_changes(self, remember: bool = False) -> None:
        """Let an optimizer in main memory have what the module has changed in its parameters itself.

        To be called while nothing in the background changes the optimizer's copies. Does nothing while the model is
        ahead of them, which is no change of the module's: what that changes meanwhile stays in the model.

        :param remember: whether something will, before the model gets them
        """
        if not self.offload_optimizer or self._behind_model is not None:
            return
        with self.lock_optimizer, self.get_tensors() if self.reuse_tensors else contextlib.nullcontext():
            self._changes.take_in(self.main_parameters, self._optimizer_parameters(), remember)

    def lead_model(
        self,
        steps: Callable[[torch.optim.Optimizer], Iterable[tuple[int, torch.Tensor]]],
        keep_in: Sequence[torch.Tensor],
    ) -> None:
        """Let the model be ahead of an offloaded optimizer, until that has made its next step, or has failed in it.

        To be called while nothing is under way in the background.

        :param steps: gives numbers of parameters, and what the model is to have of them, from the torch optimizer
        :param keep_in: memory for what the optimizer has; written when ``steps`` has given all
        :raises Exception: what ``steps`` raises, and what writing to the model does; it is not ahead then, and what has
          been written to of the optimizer's copies is what the model has
        """
        own = self._optimizer_parameters()

        def write(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
            try:
                for place, parameter in zip(keep_in, own, strict=True):
                    place.copy_(parameter)
                self._behind_model = keep_in  # before anything of the model is ahead
                self.staging.copy(sources, targets)
            except BaseException:
                self._changes.forget()  # nobody knows what was written
                self.end_lead()
                raise

        self.end_lead()
        self.take_in_changes(remember=True)
        with self.lock_optimizer, torch.no_grad():
            before = [parameter._version for parameter in own]
            try:
                self._changes.lead(steps(self.optimizer), self.main_parameters, write)
            except BaseException:
                for parameter, main, version in zip(own, self.main_parameters, before, strict=True):
                    if parameter._version != version:
                        parameter.copy_(main)
                raise

    def end_lead(self) -> None:
        """Let the model be ahead no longer, of a step whose result may never come. For the training thread.

        It has what that step is made from, and what the module has changed meanwhile; also without any process.
        """
        if self._behind_model is not None:
            self._changes.hand_out(self._behind_model, self.main_parameters, _copy)
            self._behind_model = None

    @property
    def is_ahead(self) -> bool:
        """Whether the model is ahead of the optimizer."""
        return self._behind_model is not None

    def values_behind(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """What the model's parameters would have were it not ahead; empty while it is not. For the training thread.

        They are to be copied at once: nothing holds them for longer than the model is ahead.
        """
        if self._behind_model is None:
            return {}
        values = self._changes.handed_out(self._behind_model, self.main_parameters)
        return dict(zip(self.main_parameters, values, strict=True))

    def wait_for_step(self) -> None:
        """Wait for the optimizer's step in the background, not for a round after it; the model has its result then.

        :raises Exception: what went wrong in it
        """
        self.finished_optimizer_step.wait()
        self.step()

    def forget_changes(self) -> None:
        """Let the model have next what the optimizer or a round gives it, whatever the module has changed before."""
        self._changes.forget()
        self._meanwhile.forget()

    def _optimizer_parameters(self) -> list[torch.Tensor]:
        return _parameters_of(self.optimizer)

    # -- the module while callbacks have it -----------------------------------------------------------------------

    def release_module(self, keep: bool = False) -> None:
        """Let callbacks have the module until :meth:`acquire_module`, and put into it what they like.

        What is under way in the background has read it when this returns, and nobody else does: downloads wait.

        :param keep: copy what was trained into main memory, to be downloaded meanwhile; for what may take long
        """
        if not self._reads_module:
            return
        if not self.reuse_tensors:
            self._module_access.wait_until_read(self.pending_updates)
        if keep:
            if self.module_buffers is not None:
                self.module_buffers.keep()
            parameters = self._optimizer_parameters()
            self._module_access.keep([*parameters, *self.extra_tensors][self._first_of_module :])
        self._module_access.release()

    def acquire_module(self) -> None:
        """The module is as training has left it."""
        if self._reads_module:
            self._module_access.acquire()
            if self.module_buffers is not None:
                self.module_buffers.let_go()

    @property
    def _reads_module(self) -> bool:
        """Whether anything that others download lies in the module, and not only in main memory."""
        return not self.offload_optimizer or bool(self.extra_tensors) or self.module_buffers is not None

    @property
    def _first_of_module(self) -> int:
        """How many tensors of a state lie in main memory, before those of the module."""
        return len(self.main_parameters) if self.offload_optimizer or self.outer is not None else 0

    def let_go_of_optimizer(self) -> None:
        """Take the hooks off the torch optimizer, which another averager is to go on with."""
        self._module_access.end()
        for hook in self._hooks:
            hook.remove()

    def step_by_itself(self) -> None:
        """Let the torch optimizer make a step with what the model has in its gradients, which belongs to no epoch.

        To be called while nothing is under way in the background.
        """
        own = self._optimizer_parameters()
        averages = [parameter.grad for parameter in own]
        with self.lock_optimizer, self.lock_averaged_tensors:
            try:
                if self.offload_optimizer:
                    for parameter, main in zip(own, self.main_parameters, strict=True):
                        parameter.grad = None if main.grad is None else main.grad.to(parameter)
                self.optimizer.step()
                if self.offload_optimizer:
                    self._apply_optimizer_parameters_()
            finally:
                self._is_half_done = False
                if self.offload_optimizer:
                    for parameter, average in zip(own, averages, strict=True):
                        parameter.grad = average

    def leave_out_step(self) -> None:
        """Let the next step of the optimizer change nothing; the epoch and the learning rate go on."""
        self._is_step_left_out = True

    def _leave_out_frozen_parameters(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        # a peer of plain hivemind gives each parameter a gradient, of zeros if need be, and weight decay would change
        # those that are not to be trained for a while
        parameters = _parameters_of(optimizer)
        self._without_gradient = []
        for main, parameter in zip(self.main_parameters, parameters, strict=True):
            is_frozen = not main.requires_grad and not (parameter.grad is not None and parameter.grad.any())
            if self._is_step_left_out or is_frozen:
                self._without_gradient.append((parameter, parameter.grad))
                parameter.grad = None
        self._is_step_left_out = False

    def _put_gradients_back(self, *args: Any) -> None:
        for parameter, gradient in self._without_gradient:
            parameter.grad = gradient

    # -- steps and rounds, on the thread that trains --------------------------------------------------------------

    def schedule_step(self, *args: Any, is_waited_for: bool = True, offers_early: bool = False, **kwargs: Any) -> Any:
        """As hivemind's.

        :param is_waited_for: whether training stands still while it is held after its step
        :param offers_early: whether this peer may hold the round before its step, if the others may. Unless there are
          buffers, it begins as soon as its group has met, for which :meth:`be_ready_early` is to be called before
        """
        self._early.offer(offers_early)
        control = super().schedule_step(*args, **kwargs)
        control.offers_early = offers_early
        if is_waited_for:
            control.add_done_callback(self._early.note_end)
        if offers_early and self._early.at_once:
            control.await_beginning(self.begin_early(int(control.epoch)))
        return control

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As hivemind's.

        :raises Exception: what went wrong in this step, or in an earlier one that was made in the background
        """
        if kwargs == _ONLY_APPLIES and not args and self._has_nothing_to_apply:
            return None
        if kwargs.get("averaging_round"):
            self._module_access.expect_read()
        kwargs = self._conclude_early(kwargs)
        if kwargs.get("averaging_round") and kwargs.get("averaging_control") is None:
            self._early.withdraw()
        if self._averaged_buffers is not None and kwargs.get("averaging_round"):
            # by now, since the module goes on with its own while they are averaged in the background
            self._step_or_raise(wait_for_delayed_updates=True)
            self._apply_buffers()
            with self.get_tensors():
                self._averaged_buffers.load()
        output = self._step_or_raise(*args, **kwargs)
        self._apply_buffers()
        return output

    @property
    def _has_nothing_to_apply(self) -> bool:
        """Whether there is no outcome of the background to apply, and no error to raise, as in most batches."""
        return not (
            self.pending_updates
            or self.finished_optimizer_step.is_set()
            or self.finished_averaging_round.is_set()
            or self._early.has_begun
            or self._failure is not None
            or (self._averaged_buffers is not None and self._averaged_buffers.has_outcome)
        )

    def _apply_buffers(self) -> None:
        if self._averaged_buffers is not None and self._averaged_buffers.has_outcome:
            with self.get_tensors():
                self._averaged_buffers.apply()

    def _step_or_raise(self, *args: Any, **kwargs: Any) -> Any:
        only_waits = {name for name, value in kwargs.items() if value} == {"wait_for_delayed_updates"}
        output = None
        if self._failure is None:
            with self._beside_round(kwargs), self._after_background(kwargs):
                if kwargs.get("increment_epoch") and kwargs.get("optimizer_step"):
                    self._steps_to_come = 1
                self._take_in_for(kwargs)
                output = super().step(*args, **kwargs)
        elif only_waits:
            with self._after_background(kwargs):
                super().step(*args, **{**kwargs, "apply_delayed_updates": False})
        self._raise_failure(only_waits)
        return output

    @contextlib.contextmanager
    def _after_background(self, step: dict[str, Any]) -> Iterator[None]:
        """Wait for what is under way, where hivemind does, which drops a KeyboardInterrupt that comes meanwhile.

        What takes longer than it may goes on beside the step, and hivemind does not wait for it once more.

        :param step: what the step is to do
        """
        waits = step.get("wait_for_delayed_updates") or step.get("averaging_round")
        waits = waits or (step.get("optimizer_step") and (self.offload_optimizer or self.delta_rule_averaging))
        late: set[concurrent.futures.Future[Any]] = set()
        if waits and self.pending_updates:
            _, late = concurrent.futures.wait(self.pending_updates, self._allreduce_timeout)
            self.pending_updates = self.pending_updates - late
        try:
            yield
        finally:
            self.pending_updates = self.pending_updates | late

    @contextlib.contextmanager
    def _beside_round(self, step: dict[str, Any]) -> Iterator[None]:
        """Let a local step be made while a round averages what was learned before it.

        hivemind has a thread for each then, and adds what comes of the round to what the steps have made meanwhile. But
        hivemind/optim/state_averager.py:step lets each of them wait for the round, and others not, where it was to be
        the other way round.

        :param step: what the step is to do
        """
        is_local = self.delta_rule_averaging and step.get("optimizer_step") and not step.get("averaging_round")
        if not (is_local and self.pending_updates):
            yield
            return
        self._module_access.wait_until_read(self.pending_updates)  # from then on, the round has what it averages
        under_way, self.pending_updates = self.pending_updates, set()
        try:
            yield
        finally:
            self.pending_updates |= under_way

    def _take_in_for(self, step: dict[str, Any]) -> None:
        """Take in what the module has changed itself, before a step or a round that writes over it.

        :param step: what the step is to do
        """
        averages = bool(step.get("averaging_round"))
        is_delayed = bool(step.get("delay_optimizer_step") or (averages and step.get("delay_averaging")))
        if averages:
            self._goes_on_meanwhile = is_delayed
        if self.offload_optimizer and (averages or step.get("optimizer_step")):
            if self.pending_updates:
                super().step(wait_for_delayed_updates=True)  # of which this one is to make its step
            self.take_in_changes(remember=is_delayed)

    def _raise_failure(self, only_waits: bool) -> None:
        """Raise what went wrong in a step.

        :param only_waits: whether there is nothing to do but to wait for the background, as in the end. It is then
          raised if it was not before; the end of the averager's process never is, for which a successor waits
        """
        if self._failure is None or self._is_held_back:
            return
        is_known = self._is_raised or isinstance(self._failure, ProcessEndedError)
        if not self._is_settled:
            self._settle(self._failure)
        if not (only_waits and is_known):
            self._is_raised = True
            raise self._failure

    def _settle(self, failure: BaseException) -> None:
        """Have the model and the epoch of the last step that was finished, and say in the error which one that is."""
        self._is_settled = True
        is_made = not (self._is_half_done or self._steps_to_come)
        self.local_epoch -= self._steps_to_come
        self._steps_to_come = 0
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()  # of a step that was finished before something else went wrong
        if sys.version_info >= (3, 11):
            failure.add_note(
                f"After the optimizer's step to epoch {self.local_epoch} of the swarm; the model has its result."
                if is_made
                else f"In the swarm's step to epoch {self.local_epoch + 1}; the model is as the step before left it."
            )

    @contextlib.contextmanager
    def failure_held_back(self) -> Iterator[None]:
        """Raise what goes wrong in the background meanwhile only when all else is done, such as ending processes."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        self._raise_failure(only_waits=True)

    # -- rounds before the step -----------------------------------------------------------------------------------

    @property
    def may_begin_early(self) -> bool:
        """Whether its rounds may begin before the step: beside the gradients, not those of large models."""
        return self._early.suits(self._numbers_exchanged)

    @property
    def costs_little_early(self) -> bool:
        """Whether its rounds cost next to nothing if they begin with their group, before the step, on any line."""
        return self._early.costs_little(self._numbers_exchanged)

    @property
    def _numbers_exchanged(self) -> float:
        """Numbers that a round averages: parameters, and what of the optimizer is averaged with them."""
        return float(self.total_size) + sum(extension.numbers for extension in self.extensions)

    @property
    def rounds_take_long(self) -> bool:
        """Whether its rounds took so long after the step of late that it is worth to hold them before."""
        return self._early.rounds_take_long

    @property
    def peers_step_differently(self) -> bool:
        """Whether peers that step with the same gradients are known to come to other parameters."""
        return self._early.peers_differ and type(self.allreduce_kwargs["compression"]) is NoCompression

    def be_ready_early(self) -> None:
        """Know what to exchange in a round that is about to be scheduled, and may begin as soon as it has a group."""
        if self._early.at_once:
            self._load_state()

    @property
    def has_begun_early(self) -> bool:
        """Whether a round was let begin early whose outcome the next step takes over."""
        return self._early.has_begun

    def exchange_early(self, control: Round, timeout: float) -> None:
        """Let a round begin with the state as it is now, unless it has begun; the next :meth:`step` waits for it.

        If its group does not agree, the step itself holds it, as if this had not been called.

        :param timeout: seconds that the step waits for its averages
        """
        if control.begins_early is None:
            self._load_state()
            control.await_beginning(self.begin_early(int(control.epoch)))
        self._early.expect(control, timeout)

    def _load_state(self) -> None:
        self.step(wait_for_delayed_updates=True)
        self.take_in_changes(remember=True)
        self._goes_on_meanwhile = True
        if self._averaged_buffers is not None:
            with self.get_tensors():
                self._averaged_buffers.load()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()

    def _conclude_early(self, step: dict[str, Any]) -> dict[str, Any]:
        """Take over a round that was let begin early.

        :param step: what a step is to do
        :returns: the same, without the round if it is over
        """
        if (pending := self._early.pop()) is None:
            return step
        control, timeout = pending
        if has_begun(control, timeout):
            self._take_over_early(control, timeout)
        elif step.get("averaging_round") and not control.done():
            self._early.note_in_vain()
            return step | {"averaging_control": control}
        else:
            control.cancel()
        return step | {"averaging_round": False, "averaging_control": None, "averaging_opts": None}

    def _take_over_early(self, control: Round, timeout: float) -> None:
        try:
            gathered = control.result(timeout)
            logger.log(self.status_loglevel, f"Averaged parameters with {len(gathered)} peers")
        except (Exception, concurrent.futures.CancelledError) as e:
            # as in a round after the step: whatever was averaged before it failed is taken over
            logger.log(self.status_loglevel, f"Averaging failed with {e!r}")
        else:
            self._early.note_difference(self._share_averaged())
        if not self.reuse_tensors:
            self._apply_averaging_results_()
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()

    @torch.no_grad()
    def _share_averaged(self) -> float:
        """By how much of their norm the averages differ from the model's parameters, which are not averaged yet.

        Of large models, by the first numbers of each tensor: a step that differs does so anywhere.
        """
        share = min(1.0, MOST_BESIDE_GRADIENTS / max(1, sum(one.numel() for one in self.main_parameters)))
        counts = [math.ceil(share * one.numel()) for one in self.main_parameters]
        of_each = zip(self.main_parameters, counts, strict=True)
        own = [one.detach().reshape(-1)[:count].cpu().float() for one, count in of_each]
        with self.get_tensors() as averaged:
            differences = [
                (one.reshape(-1)[:count].float() - mine).norm()
                for one, count, mine in zip(averaged, counts, own, strict=False)
            ]
        norm = torch.stack([one.norm() for one in own]).norm()
        return float(torch.stack(differences).norm() / norm.clamp_min(1e-30))

    # -- to and from the averaging buffers ------------------------------------------------------------------------

    def _apply_optimizer_parameters_(self) -> None:
        self._changes.hand_out(self._optimizer_parameters(), self.main_parameters, self.staging.copy)
        self._behind_model = None  # not before: whoever downloads meanwhile may undo half a step by what it holds

    def _load_local_tensors_into_averager_(self) -> None:
        with self.get_tensors() as buffers:
            self.staging.copy(list(self._local_tensors()), buffers)
            self._meanwhile.forget()
            if self._goes_on_meanwhile and not self.offload_optimizer and not self.delta_rule_averaging:
                self._meanwhile.give([buffers[number] for number in self._numbers_of_module()])
            if self.outer_rounds is not None:
                self.outer_rounds.load(buffers)
        self._module_access.note_read()

    def _numbers_of_module(self) -> list[int]:
        """Of the tensors that are averaged, those that the module may change: all but the optimizer's statistics."""
        behind = self._numbers_of_statistics().stop
        return [*range(len(self.main_parameters)), *range(behind, behind + len(self.extra_tensors))]

    def _numbers_of_statistics(self) -> range:
        """Of the tensors that are averaged, those of the optimizer."""
        count = len(self.main_parameters)
        return range(count, count * (1 + len(self.opt_keys_for_averaging)))

    def _apply_averaging_results_(self) -> None:
        if self.outer_rounds is not None:
            self._apply_outer_round(self.outer_rounds)
            return
        if self._failure is not None:
            return  # there are none: the buffers hold whatever was there before
        self._has_changed_meanwhile = False
        sent = self._old_tensors if self.delta_rule_averaging else None  # which computes in between
        if sent is not None:
            # replaces what hivemind/optim/state_averager.py does, after which a second moment may be negative
            statistics = self._numbers_of_statistics()
            with self.get_tensors() as averages:
                for number, (tensor, average) in enumerate(zip(self._local_tensors(), averages, strict=True)):
                    add_change(tensor, average, sent[number], is_statistic=number in statistics)
        else:
            self._apply_averages()
        if not self.delta_rule_averaging:
            self._same_as_buffers = None if self._has_changed_meanwhile else self._writes()

    def _apply_averages(self) -> None:
        numbers, tensors = self._numbers_of_module(), list(self._local_tensors())
        with self.get_tensors() as averages:
            averaged, own = ([some[number] for number in numbers] for some in (averages, tensors))
            written = {numbers[one] for one in self._meanwhile.take_back(averaged, own)}
            self._has_changed_meanwhile = bool(written)
            others = [number for number in range(len(tensors)) if number not in written]
            self.staging.copy([averages[number] for number in others], [tensors[number] for number in others])

    def _apply_outer_round(self, outer: OuterRounds) -> None:
        sent, self._old_tensors = self._old_tensors, None
        if self._failure is not None or not outer.has_outcome:
            outer.forget_round()
            return
        with self.get_tensors() as averages:
            outer.apply(averages, sent, list(self._local_tensors()), self.staging.copy, self._numbers_of_statistics())

    def step_outer_alone(self) -> None:
        """Step the outer optimizer, if there is one, as the only peer of the run."""
        if self.outer_rounds is not None:
            while self.pending_updates:  # of when others were there; each wait has a limit
                self.step(wait_for_delayed_updates=True)
            self._load_local_tensors_into_averager_()
            self.outer_rounds.note_alone(self.local_epoch)
            self._apply_averaging_results_()

    # -- the thread that makes the step -------------------------------------------------------------------------

    def _do(self, wait_for_trigger: Callable[[], Any] | None, optimizer_step: bool, *args: Any, **kwargs: Any) -> None:
        try:
            if optimizer_step:
                self._parameters_are_kept = self._keep_parameters()
            super()._do(wait_for_trigger, optimizer_step, *args, **kwargs)
        except BaseException:  # of what is no Exception hivemind tells nobody, and they would wait for ever
            self.finished_optimizer_step.set()
            self.finished_averaging_round.set()

    def _note(self, error: BaseException) -> None:
        """Keep what is to be raised, and have the parameters as they were before a step that was not finished."""
        if self._failure is not None:
            return
        try:
            with self.lock_optimizer:
                self._undo_half_a_step()
        except Exception as e:
            logger.error(f"The parameters could not be put back to what they were before the step that failed: {e!r}")
        self._failure = error

    def _begin_step(self, *args: Any) -> None:
        """A hook of the optimizer, which it calls before it changes anything."""
        self._is_half_done = True

    def _update_scheduler(self) -> None:
        self._steps_to_come, self._is_half_done = 0, False  # hivemind comes here when the optimizer has made its step
        super()._update_scheduler()

    def _keep_parameters(self) -> bool:
        """Have the parameters in the averaging buffers; whether they are there."""
        if self.offload_optimizer or self.reuse_tensors or self.finished_averaging_round.is_set():
            return False  # the model has them; or there are averages in the buffers that it does not have yet
        writes = self._writes()
        if writes != self._same_as_buffers:
            if not self._steps_to_come:
                return False
            with self.get_tensors() as buffers:
                self.staging.copy(self.main_parameters, buffers[: len(self.main_parameters)])  # statistics are behind
            self._same_as_buffers = writes
        return True

    @torch.no_grad()
    def _undo_half_a_step(self) -> None:
        """Put the parameters back, if a step has failed on its way; to be called with ``lock_optimizer`` held."""
        if not self._is_half_done:
            return
        if self.offload_optimizer:
            own = self._optimizer_parameters()
            with self.lock_averaged_tensors if self.reuse_tensors else contextlib.nullcontext():
                for parameter, before in zip(own, self._behind_model or self.main_parameters, strict=True):
                    parameter.copy_(before)
            self.forget_changes()
        elif self._parameters_are_kept:
            with self.get_tensors() as buffers:
                for main, buffer in zip(self.main_parameters, buffers, strict=False):
                    main.copy_(buffer)

    def _writes(self) -> list[int]:
        """How often each parameter was written to, as torch counts it."""
        return [parameter._version for parameter in self.main_parameters]

    # -- downloads ------------------------------------------------------------------------------------------------

    def numbers_in_state(self) -> float:
        _, statistics = dump_optimizer_state(self.optimizer)
        own = sum(one.numel() for one in (*self.main_parameters, *self.extra_tensors, *statistics))
        return own + sum(extension.numbers for extension in self.extensions)

    def get_current_state(self) -> tuple[Any, Any, Any]:
        # hivemind/optim/state_averager.py:get_current_state gives away the optimizer's own tensors, which change while
        # they are sent, under the number of an epoch whose step they may still lack
        if (piece := self.asked_piece()) is not None:
            return {}, (piece,), None
        # before the locks, for which the thread that trains waits: a process that is about to end may never answer
        self._group_bits = self._ask_for_group_bits()
        try:
            with self._module_access.reading() as kept, self.lock_optimizer:
                if kept is None:
                    self._undo_half_a_step()
                metadata, tensors, infos = super().get_current_state()
                state = ServedState(
                    {**metadata, "epoch": metadata["epoch"] - self._steps_to_come}, tuple(tensors), tuple(infos)
                )
                # those of an outer optimizer change between two steps of training
                with self.get_tensors() if self.outer_rounds is not None else contextlib.nullcontext():
                    for extension in self.extensions:
                        state = extension.serve(state)
                tensors = list(state.tensors)
                if kept is not None:
                    first = self._first_of_module
                    tensors[first : first + len(kept)] = kept
                return state.metadata, tuple(tensor.clone() for tensor in tensors), state.infos
        finally:
            self._group_bits = None

    def get_group_bits(self, wait: bool = True) -> Any:
        """As hivemind's; while the state is put together, those that were asked for before."""
        return super().get_group_bits(wait) if self._group_bits is None or not wait else self._group_bits

    def _ask_for_group_bits(self) -> str:
        """Those that its process has; none if it ends before it answers, and so sends nobody the state."""
        answer = super().get_group_bits(wait=False)
        while self.is_alive():
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError, ProcessEndedError):
                return str(answer.result(_LOOK_AGAIN))
        return ""

    def load_state_from_peers(self, **kwargs: Any) -> None:  # type: ignore[override]
        # hivemind/optim/state_averager.py:load_state_from_peers takes over the peer's learning rate, and then steps
        # the scheduler from there once for each epoch: ExponentialLR, for one, would decay twice
        scheduler, self.scheduler = self.scheduler, None
        settings = group_settings(self.optimizer)
        self.take_in_changes()  # all that the model has is in the optimizer then, and may be written over
        self.forget_changes()
        self._tails = None
        try:
            super().load_state_from_peers(**kwargs)
        finally:
            self.scheduler = scheduler
        self._take_tails()
        lay_out_like_parameters(self.optimizer)  # what was sent has no layout
        self.share_statistics()
        restore_switches(self.optimizer, settings)
        if scheduler is not None:
            restore_group_settings(self.optimizer, settings)
            try:
                self._update_scheduler()
            except Exception as e:  # raised by the next step: a download that fails would be repeated
                self._note(e)

    @torch.no_grad()
    def share_statistics(self) -> None:
        """Let an offloaded optimizer have its statistics where rounds average them.

        To be called when a state was loaded into it, which puts others in their place.
        """
        if not self.reuse_tensors:
            return
        parameters = self._optimizer_parameters()
        with self.lock_optimizer, self.get_tensors() as averaged:
            statistics = iter(averaged[len(parameters) :])
            for name in self.opt_keys_for_averaging:
                for parameter, shared in zip(parameters, statistics, strict=False):
                    own = self.optimizer.state[parameter][name]
                    if own is not shared:
                        shared.copy_(own)
                        self.optimizer.state[parameter][name] = shared

    def _take_tails(self) -> None:
        tails, self._tails = self._tails, None
        if tails is None:
            return
        with self.get_tensors():
            for extension in self.extensions:
                extension.take(tails.get(extension.name, Tail()))

    def _to_be_finite(self, loaded: Download) -> Sequence[torch.Tensor]:
        tensors, tails = split_tails(loaded.metadata, loaded.tensors)
        # of buffers, what is not finite is looked at when they are applied
        return [
            *tensors,
            *(one for name, tail in tails.items() if name != AveragedBuffers.name for one in tail.tensors),
        ]

    def _accept(self, loaded: Download) -> tuple[Any, Sequence[torch.Tensor]]:
        # hivemind/optim/state_averager.py:load_optimizer_state checks nothing: with a scheduler at one peer and none
        # at the other, each number lands in the place of another one
        tensors, tails = split_tails(loaded.metadata, loaded.tensors)
        if isinstance(loaded.epoch, int) and loaded.epoch >= self.local_epoch:  # else hivemind refuses the state
            self._tails = dict(tails)
        mismatch = state_mismatch(self.optimizer, self.extra_tensors, loaded.metadata, tensors)
        if mismatch is not None:
            raise SwarmError(
                f"the state of the swarm does not fit this peer: {mismatch}. All peers need the same model, optimizer "
                "and parameter groups, and either all or none of them a scheduler"
            )
        self.states_taken += 1
        return loaded.metadata, tensors

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any) -> Any:
        return await self.exchange_with_group(super()._aggregate_with_group, group_info, min_vector_size, **kwargs)
