"""The runs of this process in a swarm: under which names they train, and which one others are to join.

A model that was made anew does not go on with what another has learned. A person names an *experiment*, with
``Options(run_id=...)`` or not at all, and runs the cells again. Each model is a run of its own in the DHT: the first
one has the name of the experiment, the next ones have a number behind it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Protocol

from hivenb.options.options import Options

# -- names -----------------------------------------------------------------------------------------------------------


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


# -- those that train ------------------------------------------------------------------------------------------------


class Trains(Protocol):
    """What trains in a swarm."""

    @property
    def options(self) -> Options:
        """The options in force, with its name."""

    @property
    def is_active(self) -> bool:
        """Whether it is at work, or about to be."""

    @property
    def exception(self) -> BaseException | None:
        """What has ended it, if that was an error."""

    def stop(self) -> None:
        """End training; returns when it has ended."""


class Runs:
    """The runs of one swarm, for as long as somebody else holds them. Any thread may call.

    :param run_id: the name of the run to which the swarm leads before the first of them
    """

    def __init__(self, run_id: str):
        self._known_run_id = run_id
        self._runs: tuple[weakref.ref[Trains], ...] = ()
        self._adopting = threading.Lock()

    def adopt(self, run: Trains) -> None:
        """Let the swarm stop a run before it closes, unless nobody holds the run by then.

        :param run: the newest one of the swarm from now on
        """
        with self._adopting:
            known = tuple(one for one in self._runs if one() is not None and one() is not run)
            self._runs = (*known, weakref.ref(run))
            self._known_run_id = run.options.run_id

    def lead_to(self, run_id: str) -> None:
        """Take another name than those of the runs here for the newest one, until one of them trains."""
        self._known_run_id = run_id

    @property
    def newest_run_id(self) -> str:
        """See :attr:`hivenb.Swarm.newest_run_id`."""
        runs = [run for run in (known() for known in reversed(self._runs)) if run is not None]
        usable = [run for run in runs if run.is_active] or [run for run in runs if run.exception is None]
        return usable[0].options.run_id if usable else self._known_run_id

    def stop(self) -> None:
        """Stop all of them; returns when they have ended."""
        for known in self._runs:
            if (run := known()) is not None:
                run.stop()
