"""Under which names the runs of a swarm train: a model that was made anew does not go on with what another has learned.

A person names an *experiment*, with ``Options(run_id=...)`` or not at all, and runs the cells again. Each model is a
run of its own in the DHT: the first one has the name of the experiment, the next ones have a number behind it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any


class RunNames:
    """The names that models of this process have taken in a swarm that it has opened. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, list[tuple[str, weakref.ref[Any]]]] = {}

    def name_for(self, experiment: str, model: Any, *, goes_on: bool = False) -> str:
        """The name under which a model is to train: its own if it has one, or else one that no other model has had.

        :param experiment: what a person calls it
        :param model: the module
        :param goes_on: whether to go on with the newest run of the experiment, whatever model that has trained
        """
        with self._lock:
            taken = self._taken.get(experiment, [])
            if not taken:
                return experiment
            own = [name for name, known in taken if known() is model]
            if own or goes_on:
                return own[-1] if own else taken[-1][0]
            return self._free(experiment)

    def take(self, experiment: str, name: str, model: Any) -> None:
        """Note that a model trains under a name, or its local peers are about to."""
        with self._lock:
            taken = self._taken.setdefault(experiment, [])
            if not any(known() is model and one == name for one, known in taken):
                taken.append((name, weakref.ref(model)))

    def _free(self, experiment: str) -> str:
        known = {name for taken in self._taken.values() for name, _ in taken}
        numbered = (f"{experiment}-{number}" for number in itertools.count(2))
        return next(name for name in numbered if name not in known)
