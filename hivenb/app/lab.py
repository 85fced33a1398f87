"""Opening JupyterLab on the quickstart notebook."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from hivenb.errors import MissingDependencyError
from hivenb.system.environment import notebook
from hivenb.view.terminal import Terminal


def open_lab(browser: bool, port: int | None, further: Sequence[str], terminal: Terminal) -> None:
    """Become JupyterLab on the quickstart notebook, in this process, so that Ctrl-C goes there. Does not return.

    :param browser: open it in the browser, too
    :param port: where to listen; ``None`` for a port that is free
    :param further: options that JupyterLab is to have as well
    :param terminal: where to say which notebook it is
    :raises MissingDependencyError: if JupyterLab is not installed
    :raises HivenbError: if the notebook is not there
    """
    if find_spec("jupyterlab") is None:
        raise MissingDependencyError('JupyterLab is not installed: pip install "hivenb[demo]"')
    path = own_copy(notebook(), Path.cwd())
    terminal.say(f"opening {path}; Ctrl-C here ends JupyterLab and all notebooks in it")
    # not simply the path: the address that is shown without a browser would then lead to an empty JupyterLab
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={path.parent}",
        f"--LabApp.default_url=/lab/tree/{quote(path.name)}",
    ]
    if not browser:
        command.append("--no-browser")
    if port is not None:
        # retries would silently take another port than the one asked for
        command += [f"--port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:  # the rule on a container; Jupyter would end with a question instead
        command.append("--allow-root")
    os.execv(sys.executable, [*command, *further])


def own_copy(original: Path, folder: Path) -> Path:
    """The notebook to open: not the one inside an installed package, but a person's own.

    :param original: the notebook that comes with hivenb
    :param folder: where the person works; a notebook of this name there is used as it is
    :returns: the original in a checkout of the source; else a copy in ``folder``, or in a temporary folder if
      ``folder`` cannot be written
    """
    if original.parent.name != "_notebooks":
        return original
    own = folder / original.name
    if own.exists():
        return own
    if not os.access(folder, os.W_OK):
        own = Path(tempfile.mkdtemp(prefix="hivenb-")) / original.name
    shutil.copyfile(original, own)
    return own
