"""One change of a run's options, from when it is asked for until it is in force or refused."""

from __future__ import annotations

from typing import Any

from hivenb.options.options import Options


class OptionsChange:
    """Options that were asked for, and what became of them.

    :param options: all of them
    :param is_shared: whether they change what all peers have to agree on
    """

    def __init__(self, options: Options, is_shared: bool):
        self.options, self.is_shared = options, is_shared
        #: what of them waits for an epoch to come, by name
        self.rest: dict[str, Any] = {}
        self.error: Exception | None = None
        self.is_settled = False
