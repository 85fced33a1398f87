"""The averager of parameters and optimizer statistics, which changes nothing but what it is asked to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hivemind.optim.state_averager import TrainingStateAverager as _TrainingStateAverager
from hivemind.optim.state_averager import dump_optimizer_state
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from hivenb.engine.averaging.averager import AveragerBase
from hivenb.engine.averaging.extensions.buffers import DownloadsBuffers, ModuleBuffers
from hivenb.engine.averaging.extensions.early_state import AveragesStateEarly
from hivenb.engine.averaging.extensions.outer_optimizer import AveragesPseudoGradients, OuterStateApart
from hivenb.engine.averaging.lent_module import LentModule
from hivenb.engine.averaging.module_rest import PIECE, ModuleRest, RestEntry
from hivenb.engine.averaging.staging import StagesState
from hivenb.engine.averaging.state_download import DownloadsStates, ranked_sources
from hivenb.engine.averaging.torch_state import (
    group_settings,
    initialize_optimizer_state,
    initialized_by,
    lay_out_like_parameters,
    restore_group_settings,
    restore_switches,
    state_mismatch,
)
from hivenb.engine.exchange.all_reduce import FaultTolerantAllReduce, PartsCutAlike
from hivenb.engine.network.values import raw, sequence, text, whole
from hivenb.errors import ProcessEndedError, SwarmError

# -- step failure ----------------------------------------------------------------------------------------------------
#
# Errors of the user's own optimizer, hooks and schedulers, which end the training instead of being logged.


logger = get_logger(__name__)


class FailsWithItsSteps(StagesState):
    """Mixin to put *before* hivemind's state averager: what goes wrong in a step is raised where training goes on.

    ``hivemind/optim/state_averager.py:_do`` logs it, and lets training go on with whatever is in the averaging buffers.

    A round of averaging that fails is no such error: it is missed. The parameters are then those of the last step that
    the optimizer has finished: an offloaded optimizer works on copies, of which only finished steps get into the model;
    otherwise the averaging buffers keep the parameters while a step is made, which costs no memory and, where the round
    before has left them there, no time. With local updates, a step for each batch, what a step has half done stays.
    """

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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parameters_are_kept = False
        self.finished_optimizer_step = _Finished(self._note)
        self.finished_averaging_round = _Finished(self._note)

    # -- the thread that trains ---------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As hivemind's.

        :raises Exception: what went wrong in this step, or in an earlier one that was made in the background
        """
        only_waits = {name for name, value in kwargs.items() if value} == {"wait_for_delayed_updates"}
        output = None
        if self._failure is None:
            if kwargs.get("increment_epoch") and kwargs.get("optimizer_step"):
                self._steps_to_come = 1
            output = super().step(*args, **kwargs)
        elif only_waits:
            super().step(*args, **{**kwargs, "apply_delayed_updates": False})
        self._raise_failure(only_waits)
        return output

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

    def _apply_averaging_results_(self) -> None:
        if self._failure is not None:
            return  # there are none: the buffers hold whatever was there before
        super()._apply_averaging_results_()
        if not self.delta_rule_averaging:
            self._same_as_buffers = None if self._has_changed_meanwhile else self._writes()

    def _keep_parameters(self) -> bool:
        """Have the parameters in the averaging buffers; whether they are there."""
        if self.offload_optimizer or self.reuse_tensors or self.finished_averaging_round.is_set():
            return False  # the model has them; or there are averages in the buffers that it does not have yet
        writes = self._writes()
        if writes != self._same_as_buffers:
            if not self._steps_to_come:
                return False
            with self.get_tensors() as buffers:
                self.copy_staged(self.main_parameters, buffers[: len(self.main_parameters)])  # statistics are behind
            self._same_as_buffers = writes
        return True

    @torch.no_grad()
    def _undo_half_a_step(self) -> None:
        """Put the parameters back, if a step has failed on its way; to be called with ``lock_optimizer`` held."""
        if not self._is_half_done:
            return
        if self.offload_optimizer:
            own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            with self.lock_averaged_tensors if self.reuse_tensors else contextlib.nullcontext():
                for parameter, main in zip(own, self.main_parameters, strict=True):
                    parameter.copy_(main)
            self.forget_changes()
        elif self._parameters_are_kept:
            with self.get_tensors() as buffers:
                for main, buffer in zip(self.main_parameters, buffers, strict=False):
                    main.copy_(buffer)

    def _writes(self) -> list[int]:
        """How often each parameter was written to, as torch counts it."""
        return [parameter._version for parameter in self.main_parameters]


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


# -- state averager --------------------------------------------------------------------------------------------------


#: Seconds within which some peer has to send what no round averages, and each piece of it.
REST_WITHIN, PIECE_WITHIN = 60.0, 15.0

_ASK_AGAIN = 0.3

#: Seconds between two looks whether a process that has not answered is still there.
_LOOK_AGAIN = 0.1


