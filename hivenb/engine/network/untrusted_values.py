"""Values and ids that others send, within the bounds in which hivemind can read them.

hivemind unpacks what is packed in a value by a call of its own, from C and back, with tens of kilobytes of stack for
each. A value of 5 kB, with nothing in it but such wrappings, ends the process of everybody who reads it: each peer's
DHT, when it stands in a record. And hivemind writes each id of a peer in base 58, which takes ten seconds for one of
60 kB.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

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
    return tuple(BoundedSerializer.loads(raw))


def _dictionary(raw: bytes) -> DictionaryDHTValue:
    # hivemind/dht/storage.py:unpackb reads what is in it without bounds
    most, latest, items = BoundedSerializer.loads(raw)
    with DictionaryDHTValue(most).freeze() as made:
        for key, value, expiration in items:
            made.store(key, value, expiration)
        made.latest_expiration_time = latest
        return made


def _of_another_program(raw: bytes) -> Any:
    raise ValueError("it describes tensors for hivemind's mixture of experts")


class BoundedSerializer(MSGPackSerializer):
    """``hivemind``'s ``MSGPackSerializer`` that reads within these bounds; what it writes is the same."""

    _ext_type_codes: ClassVar[dict[int, Any]] = {
        MSGPackSerializer._TUPLE_EXT_TYPE_CODE: Bounded(_tuple),
        MSGPackSerializer._ext_types[DictionaryDHTValue]: Bounded(_dictionary),
        MSGPackSerializer._ext_types[BatchTensorDescriptor]: Bounded(_of_another_program),
    }


def _make_short_peer_id(peer: PeerID, peer_id_bytes: bytes) -> None:
    if len(peer_id_bytes) > LONGEST_ID:
        raise ValueError(f"a peer's id of {len(peer_id_bytes)} bytes")
    _make_peer_id(peer, peer_id_bytes)


def bound_this_process() -> None:
    """Let all of hivemind read within these bounds in this process, which has to be a child of ours alone.

    It reads there what others send in a dozen places that name ``MSGPackSerializer`` and ``PeerID`` themselves
    (``hivemind/dht/schema.py``, ``hivemind/dht/protocol.py``, ``hivemind/averaging/matchmaking.py``). In a kernel or a
    script the same classes belong to others as well, such as hivemind's mixture of experts: there
    :class:`BoundedSerializer` is called by name. May be called again; what is written stays the same.
    """
    MSGPackSerializer._ext_type_codes.update(BoundedSerializer._ext_type_codes)
    PeerID.__init__ = _make_short_peer_id


# -- checked values --------------------------------------------------------------------------------------------------
#
# What others write, checked: of the type that is meant and within bounds. Anybody may write to a DHT.


#: The largest whole number that a record may hold; all up to it survive a float.
MAX_WHOLE = 2**53

#: Bytes of a peer's id at most, and characters of it as text.
PEER_ID_BYTES, PEER_ID_LENGTH = 64, 100


def whole(value: Any, least: int = 0, most: int = MAX_WHOLE) -> int:
    """A whole number within bounds; ``True`` and ``3.0`` are none.

    :raises ValueError: if it is something else
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"not a whole number from {least} to {most}")
    return value


def finite(value: Any, least: float = 0.0, most: float = 1e12) -> float:
    """A number within bounds, neither nan nor inf; ``True`` is none.

    :raises ValueError: if it is something else
    """
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise ValueError(f"not a number from {least} to {most}")
    return float(value)


def truth(value: Any) -> bool:
    """``True`` or ``False``.

    :raises ValueError: if it is something else
    """
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def text(value: Any, most: int) -> str:
    """Some text of so many characters at most.

    :raises ValueError: if it is something else
    """
    if type(value) is not str or len(value) > most:
        raise ValueError(f"not a text of up to {most} characters")
    return value


def raw(value: Any, most: int, least: int = 0) -> bytes:
    """So many bytes at most.

    :raises ValueError: if it is something else
    """
    if type(value) is not bytes or not least <= len(value) <= most:
        raise ValueError(f"not {least} to {most} bytes")
    return value


def sequence(value: Any, most: int, least: int = 0) -> list[Any]:
    """A list, or tuple, of so many entries at most.

    :raises ValueError: if it is something else
    """
    if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
        raise ValueError(f"not a list of {least} to {most} entries")
    return list(value)


def named(value: Any, most: int) -> dict[str, Any]:
    """Values by names, so many at most.

    :raises ValueError: if it is something else
    """
    if type(value) is not dict or len(value) > most or not all(type(name) is str for name in value):
        raise ValueError(f"not up to {most} values by names")
    return value
