"""How far options on which all peers agree may change at once: a host that goes mad, or is none, is not followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from hivenb.options.options import FIELDS, LARGEST_FACTOR
from hivenb.options.swarm_wide import PART_SIZE, Shared

#: Numbers for which that holds, with their factors, and with what they are unless they are given.
_BOUNDED: Mapping[str, tuple[int, Any]] = {
    **{
        name: (info.largest_factor, None if info.default is MISSING else info.default)
        for name, info in FIELDS.items()
        if info.largest_factor is not None
    },
    PART_SIZE: (LARGEST_FACTOR, 2**19),
}


def too_large_a_change(before: Shared, after: Shared) -> str | None:
    """Why one should not go from the one to the other at once, in words; ``None`` if one may.

    :param before: what :func:`hivenb.options.swarm_wide.shared_part` gave
    :param after: the same of what is to come
    """
    for name, (factor, default) in _BOUNDED.items():
        old, new = before.get(name) or default, after.get(name) or default
        if old and new and max(old, new) > factor * min(old, new):
            label = FIELDS[name].label if name in FIELDS else "size of parts"
            return f"{label} from {old} to {new}, which is more than {factor} times as much or as little"
    return None
