"""Show an object as a widget where widgets work, and as text everywhere else."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hivenb.errors import MissingDependencyError

# -- busy kernel -----------------------------------------------------------------------------------------------------
#
# Clicks that act while a cell runs.
#
# JupyterLab from 4.4 and Notebook from 7.4 send what a person does with a widget to a *subshell*: a thread of the
# kernel beside the one that runs cells, which ipykernel has had since 7.0. ipykernel 7.4 sends it elsewhere again, to
# where the kernel's last message on that widget came from; for a widget that a cell has made, that is the very thread
# that is busy.


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


# -- display ---------------------------------------------------------------------------------------------------------


VIEW = "application/vnd.jupyter.widget-view+json"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if sys.modules.get("IPython") is None:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def widgets_work() -> bool:
    """Whether this process is the kernel of a notebook and has ipywidgets."""
    if not in_notebook():
        return False
    try:
        require_ipywidgets()
    except MissingDependencyError:
        return False
    return True


def require_ipywidgets() -> Any:
    """The module ipywidgets.

    :raises MissingDependencyError: if it is not installed
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise MissingDependencyError(
            "the widgets of hivenb need ipywidgets, which is not installed: pip install 'ipywidgets>=7.7'. "
            "Without it, print(dashboard.text()) shows the same."
        ) from error
    return ipywidgets


def show_widget(widget: Any, text: str) -> Callable[..., None]:
    """Display a widget under the cell that runs now.

    :param widget: of ipywidgets 7 or 8
    :param text: what front ends without widgets show, and what is compared when the notebook is tested
    :returns: what puts a picture, as PNG, beside it, for pages that show no widgets, or, with ``instead=True``, in its
        place
    """
    from IPython.display import display

    # What ipywidgets 7 and 8 send as well, by different hooks, but for the text: they would put the widget's
    # whole repr there, which no two versions write alike.
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    bundle = {"text/plain": text, VIEW: view}
    let_clicks_through(widget)
    handle = display(bundle, raw=True, display_id=True)

    def add_picture(png: bytes, instead: bool = False) -> None:
        kept = {"text/plain": text} if instead else bundle
        handle.update({**kept, "image/png": base64.b64encode(png).decode()}, raw=True)

    return add_picture


def show_text(text: str) -> None:
    """Show text as the result of the cell or the line that runs now."""
    from IPython.display import display

    display({"text/plain": text}, raw=True)


def show_bundle(bundle: dict[str, str]) -> Callable[[dict[str, str]], None]:
    """Show something in several forms, by their types, as the result of the cell or the line that runs now.

    :returns: what puts something else in its place
    """
    from IPython.display import display

    handle = display(bundle, raw=True, display_id=True)
    return lambda other: handle.update(other, raw=True)


def cell_number() -> int | None:
    """The number of the cell that runs now; ``None`` where there are no cells."""
    if sys.modules.get("IPython") is None:
        return None
    from IPython import get_ipython

    return getattr(get_ipython(), "execution_count", None)
