from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest

from hivenb.errors import HivenbError, PlatformError
from hivenb.system import environment
from hivenb.system.environment import Environment, Kind, detect


def loaded_ipython(*, kernel: bool, **names):
    shell = SimpleNamespace(user_ns=names)
    if kernel:
        shell.kernel = object()
    return {"IPython": SimpleNamespace(get_ipython=lambda: shell)}


KERNEL = loaded_ipython(kernel=True)
TERMINAL = loaded_ipython(kernel=False)


@pytest.mark.parametrize(
    ("environ", "modules", "kind", "interactive"),
    [
        ({"COLAB_RELEASE_TAG": "release-colab-1"}, KERNEL, Kind.COLAB, True),
        ({}, {**KERNEL, "google.colab": object()}, Kind.COLAB, True),
        ({"COLAB_RELEASE_TAG": "release-colab-1"}, {}, Kind.COLAB, False),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, KERNEL, Kind.KAGGLE, True),
        ({"BINDER_SERVICE_HOST": "hub"}, KERNEL, Kind.BINDER, True),
        ({"VSCODE_PID": "1"}, KERNEL, Kind.VSCODE, True),
        ({}, loaded_ipython(kernel=True, __vsc_ipynb_file__="a.ipynb"), Kind.VSCODE, True),
        ({}, KERNEL, Kind.JUPYTER, True),
        ({"VSCODE_PID": "1"}, TERMINAL, Kind.IPYTHON, True),
        ({}, TERMINAL, Kind.IPYTHON, True),
        ({"VSCODE_PID": "1"}, {}, Kind.SCRIPT, False),
        ({}, {"IPython": SimpleNamespace(get_ipython=lambda: None)}, Kind.SCRIPT, False),
        ({"COLAB_RELEASE_TAG": ""}, {}, Kind.SCRIPT, False),
    ],
)
def test_detect(environ, modules, kind, interactive, monkeypatch):
    monkeypatch.delattr(sys, "ps1", raising=False)  # which a test with an IPython shell leaves behind
    found = detect(environ, modules)
    assert (found.kind, found.interactive) == (kind, interactive)
    assert found.reachable == (kind not in (Kind.COLAB, Kind.KAGGLE, Kind.BINDER))


def test_widgets_need_a_kernel():
    assert detect({}, KERNEL).has_widgets
    assert not detect({}, TERMINAL).has_widgets
    assert not detect({}, {}).has_widgets


def test_widgets_need_ipywidgets(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert not detect({}, KERNEL).has_widgets


def test_the_environment_is_a_value():
    found = detect({}, {})
    assert found == detect({}, {})
    with pytest.raises(FrozenInstanceError):
        found.kind = Kind.COLAB


@pytest.mark.process
def test_detecting_imports_nothing():
    script = (
        "import sys; from hivenb.system.environment import detect; print(detect().kind.value);"
        "print([name for name in ('IPython', 'ipywidgets', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    ("kind", "has_widgets", "in_cell"),
    [
        (Kind.COLAB, False, True),
        (Kind.KAGGLE, True, True),
        (Kind.JUPYTER, False, True),
        (Kind.VSCODE, False, True),
        (Kind.BINDER, True, True),
        (Kind.BINDER, False, False),
        (Kind.IPYTHON, False, False),
        (Kind.SCRIPT, False, False),
    ],
)
def test_install_command(kind, has_widgets, in_cell):
    place = Environment(kind=kind, interactive=True, has_widgets=has_widgets, reachable=False)
    command = environment.install_command(place)
    if not in_cell:
        assert command == 'pip install "hivenb[demo]"'
        return
    before, install = command.splitlines()
    listed = before.removeprefix("%pip list --format=freeze > ")
    assert install.startswith("%pip install -q hivenb ")
    assert install.endswith(f" -c {listed}")


def test_linux_is_fine():
    environment.require_linux("linux")


@pytest.mark.parametrize(
    ("platform", "way_out"), [("win32", "WSL 2"), ("darwin", "container"), ("freebsd14", "Linux machine")]
)
def test_other_systems_are_told_what_to_do(platform, way_out):
    with pytest.raises(PlatformError, match=f"'{platform}'.*{way_out}"):
        environment.require_linux(platform)


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "hivenb").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "hivenb" / "system" / "environment.py"))
    return tmp_path


@pytest.mark.parametrize("folder", ["notebooks", "hivenb/_notebooks"])
def test_notebook_in_a_checkout_and_in_a_package(package, folder):
    (package / folder).mkdir()
    expected = package / folder / "01_quickstart.ipynb"
    expected.write_text("{}")
    assert environment.notebook() == environment.notebook("01_quickstart.ipynb") == expected


def test_unknown_notebook_names_those_there_are(package):
    with pytest.raises(HivenbError, match="there are: none"):
        environment.notebook("tour")
    (package / "notebooks").mkdir()
    (package / "notebooks" / "b.ipynb").touch()
    (package / "notebooks" / "a.ipynb").touch()
    with pytest.raises(HivenbError, match=r"no notebook 'tour'; there are: a, b"):
        environment.notebook("tour")
