"""What each averager of ours is: born on any thread, met by plain hivemind's, and waiting for nobody who has left.

What joins its rounds and downloads is a list of extensions (`hivenb.engine.averaging.extensions.extension`); what it
knows of those with whom it exchanges is a part (`hivenb.engine.exchange.all_reduce`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase, StubBase
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import averaging_pb2, p2pd_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import achain, as_aiter
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.averaging.extensions.extension import Exchange, Extension, GroupRecords
from hivenb.engine.averaging.round import Round
from hivenb.engine.averaging.staging import Staging
from hivenb.engine.exchange import codecs
from hivenb.engine.exchange.all_reduce import GroupExchange, PartCodec, RoundTerms
from hivenb.engine.exchange.part_messages import PartMessage
from hivenb.engine.exchange.runner import FaultTolerantRunner
from hivenb.engine.matchmaking import matchmaking
from hivenb.engine.matchmaking.group_records import FAR, marked, of_upstream
from hivenb.engine.matchmaking.matchmaking import EpochMatchmaking, ExpectedPeers
from hivenb.engine.network.daemon import limit_for, remove_socket
from hivenb.engine.network.dht import ending_with
from hivenb.engine.network.streams import (
    CLOSED_WITHIN,
    download_state,
    left_open,
)
from hivenb.engine.network.untrusted_values import bound_this_process
from hivenb.engine.process.freed_memory import give_back_regularly
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.process.watched_child import WatchedProcess, shut_down_on_error
from hivenb.engine.trust.aggregation import NORM_BOUND, Gathered, SampleReports
from hivenb.engine.trust.reliability import RoundReport, RoundReportPipe
from hivenb.errors import ProcessEndedError

# -- kept tasks ------------------------------------------------------------------------------------------------------
#
# Tasks of an averager's loop: held until they are done, and no complaint of those that ended as they should.


def complain_unless_ended(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Of an error that nobody else has seen.

    Before Python 3.12, asyncio/streams.py takes a request that is cancelled for such an error; and
    hivemind/p2p/p2p_daemon.py does not look at the end of a stream that comes while the answer to it ends.
    """
    if not isinstance(context.get("exception"), (asyncio.CancelledError, asyncio.IncompleteReadError)):
        loop.default_exception_handler(context)


def keep_tasks_alive() -> None:
    """Let the running loop hold each of its tasks until it is done, and complain of no end; may be called again.

    asyncio holds them weakly, and hivemind/averaging/averager.py:_run_internal only the newest one. A round that has
    met its peers and waits for its trigger, or a peer's request that waits for that round, would be collected as
    garbage: the peer then waits for averaging_timeout, and the others for a peer that has never really left.
    """
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_make_kept_task)
    loop.set_exception_handler(complain_unless_ended)


_background_tasks: set[asyncio.Task[Any]] = set()


def _make_kept_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **kwargs)
    _background_tasks.add(task)
    task.add_done_callback(_background_tasks.discard)
    return task


logger = get_logger(__name__)


# -- stale handlers --------------------------------------------------------------------------------------------------
#
# What an averager leaves behind when it is killed: handlers in libp2p's daemon in the place of its successor's.


#: Seconds that the daemon is given.
_ANSWER_TIMEOUT = 2.0


class DaemonLink:
    """Where an averager's process and the daemon listen to each other; its parent knows it, too.

    The parent speaks to the daemon itself: that of the DHT may wait for what the averager has held when it was killed.
    """

    def __init__(self) -> None:
        self._addresses = RawArray(ctypes.c_char, 512)

    def note(self, p2p: P2P) -> None:
        """Begin to listen; to be called in the averager's process."""
        self._addresses.value = f"{p2p.daemon_listen_maddr} {p2p._client_listen_maddr}".encode()

    def forget(self, names: Sequence[str]) -> None:
        """Let the daemon forget the handlers of a process that has ended; without effect if it does not answer.

        :param names: of the handlers
        """
        daemon, _, own = self._addresses.value.decode().partition(" ")
        if own:  # a client has none
            # in a thread of its own, since a notebook's main thread runs a loop already
            forgetting = BackgroundThread(
                target=lambda: asyncio.run(_forget_each(daemon, own, names)), name="forget-handlers"
            )
            forgetting.start()
            forgetting.join(_ANSWER_TIMEOUT)

    def remove_socket(self) -> None:
        """Remove what a process that was killed has left in the file system."""
        remove_socket(self._addresses.value.decode().partition(" ")[2])


