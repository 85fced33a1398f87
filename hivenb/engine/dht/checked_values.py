"""What others write, checked: of the type that is meant and within bounds. Anybody may write to a DHT."""

from __future__ import annotations

import math
from typing import Any

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
