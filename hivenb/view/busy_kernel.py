"""Clicks that act while a cell runs.

JupyterLab from 4.4 and Notebook from 7.4 send what a person does with a widget to a *subshell*: a thread of the kernel
beside the one that runs cells, which ipykernel has had since 7.0. ipykernel 7.4 sends it elsewhere again, to where the
kernel's last message on that widget came from; for a widget that a cell has made, that is the very thread that is busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: ipykernel 7.4: what of a comm (ipykernel/comm/comm.py) says where its messages go; none means where the page says.
_ROUTE = "_reply_subshell_for"


def let_clicks_through(widget: Any) -> None:
    """Let messages of a widget, and of all in it, go where the page has sent them, and so wait for no cell.

    Its handlers may run on a thread of their own then. Without effect where the kernel has no subshells, or sends such
    messages there by itself.

    :param widget: of ipywidgets, with all that is to be in it
    """
    for part in _with_descendants(widget):
        comm = getattr(part, "comm", None)
        if getattr(comm, _ROUTE, None) is not None:
            setattr(comm, _ROUTE, None)


def _with_descendants(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _with_descendants(child)
