"""Every switch of collaborative training: as one checked value, in words, and as code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hivenb._lazy import lazy_face

if TYPE_CHECKING:
    from hivenb.options.declarations import Option
    from hivenb.options.options import FIELD_NAMES, FIELDS, Options

__all__ = [
    "FIELDS",
    "FIELD_NAMES",
    "Option",
    "Options",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "FIELDS": "hivenb.options.options",
        "FIELD_NAMES": "hivenb.options.options",
        "Option": "hivenb.options.declarations",
        "Options": "hivenb.options.options",
    },
)