async def _forget_each(daemon: str, address: str, names: Sequence[str]) -> None:
    for name in names:  # one by one: the daemon stops at the first that it does not know
        try:
            await _forget(daemon, address, name)
        except Exception as e:  # there is none, or the daemon has ended as well, and a new one knows nothing of them
            logger.debug(f"The daemon could not be told that {name} is gone: {e!r}")


async def _forget(daemon: str, address: str, name: str) -> None:
    # as hivemind/p2p/p2p_daemon_bindings/control.py:remove_stream_handler, which can only remove its own
    reader, writer = await DaemonConnector(Multiaddr(daemon)).open_connection()
    removed = p2pd_pb2.RemoveStreamHandlerRequest(addr=Multiaddr(address).to_bytes(), proto=[name])
    await write_pbmsg(
        writer, p2pd_pb2.Request(type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER, removeStreamHandler=removed)
    )
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    writer.close()
    await writer.wait_closed()
    raise_if_failed(response)


# -- averager --------------------------------------------------------------------------------------------------------


#: Looks at the swarm in a row that find nobody else before a search for a group is given up; one may miss a record.
ALONE_AFTER = 2

#: Share of ``shutdown_timeout`` for which an averager that is to end gives others what they still are to have of it.
SHARE_OF_OTHERS = 0.8

#: Seconds that others of a group are given to learn that this peer has left it, where it waits for that.
TOLD_WITHIN = 3.0

#: Seconds that an averager's process may take to change its settings, or to begin to look for a group.
ANSWER_TIMEOUT = 10.0


