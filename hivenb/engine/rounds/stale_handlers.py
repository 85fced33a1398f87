"""What an averager leaves behind when it is killed: handlers in libp2p's daemon in the place of its successor's."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from multiprocessing.sharedctypes import RawArray

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from hivenb.engine.dht.daemon import remove_socket
from hivenb.engine.process.interrupts import BackgroundThread

logger = get_logger(__name__)

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
