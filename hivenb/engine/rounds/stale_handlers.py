"""What an averager leaves behind in libp2p's daemon when it is killed: handlers in the place of its successor's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import hivemind
from hivemind.averaging import DecentralizedAverager
from hivemind.dht import DHTNode
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

logger = get_logger(__name__)

#: Seconds that the daemon is given.
_ANSWER_TIMEOUT = 2.0


def forget_handlers(averager: DecentralizedAverager, address: str) -> None:
    """Let the daemon forget the handlers of an averager that has ended; without effect if it does not answer.

    :param address: at which the averager's process listened to the daemon; empty for a client, which has none
    """
    if not address:
        return
    averager._collect_rpc_handlers()
    names = [averager._get_handle_name(averager.prefix, one.method_name) for one in averager._rpc_handlers or ()]
    try:
        request = partial(_remove_handlers, address, names)
        averager.dht.run_coroutine(request, return_future=True).result(_ANSWER_TIMEOUT)
    except Exception as e:  # it has ended as well, and a new one knows nothing of them
        logger.debug(f"The daemon could not be told that {names} are gone: {e!r}")


async def _remove_handlers(address: str, names: Sequence[str], dht: hivemind.DHT, node: DHTNode) -> None:
    # as hivemind/p2p/p2p_daemon_bindings/control.py:remove_stream_handler, which can only remove its own
    reader, writer = await node.p2p._client.control.daemon_connector.open_connection()
    removed = p2pd_pb2.RemoveStreamHandlerRequest(addr=Multiaddr(address).to_bytes(), proto=names)
    await write_pbmsg(
        writer, p2pd_pb2.Request(type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER, removeStreamHandler=removed)
    )
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    writer.close()
    await writer.wait_closed()
    raise_if_failed(response)
