"""What a cell shows: the widget in a kernel, text in a terminal and without ipywidgets."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ipywidgets
import pytest

from hivenb.errors import MissingDependencyError
from hivenb.view import notebook_output


class Shell:
    """Stands where IPython's kernel shell would."""

    kernel = object()


class Handle:
    """What display() gives."""

    def __init__(self, bundles: list[dict[str, Any]]):
        self._bundles = bundles

    def update(self, bundle: dict[str, Any], raw: bool) -> None:
        self._bundles.append(bundle)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    bundles: list[dict[str, Any]] = []

    def display(bundle: dict[str, Any], raw: bool, display_id: bool = False) -> Handle | None:
        bundles.append(bundle)
        return Handle(bundles) if display_id else None

    monkeypatch.setattr("IPython.display.display", display)
    return bundles


def test_a_widget_is_shown_with_our_own_text(shown: list[dict[str, Any]]) -> None:
    widget = ipywidgets.HTML("x")
    notebook_output.show_widget(widget, "a dashboard")
    assert shown[0]["text/plain"] == "a dashboard"
    assert set(shown[0]) == {"text/plain", notebook_output.VIEW}


def test_a_picture_comes_beside_the_widget(shown: list[dict[str, Any]]) -> None:
    add_picture = notebook_output.show_widget(ipywidgets.HTML("x"), "a dashboard")
    add_picture(b"png")
    assert shown[1] == {**shown[0], "image/png": "cG5n"}


def test_what_front_ends_get_is_what_ipywidgets_would_send(shown: list[dict[str, Any]]) -> None:
    widget = ipywidgets.HTML("x")
    notebook_output.show_widget(widget, "a dashboard")
    if hasattr(widget, "_repr_mimebundle_"):
        theirs = widget._repr_mimebundle_()
    else:
        widget._ipython_display_()
        theirs = shown[-1]
    assert shown[0][notebook_output.VIEW] == theirs[notebook_output.VIEW]


def test_widgets_work_in_a_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    assert not notebook_output.widgets_work()
    monkeypatch.setattr("IPython.get_ipython", lambda: object())
    assert not notebook_output.widgets_work(), "IPython in a terminal"
    monkeypatch.setattr("IPython.get_ipython", Shell)
    assert notebook_output.widgets_work()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert not notebook_output.widgets_work()


def test_without_ipywidgets_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ipywidgets>=7\.7'"):
        notebook_output.require_ipywidgets()


def test_in_a_terminal_a_dashboard_is_text(scene: Any, shown: list[dict[str, Any]]) -> None:
    from hivenb.view.dashboard import Dashboard

    made = Dashboard(scene)
    made._ipython_display_()
    assert shown[0]["text/plain"].startswith("ready to start  swarm epoch 14")
    assert set(shown[0]) == {"text/plain"}


@pytest.mark.process
def test_text_needs_neither_widgets_nor_pictures() -> None:
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "import hivenb.view.text, hivenb.view.formats, hivenb.view.dashboard_state\n"
        "from hivenb.view.notebook_output import widgets_work\n"
        "print(widgets_work())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
