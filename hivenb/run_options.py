"""The options of a run: those in force, those on their way, and how the one become the other while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hivenb.options import FIELDS, Options
from hivenb.reconfiguration import check_change
from hivenb.run_status import RunState
from hivenb.script import describe

if TYPE_CHECKING:
    from hivenb.gate import Stage
    from hivenb.history import History


class RunOptions:
    """Holds a run's options. They change on the training thread, between two batches; or at once while none trains.

    :param options: the first ones
    :param stage: of the run
    :param history: where a change is marked
    :param train_with: lets the present training go on with other options; raises what is wrong with them
    """

    def __init__(self, options: Options, stage: Stage, history: History, train_with: Callable[[Options], None]):
        self._in_force, self._stage, self._history, self._train_with = options, stage, history, train_with
        self._pending: _Change | None = None
        #: why the options that were asked for last could not be put in force
        self.error: Exception | None = None

    @property
    def in_force(self) -> Options:
        """What the run trains with, or will when it starts."""
        return self._in_force

    @property
    def pending(self) -> Options | None:
        """What was asked for and is not in force yet."""
        change = self._pending
        return None if change is None else change.options

    def apply(self, options: Options | None, changes: dict[str, Any], wait: bool) -> Options:
        """See :meth:`hivenb.TrainingRun.apply`."""
        with self._stage.changed:
            new = (options or self.pending or self._in_force).replace(**changes)
            self.error = None
            if not self._stage.state.is_active:
                self._put_in_force(new)
                return new
            check_change(self._in_force, new)
            change = self._pending = _Change(new)
            self._stage.hand_in(lambda: self._carry_out(change))
            if not wait:
                return new
            self._stage.wait_until(lambda: change.is_settled)
        if change.error is not None:
            raise change.error
        return new

    def _carry_out(self, change: _Change) -> None:
        try:
            self._train_with(change.options)
        except Exception as e:  # surfaces in apply() and in the panel
            change.error = self.error = e
            self._history.mark("option", f"options not changed: {type(e).__name__}")
        with self._stage.changed:
            if change.error is None:
                self._put_in_force(change.options)
            if self._pending is change:
                self._pending = None
            change.is_settled = True
            self._stage.notify()

    def _put_in_force(self, options: Options) -> None:
        for name, (_, value) in self._in_force.difference(options).items():
            if self._stage.state is not RunState.READY:
                shown = value if isinstance(value, str) else describe(value)
                self._history.mark("option", f"{FIELDS[name].label}: {shown}")
        self._in_force = options


class _Change:
    """Options that were asked for, and what became of them."""

    def __init__(self, options: Options):
        self.options = options
        self.error: Exception | None = None
        self.is_settled = False
