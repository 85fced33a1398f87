"""A peer of a benchmark that trains nothing: it reports samples, sees the others and ends epochs with them. Not a test.

With a tracker alone, that is the DHT, the reports of progress and the questions whether somebody is there. With an
optimizer of a model of one number, it looks for groups as well, and averages with them.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hivemind
import torch
from bench_peer import Transitions, begin
from hivemind.optim.progress_tracker import ProgressTracker as PlainTracker
from hivemind.p2p import P2P
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.progress.tracker import ProgressTracker

#: Samples in a batch.
BATCH = 32

#: Seconds between two looks whether an epoch is over, so that it is seen when it is known and not when a batch is done.
LOOK = 0.04

LOOPBACK: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}

#: What is counted, by the end of the name of a remote call.
KINDS = ("rpc_find", "rpc_store", "rpc_ping", "other")


@dataclass(frozen=True)
class Part:
    """What each peer of a swarm does.

    :param who: ``hivenb`` or ``hivemind``, whose classes it uses
    :param averages: whether it looks for groups, and averages one number
    :param target: samples of all in an epoch
    :param step: seconds that a batch takes
    """

    who: str
    averages: bool
    target: int
    step: float


@dataclass(frozen=True)
class Passed:
    """An epoch of a peer, right after its end.

    :param at: seconds of the clock that all processes of the machine share
    :param asked: remote calls that this peer has made so far, by :data:`KINDS`
    :param answered: that others have made to it
    :param group_size: peers that averaged
    """

    epoch: int
    at: float
    asked: tuple[int, ...]
    answered: int
    group_size: int


@dataclass(frozen=True)
class Seen:
    """More peers than before are known to be there, this one among them.

    :param at: seconds of that clock
    """

    peers: int
    at: float


class Counts:
    """Remote calls of all processes of a peer; to be made before any of them is forked."""

    def __init__(self) -> None:
        self._cells = mp.Array("q", len(KINDS) + 1)
        call, iterate, add = P2P.call_protobuf_handler, P2P.iterate_protobuf_handler, P2P.add_protobuf_handler

        async def counted_call(p2p: P2P, peer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return await call(p2p, peer, name, *args, **kwargs)

        async def counted_iterate(p2p: P2P, peer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return await iterate(p2p, peer, name, *args, **kwargs)

        async def counted_add(p2p: P2P, name: str, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            def answer(request: Any, context: Any) -> Any:
                self._add(len(KINDS))
                return handler(request, context)

            await add(p2p, name, answer, *args, **kwargs)

        P2P.call_protobuf_handler, P2P.iterate_protobuf_handler = counted_call, counted_iterate
        P2P.add_protobuf_handler = counted_add

    @property
    def asked(self) -> tuple[int, ...]:
        return tuple(self._cells[: len(KINDS)])

    @property
    def answered(self) -> int:
        return int(self._cells[len(KINDS)])

    def _count(self, name: str) -> None:
        kind = name.rpartition(".")[2]
        self._add(KINDS.index(kind) if kind in KINDS else len(KINDS) - 1)

    def _add(self, place: int) -> None:
        with self._cells.get_lock():
            self._cells[place] += 1


class WithTracker:
    """Goes on to the next epoch as soon as it is known that one is over."""

    def __init__(self, dht: hivemind.DHT, part: Part):
        own = isinstance(dht, DHT)
        kind: Any = ProgressTracker if own else PlainTracker
        key = dht.private_key if own else RSAPrivateKey()
        self.tracker = kind(dht, "run", part.target, private_key=key, start=True)
        self.epoch, self.group_size = 0, 1
        self._samples, self._step = 0, part.step
        if own:
            self.tracker.announce()

    def batch(self) -> None:
        end = time.monotonic() + self._step
        while time.monotonic() < end:
            time.sleep(LOOK)
            if self.tracker.ready_to_update_epoch:
                with self.tracker.pause_updates():
                    self.epoch = self.tracker.update_epoch(max(self.epoch + 1, self.tracker.global_epoch))
                self._samples = 0
                return
        self._samples += BATCH
        self.tracker.report_local_progress(self.epoch, self._samples)

    def close(self) -> None:
        self.tracker.shutdown(10)


class WithOptimizer:
    """A model of one number, whose gradients are averaged in each epoch, and its state in none."""

    def __init__(self, dht: hivemind.DHT, part: Part):
        self.group_size = 1
        self._step, self._number = part.step, torch.nn.Parameter(torch.ones(1))
        kind: Any = hivemind.Optimizer
        own: dict[str, Any] = {}
        if isinstance(dht, DHT):
            kind, own = Optimizer, {"on_epoch": self._note}
        else:
            self._transitions = _transitions()
        self._optimizer = kind(
            dht=dht,
            run_id="run",
            batch_size_per_step=BATCH,
            target_batch_size=part.target,
            optimizer=torch.optim.SGD([self._number], lr=0.01),
            use_local_updates=False,
            client_mode=False,
            matchmaking_time=5.0,
            averaging_timeout=30.0,
            delay_state_averaging=False,
            average_state_every=10**6,
            **own,
        )
        self.tracker = self._optimizer.tracker

    @property
    def epoch(self) -> int:
        return int(self._optimizer.local_epoch)

    def batch(self) -> None:
        time.sleep(self._step)
        self._number.grad = torch.ones(1)
        if not isinstance(self._optimizer, Optimizer):
            self._transitions.group_size = 1
            self._optimizer.step()
            self.group_size = self._transitions.group_size
        else:
            self._optimizer.step()

    def close(self) -> None:
        self._optimizer.shutdown()

    def _note(self, report: Any) -> None:
        self.group_size = report.group_size


def _transitions() -> Transitions:
    transitions, logger = Transitions(), logging.getLogger("hivemind.optim.optimizer")
    logger.addHandler(transitions)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    return transitions


@contextmanager
def _joined(addresses: Sequence[str], part: Part) -> Iterator[hivemind.DHT]:
    kind = DHT if part.who == "hivenb" else hivemind.DHT
    dht = kind(initial_peers=list(addresses) or None, start=True, startup_timeout=60.0, **LOOPBACK)
    try:
        yield dht
    finally:
        dht.shutdown()


def take_part(connection: Any, addresses: Sequence[str], part: Part, count: int, folder: str) -> None:
    """Join, wait for the order to begin, and take part until told to stop; say how many peers are seen, and since when.

    :param folder: for what a killed process leaves behind
    """
    begin(folder)
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # at the end, all of them are killed at once
    counts = Counts()
    with _joined(addresses, part) as dht:
        connection.send(("addresses", [str(address) for address in dht.get_visible_maddrs()]))
        connection.send(("dht", dht.pid))
        connection.recv()
        peer = (WithOptimizer if part.averages else WithTracker)(dht, part)
        seen, epoch = 0, 0
        while not connection.poll():
            peer.batch()
            now = time.monotonic()
            if peer.tracker.global_progress.num_peers > seen:
                seen = peer.tracker.global_progress.num_peers
                connection.send(("seen", Seen(seen, now)))
            if peer.epoch > epoch:
                epoch = peer.epoch
                connection.send(("epoch", Passed(epoch, now, counts.asked, counts.answered, peer.group_size)))
        peer.close()
    connection.send(("left", None))