class _CheckedDownload(AveragerBase):
    """Base to put *behind* hivemind's state averager: a state of another structure is an error."""

    optimizer: torch.optim.Optimizer
    extra_tensors: Any
    main_parameters: Any
    module_buffers: ModuleBuffers | None
    #: states that were taken over
    states_taken = 0

    def numbers_in_state(self) -> float:
        _, statistics = dump_optimizer_state(self.optimizer)
        buffers = 0 if self.module_buffers is None else self.module_buffers.numbers
        return buffers + sum(one.numel() for one in (*self.main_parameters, *self.extra_tensors, *statistics))

    def load_state_from_peers(self, *args: Any, **kwargs: Any) -> Any:
        # hivemind/optim/state_averager.py:load_optimizer_state checks nothing: with a scheduler at one peer and none
        # at the other, each number lands in the place of another one
        loaded = super().load_state_from_peers(*args, **kwargs)
        mismatch = None if loaded is None else state_mismatch(self.optimizer, self.extra_tensors, *loaded)
        if mismatch is not None:
            raise SwarmError(
                f"the state of the swarm does not fit this peer: {mismatch}. All peers need the same model, optimizer "
                "and parameter groups, and either all or none of them a scheduler"
            )
        self.states_taken += loaded is not None
        return loaded


