"""What a closed dashboard leaves in the page: all that can be read, and nothing that can be pressed.

ipywidgets holds every widget until it is closed, with all that its handlers know of. A closed widget vanishes from the
page. So those that have handlers are closed, the others stay, and the oldest of them make place for a mere picture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hivenb.view.charts.panels import WIDTH
from hivenb.view.help import HELPED
from hivenb.view.notebook_output import require_ipywidgets

#: Closed dashboards that are still widgets. What a notebook that is run again and again has left before is not in the
#: page any more, or is a picture there.
MAX_CLOSED = 8

#: Of the charts, which would else take the place of the switches, too.
_WIDTH = f"{WIDTH}px"

_closed: deque[ClosedDashboard] = deque()


class ClosedDashboard:
    """The widget of a dashboard that is closed.

    :param widget: the whole of it, with handlers still; only what can be read is left in it
    :param picture: the charts in it, a widget whose value is a PNG
    """

    def __init__(self, widget: Any, picture: Any) -> None:
        #: what is left of it; ``None`` once that has made place, too
        self.widget: Any | None = widget
        self._picture = picture
        picture.layout.max_width = _WIDTH
        self._places: list[Callable[..., None]] = []
        _leave_what_is_read(widget)
        _closed.append(self)
        while len(_closed) > MAX_CLOSED:
            _closed.popleft().retire()

    def shown_by(self, show: Callable[..., None]) -> None:
        """The widget is displayed at a place.

        :param show: puts a picture there; see :func:`hivenb.view.notebook_output.show_widget`
        """
        self._places.append(show)

    def retire(self) -> None:
        """Leave a picture instead of the widget; in a layout of somebody else's, nothing."""
        widget, self.widget = self.widget, None
        for show in self._places:
            show(bytes(self._picture.value), instead=True)
        close(widget)


def close(widget: Any) -> None:
    """Close a widget with all that is in it, which ipywidgets does not do by itself."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if part is not None:
            close(part)
    widget.close()


def _leave_what_is_read(widget: Any) -> bool:
    """Take all that has handlers out of a widget and close it; whether anything is left."""
    widgets = require_ipywidgets()
    if not isinstance(widget, widgets.Box):
        return isinstance(widget, (widgets.HTML, widgets.Image))
    if HELPED in widget._dom_classes:  # what a field means tells nothing without the field
        return False
    left = [child for child in widget.children if _leave_what_is_read(child)]
    gone = [child for child in widget.children if child not in left]
    if gone:
        has_titles = isinstance(widget, (widgets.Tab, widgets.Accordion))  # by the places of its children
        widget.children = [w if w in left else widgets.HTML() for w in widget.children] if has_titles else left
    for child in gone:
        close(child)
    widget.unobserve_all()
    return bool(left)
