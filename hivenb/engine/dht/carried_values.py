"""Values and ids that others send, within the bounds in which hivemind can read them.

hivemind unpacks what is packed in a value by a call of its own, from C and back, with tens of kilobytes of stack for
each. A value of 5 kB, with nothing in it but such wrappings, ends the process of everybody who reads it: each peer's
DHT, when it stands in a record. And hivemind writes each id of a peer in base 58, which takes ten seconds for one of
60 kB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.tensor_descr import BatchTensorDescriptor

#: Wrappings in each other. Peers need two: a tuple within an optimizer's settings, a dictionary of records.
MOST_NESTED = 8

#: Bytes of a peer's id; libp2p's have 34 to 42.
LONGEST_ID = 64

_depth = threading.local()
_make_peer_id = PeerID.__init__


class Bounded:
    """Takes the place of a type in hivemind's table of what can be packed in a value.

    :param unpack: makes it of its bytes
    """

    def __init__(self, unpack: Callable[[bytes], Any]):
        self._unpack = unpack

    def unpackb(self, raw: bytes) -> Any:
        """What was packed.

        :raises ValueError: if it cannot be read, or too much is packed in each other
        """
        above = getattr(_depth, "now", 0)
        if above >= MOST_NESTED:
            raise ValueError(f"more than {MOST_NESTED} values are packed in each other")
        _depth.now = above + 1
        try:
            return self._unpack(raw)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as e:
            raise ValueError(f"what is packed in a value cannot be read: {type(e).__name__}") from e
        finally:
            _depth.now = above


def _tuple(raw: bytes) -> tuple[Any, ...]:
    return tuple(MSGPackSerializer.loads(raw))


def _of_another_program(raw: bytes) -> Any:
    raise ValueError("it describes tensors for hivemind's mixture of experts")


def _make_short_peer_id(peer: PeerID, peer_id_bytes: bytes) -> None:
    if len(peer_id_bytes) > LONGEST_ID:
        raise ValueError(f"a peer's id of {len(peer_id_bytes)} bytes")
    _make_peer_id(peer, peer_id_bytes)


def install() -> None:
    """Let this process, and those forked from it later, read within these bounds. May be called again.

    Works around ``hivemind/utils/serializer.py:_decode_ext_types`` and ``PeerID`` in
    ``hivemind/p2p/p2p_daemon_bindings/datastructures.py``; what is written stays the same.
    """
    types = MSGPackSerializer._ext_types
    MSGPackSerializer._ext_type_codes.update(
        {
            MSGPackSerializer._TUPLE_EXT_TYPE_CODE: Bounded(_tuple),
            types[DictionaryDHTValue]: Bounded(DictionaryDHTValue.unpackb),
            types[BatchTensorDescriptor]: Bounded(_of_another_program),
        }
    )
    PeerID.__init__ = _make_short_peer_id


install()
