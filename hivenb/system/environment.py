"""Where this code runs: Colab, Kaggle, Binder, VS Code, a Jupyter kernel, a terminal or a script.

It looks at environment variables and at modules that are loaded already, and imports nothing to find out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hivenb.errors import HivenbError, PlatformError


class Kind(str, Enum):
    """The places that hivenb knows, each with habits of its own."""

    COLAB = "colab"
    KAGGLE = "kaggle"
    BINDER = "binder"
    VSCODE = "vscode"
    JUPYTER = "jupyter"
    IPYTHON = "ipython"
    SCRIPT = "script"


@dataclass(frozen=True)
class Environment:
    """What hivenb needs to know about the place it runs in.

    :param kind: the place; a script that runs on Colab, Kaggle or Binder is still of that kind
    :param interactive: a person can type the next line, in a notebook or in a terminal
    :param has_widgets: a notebook kernel with ipywidgets installed; elsewhere the text view is the one to use
    :param reachable: other machines may be able to connect to this one. On Colab, Kaggle and Binder they never can, so
      a peer there is reached through a relay, or is a client, and cannot be the first one of a swarm.
    """

    kind: Kind
    interactive: bool
    has_widgets: bool
    reachable: bool


# A variable that the place itself sets in every process, scripts included.
_HOSTED = {
    Kind.COLAB: ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION"),
    Kind.KAGGLE: ("KAGGLE_KERNEL_RUN_TYPE",),
    Kind.BINDER: ("BINDER_SERVICE_HOST", "BINDER_LAUNCH_HOST"),
}


def detect(environ: Mapping[str, str] | None = None, modules: Mapping[str, Any] | None = None) -> Environment:
    """Find out where this code runs.

    :param environ: environment variables; this process's by default
    :param modules: loaded modules by name; this process's by default
    """
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    shell = _shell(modules)
    in_kernel = getattr(shell, "kernel", None) is not None
    kind = _kind(environ, modules, shell, in_kernel)
    return Environment(
        kind=kind,
        interactive=shell is not None or hasattr(sys, "ps1"),
        has_widgets=in_kernel and find_spec("ipywidgets") is not None,
        reachable=kind not in _HOSTED,
    )


def _shell(modules: Mapping[str, Any]) -> Any:
    ipython = modules.get("IPython")
    get_ipython = getattr(ipython, "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def _kind(environ: Mapping[str, str], modules: Mapping[str, Any], shell: Any, in_kernel: bool) -> Kind:
    for kind, variables in _HOSTED.items():
        if any(environ.get(variable) for variable in variables):
            return kind
    if "google.colab" in modules:
        return Kind.COLAB
    if in_kernel:
        # VS Code's terminals have such variables too, so they say something only inside a kernel.
        vscode = "__vsc_ipynb_file__" in getattr(shell, "user_ns", {}) or bool(environ.get("VSCODE_PID"))
        return Kind.VSCODE if vscode else Kind.JUPYTER
    return Kind.SCRIPT if shell is None else Kind.IPYTHON


def install_command(environment: Environment | None = None) -> str:
    """Return what installs a release of hivenb in a notebook cell or a terminal of this place: a line, or two.

    hivenb is not on PyPI yet: until it is, the name of a wheel, as ``pip wheel --no-deps .`` makes, takes its place.

    In a cell, pip is held to what is installed already: a plain install would replace packages that others there need,
    and that the kernel has loaded. On Colab these are protobuf, grpcio and setuptools, since hivemind asks for
    grpcio-tools, of which pip takes the newest. The list is in a file beside the notebook then, ``installed.txt``.

    :param environment: the place; detected by default
    """
    environment = detect() if environment is None else environment
    if environment.has_widgets or environment.kind in (Kind.COLAB, Kind.JUPYTER, Kind.KAGGLE, Kind.VSCODE):
        return "%pip list --format=freeze > installed.txt\n%pip install -q hivenb pandas scikit-learn -c installed.txt"
    return 'pip install "hivenb[demo]"'


def require_linux(platform: str | None = None) -> None:
    """Stop with a clear sentence where hivemind cannot run.

    :param platform: a name as in ``sys.platform``, which is the default
    :raises PlatformError: if this is not Linux
    """
    platform = sys.platform if platform is None else platform
    if platform.startswith("linux"):
        return
    way_out = {
        "win32": "open it inside WSL 2 (wsl --install), where everything works",
        "darwin": "run it in a Linux container or virtual machine",
    }.get(platform, "run it on a Linux machine")
    raise PlatformError(
        f"hivenb trains on Linux only, because hivemind's network daemon does, and this is {platform!r}: "
        f"{way_out}, or use a hosted notebook such as Colab or Binder"
    )


def notebook(name: str = "01_quickstart") -> Path:
    """Return the path of one of hivenb's notebooks, from a source checkout or from an installed package.

    :param name: file name, with or without ``.ipynb``
    :raises HivenbError: if there is no such notebook; the message lists those that are there
    """
    folder = _notebook_folder()
    path = folder / f"{name.removesuffix('.ipynb')}.ipynb"
    if not path.is_file():
        there = ", ".join(sorted(one.stem for one in folder.glob("*.ipynb"))) or "none"
        raise HivenbError(f"hivenb has no notebook {name!r}; there are: {there}")
    return path


def _notebook_folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "_notebooks"
    return installed if installed.is_dir() else package.parent / "notebooks"
