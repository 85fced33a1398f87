"""What a field means, beside the field, in words that every front end shows.

ipywidgets 8 shows the tooltip of a button and of a slider, but not that of a field with a description; a tooltip says
nothing to a finger or a keyboard either. So beside each field is a question mark: a pointer over it reads the text as
its title, and a click, a tap, or Enter unfolds it below the field. It is plain HTML, without a script.
"""

from __future__ import annotations

from typing import Any

from hivenb.view.notebook_output import require_ipywidgets
from hivenb.view.style import safe

#: The class of a field with its question mark.
HELPED = "hivenb-helped"


def with_help(field: Any, text: str, *below: Any) -> Any:
    """A field with its question mark, as one widget.

    :param field: a widget with a description
    :param text: what the field means
    :param below: further widgets that belong to it
    """
    widgets = require_ipywidgets()
    mark = widgets.HTML(help_html(text), layout=widgets.Layout(margin="0", width="auto"))
    whole = widgets.VBox([field, mark, *below], layout=widgets.Layout(overflow="visible", min_width="0"))
    whole.add_class(HELPED)
    return whole


def help_html(text: str) -> str:
    """The question mark, and what it unfolds."""
    # Without the attribute, JupyterLab and Notebook 7 take Enter and Space for commands to the cell.
    return (
        f'<details class="hivenb-help" data-lm-suppress-shortcuts="true">'
        f'<summary title="{safe(text)}" aria-label="What is this?">?</summary>'
        f'<div class="hivenb-note">{safe(text)}</div></details>'
    )


def tooltip(text: str) -> dict[str, str]:
    """The keyword argument by which a control is given its tooltip, for front ends that show it."""
    # ipywidgets 7 knows it as its description_tooltip.
    return {"tooltip" if hasattr(require_ipywidgets().DOMWidget, "tooltip") else "description_tooltip": text}
