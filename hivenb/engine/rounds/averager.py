"""What each averager of ours is: born on any thread, met by plain hivemind's, and waiting for nobody who has left."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger

from hivenb.engine import corrected_codecs
from hivenb.engine.dht.carried_values import bound_this_process
from hivenb.engine.dht.message_limits import limit_for
from hivenb.engine.dht.restarts import ending_with
from hivenb.engine.process.watched_process import WatchedProcess, shut_down_on_error
from hivenb.engine.rounds.account import Account, AccountBook
from hivenb.engine.rounds.download_pace import DownloadPace
from hivenb.engine.rounds.expected_peers import ExpectedPeers
from hivenb.engine.rounds.gathered import marked
from hivenb.engine.rounds.kept_tasks import keep_tasks_alive
from hivenb.engine.rounds.leaving import LeavingAverager
from hivenb.engine.rounds.matchmaking import EpochMatchmaking
from hivenb.engine.rounds.round import Round
from hivenb.engine.rounds.stale_handlers import DaemonLink
from hivenb.engine.rounds.stream_ends import (
    CLOSED_WITHIN,
    STATE_LEFT_OPEN,
    download_state,
    is_end_of_state,
    left_open,
    with_end,
)
from hivenb.errors import ProcessEndedError

logger = get_logger(__name__)

#: Looks at the swarm in a row that find nobody else before a search for a group is given up; one may miss a record.
ALONE_AFTER = 2

#: Seconds that an averager's process may take to change its settings, or to begin to look for a group.
ANSWER_TIMEOUT = 10.0


class AveragerBase(WatchedProcess, LeavingAverager):
    """Base to put *behind* a class of hivemind's averagers: what creating one, and waiting for it, should be like.

    Behind, because hivemind's classes reach :meth:`step` through ``super()``.
    """

    title = "the averager of gradients"
    _rounds: weakref.WeakSet[Round]

    #: the tracker looks at the rounds while the thread that trains adds one
    _lock_rounds = threading.Lock()

    def __init__(self, *args: Any, **kwargs: Any):
        self._rounds = weakref.WeakSet()
        self._expected: ExpectedPeers | None = None
        self._seen_alone = 0
        self._retired = False
        #: whether the user has chosen ``target_group_size``, so that a large swarm averages in several groups
        self.group_size_is_fixed = kwargs.get("target_group_size") is not None
        self._accounts = AccountBook()
        self._downloads = DownloadPace()
        self._daemon_link = DaemonLink()
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
        corrected_codecs.install()  # a peer without one decodes others' messages, too
        super().run()

    # -- in the process that trains -----------------------------------------------------------------------------

    def start(self) -> None:
        with ending_with(self.dht, self):
            super().start()

    def step(self, gather: Any = None, *, wait: bool = True, **kwargs: Any) -> Any:
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

    def shutdown(self) -> None:
        self._retired = self._is_dismissed = True
        for control in self._known_rounds():
            control.desert()  # hivemind would begin it anew, until the process is ended by force
        if self.ended is None:
            super().shutdown()
            self._daemon_link.forget(self._handler_names())  # it may have ended by force, or before it was asked to

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
        if peers != self._expected and (peers.present or peers.gone or peers.left_out):
            self._expected = peers
            self._outer_pipe.send(("_expect_peers", [peers], {}))
        self._seen_alone = 0 if peers.present else self._seen_alone + 1
        if self._seen_alone >= ALONE_AFTER:
            may_come = peers.left_out - peers.gone  # after all, until the round is due
            for search in self._searches():
                if search.triggered or search.is_due or not may_come:
                    search.desert()

    def take_accounts(self) -> list[Account]:
        """What the others did in its rounds, since the last call. For one thread."""
        return self._accounts.take()

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
        self._own_matchmaking.tell = self._accounts.tell
        self._p2p.longest_message = limit_for(self.allreduce_kwargs.get("part_size_bytes"))

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, **kwargs: Any) -> None:
        keep_tasks_alive()
        self._daemon_link.note(p2p)
        await super().add_p2p_handlers(p2p, *args, **kwargs)

    async def _expect_peers(self, peers: ExpectedPeers) -> None:
        await self._matchmaking.expect(peers)

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

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        seconds = CLOSED_WITHIN if self._matchmaking.is_of_ours(context.remote_id) else STATE_LEFT_OPEN
        state = with_end(self._state_in_turn(request, context))
        async for message in left_open(state, seconds, is_end_of_state):
            yield message

    async def _state_in_turn(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async with self._downloads.turn(context.remote_id):
            async for message in super().rpc_download_state(request, context):
                yield message

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> StubBase:
        stub = super().get_stub(p2p, peer, namespace=namespace)
        stub.rpc_download_state = partial(download_state, stub.rpc_download_state)
        return stub

    async def _step(self, *, step: StepControl, future_for_init: Any) -> None:
        step._data_for_gather = marked(step.data_for_gather)
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        except Exception as e:
            # whoever asked for the round has the error in its future; here it would only be printed by asyncio
            logger.debug(f"A round of averaging ended with {e!r}")