class TrainingStateAverager(
    AveragesPseudoGradients,
    AveragesStateEarly,
    FailsWithItsSteps,
    StagesState,
    FaultTolerantAllReduce,
    PartsCutAlike,
    _TrainingStateAverager,
    _CheckedDownload,
    OuterStateApart,
    DownloadsBuffers,
    DownloadsStates,
):
    """``hivemind.TrainingStateAverager`` that can be created on any thread and leaves the parameters as they are."""

    title = "the averager of the state"

    _is_step_left_out = False
    _group_bits: str | None = None
    _rest_sources: Sequence[bytes] = ()

    def __init__(self, *args: Any, module_rest: ModuleRest | None = None, **kwargs: Any):
        self._lent, self.module_rest = LentModule(), module_rest
        # for both processes: which of these tensors another peer asks for, and from which byte on; -1 for the state
        self._asked = torch.full((2,), -1, dtype=torch.int64).share_memory_()
        super().__init__(*args, **kwargs)

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

    @property
    def is_in_a_step(self) -> bool:
        """Whether the optimizer is in the middle of a step, or was when that failed."""
        return self._is_half_done

    @property
    def epoch_of_parameters(self) -> int:
        """The epoch of the swarm whose step the parameters have; in the background, it may be still to come."""
        return self.local_epoch - self._steps_to_come

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

    # -- the module in others' hands ------------------------------------------------------------------------------

    def lend_module(self, keep: bool = False) -> None:
        """Let callbacks have the module until :meth:`take_module_back`, and put into it what they like.

        What is under way in the background has read it when this returns, and nobody else does: downloads wait.

        :param keep: copy what was trained into main memory, to be downloaded meanwhile; for what may take long
        """
        if not self._reads_module:
            return
        self._lent.wait_until_read([] if self.reuse_tensors else list(self.pending_updates))
        if keep:
            if self.module_buffers is not None:
                self.module_buffers.keep()
            parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
            self._lent.keep([*parameters, *self.extra_tensors][self._first_of_module :])
        self._lent.lend()

    def take_module_back(self) -> None:
        """The module is as training has left it."""
        if self._reads_module:
            self._lent.take_back()
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

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("averaging_round"):
            self._lent.expect_read()
        return super().step(*args, **kwargs)

    def _load_local_tensors_into_averager_(self) -> None:
        super()._load_local_tensors_into_averager_()
        self._lent.note_read()

    def let_go_of_optimizer(self) -> None:
        """Take the hooks off the torch optimizer, which another averager is to go on with."""
        self._lent.end()
        for hook in self._hooks:
            hook.remove()

    def step_by_itself(self) -> None:
        """Let the torch optimizer make a step with what the model has in its gradients, which belongs to no epoch.

        To be called while nothing is under way in the background.
        """
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._left_out = []
        for main, parameter in zip(self.main_parameters, parameters, strict=True):
            is_frozen = not main.requires_grad and not (parameter.grad is not None and parameter.grad.any())
            if self._is_step_left_out or is_frozen:
                self._left_out.append((parameter, parameter.grad))
                parameter.grad = None
        self._is_step_left_out = False

    def _put_gradients_back(self, *args: Any) -> None:
        for parameter, gradient in self._left_out:
            parameter.grad = gradient

    def get_current_state(self) -> tuple[Any, Any, Any]:
        # hivemind/optim/state_averager.py:get_current_state gives away the optimizer's own tensors, which change while
        # they are sent, under the number of an epoch whose step they may still lack
        number, start = self._asked.tolist()
        if number >= 0 and self.module_rest is not None:
            return {}, (self.module_rest.piece(number, start),), None
        # before the locks, for which the thread that trains waits: a process that is about to end may never answer
        self._group_bits = self._ask_for_group_bits()
        try:
            with self._lent.reading() as kept, self.lock_optimizer:
                if kept is None:
                    self._undo_half_a_step()
                metadata, tensors, infos = super().get_current_state()
                metadata["epoch"] -= self._steps_to_come
                if kept is not None:
                    first = self._first_of_module
                    tensors = [*tensors[:first], *kept, *tensors[first + len(kept) :]]
                return metadata, tuple(tensor.clone() for tensor in tensors), infos
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

    # -- what no round averages -----------------------------------------------------------------------------------

    def download_rest(self, wanted: Mapping[int, RestEntry]) -> None:
        """Take over from another peer what of the module no round averages.

        :param wanted: by its numbers here, what another peer has said of it
        :raises SwarmError: if no peer sends it within a minute
        """
        for number, theirs in wanted.items():
            deadline, attempt = time.monotonic() + REST_WITHIN, 0
            while not self._download_of_rest(number, theirs, attempt):
                if time.monotonic() > deadline:
                    raise SwarmError(
                        f"no peer of the swarm sends its {theirs.name}, which stays out of the optimizer and differs "
                        "from this peer's. Do all of them run in client mode, or have they left?"
                    )
                attempt += 1
                time.sleep(_ASK_AGAIN)

    def _download_of_rest(self, number: int, theirs: RestEntry, attempt: int) -> bool:
        assert self.module_rest is not None
        pieces = []
        for start in range(0, theirs.nbytes, PIECE):
            answer: MPFuture[torch.Tensor | None] = MPFuture()
            self._outer_pipe.send(("_fetch_of_rest", [theirs.name, start, attempt], {"answer": answer}))
            piece = answer.result(2 * PIECE_WITHIN)
            if piece is None or len(piece) != min(PIECE, theirs.nbytes - start):
                return False
            pieces.append(piece.clone())
        return self.module_rest.take_over(number, theirs, torch.cat(pieces))

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _fetch_of_rest(self, name: str, start: int, attempt: int, answer: Any) -> None:
        piece = None
        try:
            if start == 0:
                key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
                found = await self.dht.get(key, latest=True, return_future=True)
                entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
                own = self.peer_id.to_bytes()
                self._rest_sources = [one for one in ranked_sources(entries, math.inf) if one != own]
            if sources := self._rest_sources:
                stub = self.get_stub(self._p2p, PeerID(sources[attempt % len(sources)]), namespace=self.prefix)
                request = averaging_pb2.DownloadData(metadata=self.serializer.dumps([name, start]))
                told = await stub.rpc_tell_rest(request, timeout=PIECE_WITHIN)
                piece = torch.frombuffer(bytearray(raw(told.metadata, PIECE, least=1)), dtype=torch.uint8)
        except Exception as e:  # another one may have it, or this one a moment later
            logger.debug(f"{name} was not sent: {e!r}")
        finally:
            answer.set_result(piece)

    async def rpc_tell_rest(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Send another peer a piece of what no round averages."""
        name, start = sequence(self.serializer.loads(raw(request.metadata, 4096)), 2, least=2)
        rest = self.module_rest
        number = None if rest is None else rest.number_of(text(name, 2048))
        if rest is None or number is None or not self.allow_state_sharing:
            raise ValueError("this peer does not share it")
        whole(start, 0, rest.sizes[number] - 1)
        _, (piece,), _ = await self._ask_host(number, start)
        return averaging_pb2.DownloadData(metadata=piece.numpy().tobytes())

    async def _get_current_state_from_host_process(self) -> Any:
        return await self._ask_host(-1, -1)

    async def _ask_host(self, number: int, start: int) -> Any:
        """Have the process that trains copy something, one thing at a time: it is told what by way of memory."""
        async with self.__dict__.setdefault("_asking_host", asyncio.Lock()):
            self._asked.copy_(torch.tensor([number, start]))
            try:
                return await super()._get_current_state_from_host_process()
            finally:
                self._asked.fill_(-1)

    # -- in the process that trains -----------------------------------------------------------------------------

    def load_state_from_peers(self, **kwargs: Any) -> None:  # type: ignore[override]
        # hivemind/optim/state_averager.py:load_state_from_peers takes over the peer's learning rate, and then steps
        # the scheduler from there once for each epoch: ExponentialLR, for one, would decay twice
        scheduler, self.scheduler = self.scheduler, None
        settings = group_settings(self.optimizer)
        self.take_in_changes()  # all that the model has is in the optimizer then, and may be written over
        self.forget_changes()
        try:
            super().load_state_from_peers(**kwargs)
        finally:
            self.scheduler = scheduler
        lay_out_like_parameters(self.optimizer)  # what was sent has no layout
        restore_switches(self.optimizer, settings)
        if scheduler is not None:
            restore_group_settings(self.optimizer, settings)
            try:
                self._update_scheduler()
            except Exception as e:  # raised by the next step: a download that fails would be repeated
                self._note(e)
