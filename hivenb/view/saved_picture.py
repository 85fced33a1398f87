"""The picture that is saved with a notebook in the output of a dashboard, for pages that no kernel is behind.

Front ends save the state of widgets only if they are told to, and some pages show no widgets at all. A picture in the
same output is saved with the notebook, and shown wherever the widgets are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hivenb.figures.earlier_history import whole
from hivenb.view.charts import ChartImage

if TYPE_CHECKING:
    from hivenb.run.training import TrainingRun

_EVENT = "post_run_cell"


class SavedPicture:
    """Draws the charts of a run that does not train, after each cell that has changed them: on the main thread.

    :param run: what to draw; it is not kept alive
    :param show: called with a picture, as PNG
    """

    def __init__(self, run: TrainingRun, show: Callable[[bytes], None]) -> None:
        from IPython import get_ipython

        self._run, self.show = weakref.ref(run), show
        self._drawn: int | None = None
        self._events: Any = get_ipython().events
        self._events.register(_EVENT, self.look)

    def look(self, _result: Any = None) -> None:
        """Draw what is new, unless it changes all the time."""
        run = self._run()
        if run is None:
            self.close()
        elif not run.status.state.is_active:
            snapshot = whole(run.history.snapshot())
            if snapshot.series and snapshot.version != self._drawn:
                self._drawn = snapshot.version
                self.show(ChartImage().png(snapshot))

    def close(self) -> None:
        """Draw no more. May be called twice."""
        events, self._events = self._events, None
        if events is not None:
            events.unregister(_EVENT, self.look)
