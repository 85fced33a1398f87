"""The part of the options on which all peers of a run have to agree, as plain values that can travel.

Rounds break where it differs: a peer with another target batch size ends its epochs when nobody else does, one with
another averager or other statistics sends tensors that nobody expects, and parts of another size fit nowhere. Codecs
and timeouts are each peer's own: hivenb's peers average with different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hivenb.options.choices import averager_factory, describe_averager, describe_outer_optimizer, outer_optimizer
from hivenb.options.options import FIELDS, Options

#: The setting among ``averager_opts`` on which all peers have to agree, too.
PART_SIZE = "part_size_bytes"

#: Options on which all peers of a run have to agree. The run's name is what they agree on it under.
SHARED_FIELDS = tuple(name for name, info in FIELDS.items() if info.swarm_wide and name != "run_id")

Shared = Mapping[str, Any]


def shared_part(options: Options) -> dict[str, Any]:
    """What of some options all peers need alike: plain values by name, equal where peers can work together."""
    shared = {name: getattr(options, name) for name in SHARED_FIELDS}
    shared["average_opt_statistics"] = list(options.average_opt_statistics)
    shared["grad_averager_factory"] = describe_averager(options.grad_averager_factory)
    shared["outer_optimizer"] = describe_outer_optimizer(options.outer_optimizer)
    shared[PART_SIZE] = (options.averager_opts or {}).get(PART_SIZE)
    return shared


def with_shared_part(options: Options, shared: Shared, offered: Callable[..., Any] | None = None) -> Options:
    """The same options with that part of them as in the swarm. Names that are not known here are passed over.

    :param options: of this peer
    :param shared: what :func:`shared_part` gave at another one
    :param offered: a ``grad_averager_factory`` to take if that is the one meant
    :raises OptionsError: if the two do not go together, or this peer cannot make the swarm's averager
    """
    own = shared_part(options)
    changes = {name: shared[name] for name in SHARED_FIELDS if name in shared and shared[name] != own[name]}
    if "grad_averager_factory" in changes:
        is_offered = offered is not None and describe_averager(offered) == changes["grad_averager_factory"]
        changes["grad_averager_factory"] = offered if is_offered else averager_factory(changes["grad_averager_factory"])
    if "outer_optimizer" in changes:
        changes["outer_optimizer"] = outer_optimizer(changes["outer_optimizer"])
    if PART_SIZE in shared and shared[PART_SIZE] != own[PART_SIZE]:
        settings = {**(options.averager_opts or {}), PART_SIZE: shared[PART_SIZE]}
        changes["averager_opts"] = {name: value for name, value in settings.items() if name != PART_SIZE or value}
    return options.replace(**changes) if changes else options


def labels_of(before: Shared, after: Shared) -> list[str]:
    """What differs between two shared parts, in words."""
    differing = [name for name in after if before.get(name) != after[name]]
    return [FIELDS[name].label if name in FIELDS else "size of parts" for name in differing]


# -- largest change --------------------------------------------------------------------------------------------------
#
# How far options on which all peers agree may change at once: a host that goes mad, or is none, is not followed.


#: By which factor a number may become larger or smaller at once.
LARGEST_FACTOR = 8

#: Numbers for which that holds, with what they are unless they are given.
_BOUNDED: Mapping[str, Any] = {"target_batch_size": None, "average_state_every": 1, PART_SIZE: 2**19}


def too_large_a_change(before: Shared, after: Shared) -> str | None:
    """Why one should not go from the one to the other at once, in words; ``None`` if one may.

    :param before: what :func:`hivenb.options.swarm_wide.shared_part` gave
    :param after: the same of what is to come
    """
    for name, default in _BOUNDED.items():
        old, new = before.get(name) or default, after.get(name) or default
        if old and new and max(old, new) > LARGEST_FACTOR * min(old, new):
            label = FIELDS[name].label if name in FIELDS else "size of parts"
            return f"{label} from {old} to {new}, which is more than {LARGEST_FACTOR} times as much or as little"
    return None
