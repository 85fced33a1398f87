"""The part of the options on which all peers of a run have to agree, as plain values that can travel.

Rounds break where it differs: a peer with another target batch size ends its epochs when nobody else does, one with
another averager or other statistics sends tensors that nobody expects, and parts of another size fit nowhere. Codecs
and timeouts are each peer's own: hivenb's peers average with different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hivenb.options.options import FIELDS, Options

#: The setting among ``averager_opts`` on which all peers have to agree, too.
PART_SIZE = "part_size_bytes"

#: Options on which all peers of a run have to agree. The run's name is what they agree on it under.
SHARED_FIELDS = tuple(name for name, info in FIELDS.items() if info.swarm_wide and name != "run_id")

Shared = Mapping[str, Any]


def shared_part(options: Options) -> dict[str, Any]:
    """What of some options all peers need alike: plain values by name, equal where peers can work together."""
    shared = {name: FIELDS[name].kind.pack(getattr(options, name)) for name in SHARED_FIELDS}
    shared[PART_SIZE] = (options.averager_opts or {}).get(PART_SIZE)
    return shared


def with_shared_part(options: Options, shared: Shared, offered: Options | None = None) -> Options:
    """The same options with that part of them as in the swarm. Names that are not known here are passed over.

    :param options: of this peer
    :param shared: what :func:`shared_part` gave at another one
    :param offered: other options, whose value of one that not every peer can make is taken if it is the one meant
    :raises OptionsError: if the two do not go together, or this peer cannot make the swarm's averager
    """
    own = shared_part(options)
    theirs = None if offered is None else shared_part(offered)
    changes = {
        name: FIELDS[name].kind.unpack(shared[name])
        if theirs is None or theirs[name] != shared[name]
        else getattr(offered, name)
        for name in SHARED_FIELDS
        if name in shared and shared[name] != own[name]
    }
    if PART_SIZE in shared and shared[PART_SIZE] != own[PART_SIZE]:
        settings = {**(options.averager_opts or {}), PART_SIZE: shared[PART_SIZE]}
        changes["averager_opts"] = {name: value for name, value in settings.items() if name != PART_SIZE or value}
    return options.replace(**changes) if changes else options


def labels_of(before: Shared, after: Shared) -> list[str]:
    """What differs between two shared parts, in words."""
    differing = [name for name in after if before.get(name) != after[name]]
    return [FIELDS[name].label if name in FIELDS else "size of parts" for name in differing]