class Averager(WatchedProcess, DecentralizedAverager):
    """Base to put *behind* a class of hivemind's averagers: what creating one, and waiting for it, should be like.

    Behind, because hivemind's classes reach :meth:`step` through ``super()``.
    """

    title = "the averager of gradients"

    #: of the tensors that hivemind gives none
    role = TensorRole.UNSPECIFIED

    #: whether a peer weighs as many samples as it has put into a round; or 1
    weights_are_samples = True

    #: what joins its rounds and downloads
    extensions: tuple[Extension, ...] = ()

    _rounds: weakref.WeakSet[Round]

    #: the tracker looks at the rounds while the thread that trains adds one
    _lock_rounds = threading.Lock()

    #: the rule by which what is finite is averaged; set in front of hivemind's classes, which do not know of it
    robust_aggregation = NORM_BOUND

    def __init__(self, *args: Any, **kwargs: Any):
        #: copies to and from the averaging buffers, beside computing
        self.staging = Staging()
        self._rounds = weakref.WeakSet()
        self._expected: ExpectedPeers | None = None
        self._seen_alone = 0
        self._retired = self._is_asked_to_end = False
        #: whether the user has chosen ``target_group_size``, so that a large swarm averages in several groups
        self.group_size_is_fixed = kwargs.get("target_group_size") is not None
        self._round_reports = RoundReportPipe()
        self._daemon_link = DaemonLink()
        # in its own process
        self._exchange = GroupExchange()
        self._terms = RoundTerms(are_of_ours=False, has_helper=False)
        self._is_far = False
        super().__init__(*args, **kwargs)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # Replaces hivemind/averaging/averager.py:DecentralizedAverager.run_in_background, which sets SIGINT to be
        # ignored in the caller: an error off the main thread, and the end of the interrupt button on it.
        self.start()
        if await_ready:
            with shut_down_on_error(self):
                self.wait_until_ready(timeout)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # hivemind/p2p/servicer.py makes the class's name a part of the name of each RPC, and peers of plain
        # hivemind know the names of hivemind's own classes only.
        upstream = next(base for base in cls.__mro__ if base.__module__.startswith("hivemind."))
        return ServicerBase._get_handle_name.__func__(upstream, namespace, method_name)

    @classmethod
    def _collect_rpc_handlers(cls) -> None:
        # hivemind/p2p/servicer.py keeps what it has found of a class, and lets each subclass call by that one's name
        if "_rpc_handlers" not in vars(cls):
            cls._rpc_handlers = None
        super()._collect_rpc_handlers()

    def run(self) -> None:
        bound_this_process()  # what others say ends no process
        codecs.install()  # a peer without one decodes others' messages, too
        give_back_regularly()
        super().run()

    # -- in the process that trains -----------------------------------------------------------------------------

    def start(self) -> None:
        with ending_with(self.dht, self):
            super().start()

    def step(self, gather: Any = None, *, wait: bool = True, **kwargs: Any) -> Any:
        if self.mode is not AveragingMode.AUX:
            for extension in self.extensions:
                if (weight := extension.weight(gather or 0)) is not None:
                    kwargs["weight"] = weight
        control = Round.of(super().step(gather, wait=False, **kwargs), gather)
        with self._lock_rounds:
            self._rounds.add(control)
        if self._retired:
            control.desert()
        return control.result() if wait else control

    @property
    def has_retired(self) -> bool:
        """Whether it takes part in no rounds any more."""
        return self._retired

    def retire(self) -> None:
        """Give up the rounds that still look for a group, and all later ones, so that nobody waits for them.

        A round whose peers are exchanging data already comes to its end. May be called from any thread.
        """
        self._retired = True
        for control in self._known_rounds():
            if control.stage is not AveragingStage.RUNNING_ALLREDUCE:
                control.desert()

    def ask_to_end(self) -> None:
        """Let the process begin to end, for which :meth:`shutdown` waits: several then end beside each other."""
        if self._is_asked_to_end:
            return
        self._retired = self._is_dismissed = True
        for control in self._known_rounds():
            control.desert()  # hivemind would begin it anew, until the process is ended by force
        if self.ended is None:
            with contextlib.suppress(OSError):  # it was killed just now
                self._outer_pipe.send(("_shutdown", [self.shutdown_timeout], {}))
            self._inner_pipe.send(("_SHUTDOWN", None))  # ends hivemind's thread that copies the state for it
        self._is_asked_to_end = True

    def shutdown(self) -> None:
        # Replaces hivemind/averaging/averager.py:shutdown, which asks and waits at once
        self.ask_to_end()
        if self.ended is None:
            if self._popen is not None or self.is_alive():  # else it was never started
                self.join(self.shutdown_timeout)
            if self.is_alive():
                logger.warning(f"{self.title} did not end within {self.shutdown_timeout} s, and is ended by force")
                self.terminate()
            self._daemon_link.forget(self._handler_names())  # it may have ended by force, or before it was asked to
        self._remove_parameter_hooks()
        self.staging.close()

    def _remove_parameter_hooks(self) -> None:
        """Called at shutdown: remove the hooks that it has put on parameters."""

    def _has_ended(self, error: ProcessEndedError) -> None:
        self._daemon_link.forget(self._handler_names())  # before anybody knows, and starts another one
        super()._has_ended(error)

    def _conclude(self, error: ProcessEndedError, locks: Iterable[Any] = ()) -> None:
        super()._conclude(error, (*locks, self.lock_averaged_tensors))
        self._inner_pipe.send(("_SHUTDOWN", None))  # ends hivemind's thread that copies the state for it
        self._daemon_link.remove_socket()

    def _handler_names(self) -> list[str]:
        self._collect_rpc_handlers()
        return [self._get_handle_name(self.prefix, one.method_name) for one in self._rpc_handlers or ()]

    def __del__(self) -> None:
        if hasattr(self, "_parent_pid"):  # else the constructor has failed, and hivemind's method would print that
            super().__del__()

    def expect_peers(self, peers: ExpectedPeers) -> None:
        """Let a group be complete as soon as these have met, instead of after ``matchmaking_time``.

        A ``target_group_size`` of the user's own choice stays as it is. Nothing is expected from those that have gone.
        """
        # a look that finds nobody at all may have failed
        if peers != self._expected and (peers.present or peers.gone or peers.excluded):
            self._expected = peers
            self._outer_pipe.send(("_expect_peers", [peers], {}))
        self._seen_alone = 0 if peers.present else self._seen_alone + 1
        if self._seen_alone >= ALONE_AFTER:
            may_come = peers.excluded - peers.gone  # after all, until the round is due
            for search in self._searches():
                if search.triggered or search.is_due or not may_come:
                    search.desert()

    def note_reports(self, reports: SampleReports) -> None:
        """Let senders count for no more than this. On any thread."""
        self._outer_pipe.send(("_note_reports", [reports], {}))

    def note_line(self, is_long: bool) -> None:
        """Let groups know, from the next search on, whether this peer's line to the others is long. On any thread."""
        self._outer_pipe.send(("_note_line", [is_long], {}))

    def take_round_reports(self) -> list[RoundReport]:
        """What the others did in its rounds, since the last call. For one thread."""
        return self._round_reports.take()

    def give_up_searches(self, before: float = math.inf) -> bool:
        """Cancel the rounds that look for a group, all those of epochs before one; whether there were any.

        hivemind would look until their timeout, whether everybody else has left or is at another epoch by now.
        """
        searches = self._searches(before)
        for search in searches:
            search.cancel()
        return bool(searches)

    def give_up_if_alone(self, epoch: float) -> None:
        """Cancel the search for the group of an epoch's round unless this peer has met somebody, or asks somebody."""
        if any(search.epoch == epoch for search in self._searches()):
            self._outer_pipe.send(("_give_up_if_alone", [epoch], {}))

    def is_alone(self, epoch: float) -> bool:
        """Whether it looks for a group for the round of an epoch, and has met nobody, as far as its process answers."""
        answer: MPFuture[bool] = MPFuture()
        self._outer_pipe.send(("_tell_whether_alone", [epoch], {"answer": answer}))
        try:
            return answer.result(ANSWER_TIMEOUT)
        except (TimeoutError, concurrent.futures.TimeoutError, ProcessEndedError):
            return False

    def begin_early(self, epoch: int) -> MPFuture[bool]:
        """Let the round of an epoch begin without its trigger, as soon as it has a group, if all in that offer it.

        :returns: whether it does; not set if it was over already
        """
        answer: MPFuture[bool] = MPFuture()
        self._outer_pipe.send(("_begin_early", [epoch], {"answer": answer}))
        return answer

    def _searches(self, before: float = math.inf) -> list[Round]:
        return [
            one for one in self._known_rounds() if one.stage is AveragingStage.LOOKING_FOR_GROUP and one.epoch < before
        ]

    def _known_rounds(self) -> list[Round]:
        with self._lock_rounds:
            return list(self._rounds)

    def set_live(self, *, attributes: dict[str, Any], matchmaking: dict[str, Any], allreduce: dict[str, Any]) -> None:
        """Change settings here and in the averager's own process, from the next round on.

        :param attributes: of the averager
        :param matchmaking: attributes of its matchmaking
        :param allreduce: arguments of its rounds, such as the codec
        :raises TimeoutError: if that process does not answer
        """
        for name, value in attributes.items():
            setattr(self, name, value)
        self.matchmaking_kwargs.update(matchmaking)
        self.allreduce_kwargs.update(allreduce)
        done: MPFuture[None] = MPFuture()
        self._outer_pipe.send(("_set_live", [attributes, matchmaking, allreduce], {"done": done}))
        done.result(ANSWER_TIMEOUT)

    # -- in the averager's own process --------------------------------------------------------------------------

    @property
    def _matchmaking(self) -> EpochMatchmaking:
        return self._own_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, made: Matchmaking) -> None:
        keep_tasks_alive()  # a client has no handlers
        # hivemind/averaging/averager.py:_run_internal knows its own class only; what it has made is at rest still
        self._own_matchmaking = EpochMatchmaking(
            self._p2p, self.schema_hash, self.dht, client_mode=self.client_mode, **self.matchmaking_kwargs
        )
        self._own_matchmaking.tell = self._round_reports.tell
        self._p2p.longest_message = limit_for(self.allreduce_kwargs.get("part_size_bytes"))

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, **kwargs: Any) -> None:
        keep_tasks_alive()
        self._daemon_link.note(p2p)
        await super().add_p2p_handlers(p2p, *args, **kwargs)

    async def _expect_peers(self, peers: ExpectedPeers) -> None:
        await self._matchmaking.expect(peers)

    async def _note_reports(self, reports: SampleReports) -> None:
        self._exchange.note_reports(reports)

    async def _note_line(self, is_long: bool) -> None:
        self._is_far = is_long

    async def _tell_whether_alone(self, epoch: float, answer: Any) -> None:
        answer.set_result(self._matchmaking.is_alone(epoch))

    async def _give_up_if_alone(self, epoch: float) -> None:
        self._matchmaking.give_up_if_alone(epoch)

    async def _begin_early(self, epoch: int, answer: Any) -> None:
        self._matchmaking.let_begin_early(epoch, answer)

    async def _set_live(
        self, attributes: dict[str, Any], matchmaking: dict[str, Any], allreduce: dict[str, Any], done: Any
    ) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)
        self.allreduce_kwargs.update(allreduce)
        self._p2p.longest_message = limit_for(self.allreduce_kwargs.get("part_size_bytes"))
        for name, value in matchmaking.items():
            setattr(self._matchmaking, name, value)
            setattr(self._matchmaking.potential_leaders, name, value)
        done.set_result(None)

    async def _shutdown(self, timeout: float | None) -> None:
        # hivemind/averaging/averager.py:_shutdown takes the future of a group that is at work for the group
        groups = [group for group in self._running_groups.values() if group.done() and not group.cancelled()]
        self._running_groups.clear()
        for group in groups:
            group.result().finalize(cancel=True)
        await self._exchange.end(None if timeout is None else SHARE_OF_OTHERS * timeout)
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

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> StubBase:
        stub = super().get_stub(p2p, peer, namespace=namespace)
        stub.rpc_download_state = partial(download_state, stub.rpc_download_state)
        return stub

    # -- rounds, in the averager's own process -------------------------------------------------------------------

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        fields = [field for extension in self.extensions for field in extension.fields()]
        fields += [FAR] if self._is_far and not self._exchange.takes_long else []
        step._data_for_gather = marked(step.data_for_gather, fields, self._exchange.megabits)
        try:
            try:
                await super()._step(step=step, future_for_init=future_for_init)
            finally:
                await self._tell_who_waits(step)
        except Exception as e:
            # whoever asked for the round has the error in its future; here it would only be printed by asyncio
            logger.debug(f"A round of averaging ended with {e!r}")

    async def _tell_who_waits(self, step: StepControl) -> None:
        """Tell the others of a round that has met, and that this peer takes no part in, that it does not."""
        left = await self._matchmaking.leave(step)
        telling = [asyncio.create_task(self._decline(one.group_id, peer)) for one in left for peer in one.peer_ids]
        for task in telling:
            self._exchange.note_ending(task)
        if telling:
            await asyncio.wait(telling, timeout=TOLD_WITHIN)

    async def _decline(self, group_id: bytes, peer: PeerID) -> None:
        """Tell a peer that this one does not average with a group that it was in, so that nobody waits for its data.

        hivemind's peers understand that, too.
        """
        if peer == self.peer_id:
            return
        message = averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, group_id=group_id)
        try:
            stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
            async for _ in await stub.rpc_aggregate_part(as_aiter(message)):
                break
        except matchmaking.UNREACHABLE as e:
            logger.debug(f"{peer} could not be told that this peer has left a group: {e!r}")

    async def exchange_with_group(
        self, aggregate: Callable[..., Awaitable[Any]], group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> Gathered:
        """Average with a group, as all classes of ours do in place of hivemind's ``_aggregate_with_group``.

        In *their* place, in front of hivemind's classes, of which some exchange in several phases.

        :param aggregate: hivemind's method
        :returns: what the peers that have taken part say of themselves
        """
        if self.mode is not AveragingMode.AUX and (step := self._matchmaking.to_be_left(group_info)) is not None:
            self._take_back(group_info)
            await self._tell_who_waits(step)  # before this peer may end
            MPFuture.cancel(step)
            raise asyncio.CancelledError
        met, group_info = group_info, self._matchmaking.without_those_who_left(group_info)
        with self._running_instead(met, group_info):
            self._matchmaking.begin(met.group_id)
            return await self._exchange_with(aggregate, group_info, min_vector_size, **kwargs)

    @contextlib.contextmanager
    def _running_instead(self, met: GroupInfo, left: GroupInfo) -> Iterator[None]:
        """Let what is left of a group be the one that exchanges.

        :param met: that hivemind has registered for it
        """
        if left is met:
            yield
            return
        self._take_back(met)
        with self._register_allreduce_group(left):
            yield

    def _take_back(self, group: GroupInfo) -> None:
        """Let a group, and its phases, exchange nothing; whoever waits for it already asks in vain."""
        for group_id in [one for one in self._running_groups if one.startswith(group.group_id)]:
            self._running_groups.pop(group_id).cancel()

    async def _exchange_with(
        self, aggregate: Callable[..., Awaitable[Any]], group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> Gathered:
        records = [self.serializer.loads(gathered) for gathered in group_info.gathered]
        terms = self._terms = RoundTerms.of(records)
        group = GroupRecords(records, group_info.peer_ids.index(self.peer_id))
        for extension in self.extensions:
            extension.agree(group)
        known = dataclasses.replace(group_info, gathered=tuple(map(of_upstream, records)))
        async with self._exchange.watched(self._matchmaking, group_info, terms):
            gathered = await aggregate(known, min_vector_size, **kwargs)
        for extension in self.extensions:
            extension.conclude()
        reached = {peer: value for peer, value in gathered.items() if peer not in terms.notes.unreached}
        return Gathered(reached, terms.notes.refused)

    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[torch.Tensor],
        group_info: GroupInfo,
        group_id: bytes | None = None,
        **kwargs: Any,
    ) -> None:
        # Replaces hivemind/averaging/averager.py:_run_allreduce_inplace_, which makes a runner of hivemind's own class
        group_id = group_id or group_info.group_id
        terms = self._terms
        compression, weight = kwargs.pop("compression"), kwargs.pop("weight")
        infos = kwargs.pop("tensor_infos", None) or map(CompressionInfo.from_tensor, tensors, itertools.count())
        phase = group_id[len(group_info.group_id) :]
        exchange = Exchange(tuple(tensors), tuple(infos), compression, weight, self.weights_are_samples, phase)
        for extension in self.extensions:
            exchange = extension.join(exchange)
        group = dataclasses.replace(group_info, group_id=group_id)
        runner = self._runner_of(group, exchange, terms, **kwargs)
        self._running_groups[group_id].set_result(runner)  # for those who send their parts
        try:
            await runner.average_into(exchange.tensors, self._averaging_alpha)
        finally:
            terms.notes.take_in(runner.notes)
        if runner.ending is not None:
            self._exchange.note_ending(runner.ending)
        self._after_phase(phase, tensors)

    def _after_phase(self, phase: bytes, averages: Sequence[torch.Tensor]) -> None:
        """Called when an all-reduce has succeeded, which is the whole round or one of its phases."""

    def _runner_of(
        self, group: GroupInfo, exchange: Exchange, terms: RoundTerms, **settings: Any
    ) -> FaultTolerantRunner:
        return self._exchange.runner(
            self._matchmaking,
            exchange.tensors,
            terms,
            p2p=self._p2p,
            prefix=self.prefix,
            servicer_type=type(self),
            rule=self.robust_aggregation,
            group_id=group.group_id,
            ordered_peer_ids=group.peer_ids,
            phase=exchange.phase,
            compression=PartCodec(exchange.compression, self.role, terms.are_of_ours),
            weight=exchange.weight,
            tensor_infos=exchange.infos,
            weights_are_samples=exchange.weights_are_samples,
            **settings,
        )

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[PartMessage], context: P2PContext
    ) -> AsyncIterator[PartMessage]:
        # hivemind/averaging/averager.py:rpc_aggregate_part turns away whoever is quicker than this peer if the round
        # before the present one has ended since that was agreed on: with rounds in the background, as good as always
        request = await anext(stream)
        if matchmaking.is_given_up(request):
            answer = matchmaking.answer(self._matchmaking.let_go(context.remote_id))
            async for message in left_open(as_aiter(answer), CLOSED_WITHIN, lambda _: True):
                yield message
            return
        if request.code == averaging_pb2.CANCELLED:
            self._matchmaking.decline(request.group_id, context.remote_id)
            return
        takes_part = await self._matchmaking.wait_for_trigger(request.group_id)
        if request.group_id not in self._running_groups:
            if not takes_part or not self._matchmaking.is_looking_for_group:
                # it has left the group, maybe before it learned that it was in one
                await self._decline(request.group_id, context.remote_id)
                yield PartMessage(code=averaging_pb2.BAD_GROUP_ID)
                return
            await self._pending_groups_registered.wait()
        if (group := self._running_groups.get(request.group_id)) is not None:
            # hivemind awaits the future itself, which is cancelled, for all, with the request of a sender that dies
            await asyncio.wait({group})
        async for message in super().rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message
