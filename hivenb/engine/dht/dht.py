"""The DHT process: survives bad messages, and its daemon dies with it."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils import get_logger, switch_to_uvloop
from hivemind.utils.crypto import RSAPrivateKey

from hivenb.engine.dht.addresses import is_loopback
from hivenb.engine.dht.node import Node, SignatureValidator
from hivenb.engine.process.child_process import ChildProcess, settle_as_child
from hivenb.engine.process.end_with_parent import tied_to_parent

logger = get_logger(__name__)

#: Seconds that the daemon is given to start; hivemind's own 15 are too few on a busy free notebook.
STARTUP_TIMEOUT = 60.0

#: How much garbage the daemon, a Go program, lets pile up, in percent of what it uses; Go's own 100 cost 30 MB more.
DAEMON_GOGC = "20"


class TiedP2P(P2P):
    """A libp2p daemon in a session of its own that dies with the process that started it.

    Works around ``hivemind/p2p/p2p_daemon.py``: ``P2P.create`` starts ``p2pd`` in the caller's process group, where
    an interrupt of the notebook can hit it, and leaves it running when the caller is killed.
    """

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        return tied_to_parent(P2P._make_process_args(*args, **kwargs))


class DHT(ChildProcess, hivemind.DHT):
    """``hivemind.DHT`` for a notebook kernel. Parameters and methods are those of ``hivemind.DHT``.

    It signs its records with a key of its own, :attr:`private_key`. hivemind has one key for each process instead,
    and two peers in one process count as one.
    """

    def __init__(
        self,
        *args: Any,
        startup_timeout: float = STARTUP_TIMEOUT,
        record_validators: Iterable[RecordValidatorBase] = (),
        **kwargs: Any,
    ):
        self.private_key = RSAPrivateKey()
        super().__init__(  # type: ignore[call-arg]
            *args,
            startup_timeout=startup_timeout,
            record_validators=[SignatureValidator(self.private_key), *record_validators],
            **kwargs,
        )

    def run(self) -> None:
        # Replaces hivemind/dht/dht.py:DHT.run, which sleeps three seconds for each message that cannot be read and
        # ends on most of them, and which leaves no room for a P2P class of our own.
        settle_as_child()
        os.environ.setdefault("GOGC", DAEMON_GOGC)
        loop = switch_to_uvloop()
        loop.run_until_complete(self._serve())
        loop.close()

    async def _serve(self) -> None:
        try:
            self._node = await self._create_node()
        except Exception as e:
            self._ready.set_exception(e)
            return
        messages: asyncio.Queue[tuple[str, Coroutine[Any, Any, Any]]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._inner_pipe.fileno(), self._receive, messages)
        self._ready.set_result(None)
        tasks: set[asyncio.Task] = set()
        while True:
            method, request = await messages.get()
            task = asyncio.create_task(request)
            tasks.add(task)  # the event loop itself keeps only weak references
            task.add_done_callback(partial(_finish, tasks))
            if method == "_shutdown":
                await task
                return

    async def _create_node(self) -> DHTNode:
        if self._daemon_listen_maddr is not None:
            p2p = await P2P.replicate(self._daemon_listen_maddr)
            node_kwargs = {name: value for name, value in self.kwargs.items() if name in _NODE_PARAMETERS}
        else:
            node_kwargs = {}
            p2p_kwargs: dict[str, Any] = {}
            for name, value in self.kwargs.items():
                (node_kwargs if name in _NODE_PARAMETERS else p2p_kwargs)[name] = value
            if not p2p_kwargs.get("use_ipfs"):
                p2p_kwargs["initial_peers"] = self.initial_peers
            if node_kwargs.get("client_mode"):
                p2p_kwargs.setdefault("dht_mode", "client")
            p2p = await TiedP2P.create(**p2p_kwargs)
        try:
            node = await Node.create(
                p2p=p2p,
                initial_peers=self.initial_peers,
                num_workers=self.num_workers,
                record_validator=self._record_validator,
                **node_kwargs,
            )
        except BaseException:
            await p2p.shutdown()
            raise
        node._should_shutdown_p2p = self._daemon_listen_maddr is None
        return node

    def _receive(self, messages: asyncio.Queue) -> None:
        while self._inner_pipe.poll():
            try:
                message = self._inner_pipe.recv_bytes()
            except (EOFError, OSError):
                asyncio.get_running_loop().remove_reader(self._inner_pipe.fileno())
                return
            try:
                method, args, kwargs = pickle.loads(message)
                messages.put_nowait((method, getattr(self, method)(*args, **kwargs)))
            except Exception as e:
                # An averager that died takes along the descriptors of the messages it had sent: nobody waits for
                # their answer any more. Anything else in here came from the caller's own process.
                logger.debug(f"Dropped a message that cannot be read: {e!r}")


def _finish(tasks: set[asyncio.Task], task: asyncio.Task) -> None:
    tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        # the caller has received it through its future
        logger.debug(f"A request to the DHT failed: {task.exception()!r}")


def reachable_addresses(dht: hivemind.DHT) -> tuple[str, ...]:
    """Addresses of a DHT at which others can reach it; those of this machine alone only if there are no others."""
    addresses = [str(address) for address in dht.get_visible_maddrs(latest=True)]
    outside = [address for address in addresses if not is_loopback(address)]
    return tuple(outside or addresses)


_NODE_PARAMETERS = frozenset(inspect.signature(DHTNode.create).parameters) - {"kwargs"}
