"""A notebook as VS Code shows it: Microsoft's widget manager in a web view, with a real kernel behind it.

The pages of ``vscode/`` take the place of the editor and of the Jupyter extension's scripts, which are in no registry.
The widget manager is the very package that VS Code loads, ``@vscode/jupyter-ipywidgets8``:
https://github.com/microsoft/vscode-notebook-renderers, ``package.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .conftest import wait_for

#: As in VS Code: of its notebook renderers 1.3.0, and of the Jupyter extension 2026.6.1.
WIDGET_MANAGER = "@vscode/jupyter-ipywidgets8@1.0.9"
PACKED = {
    WIDGET_MANAGER: ("dist/ipywidgets.js",),
    "@jupyter-widgets/controls@5.0.12": ("css/labvariables.css", "css/materialcolors.css"),
    "requirejs@2.3.7": ("require.js",),
}
#: The kernel's connection, and what makes one script of many modules; these need what they depend on.
INSTALLED = ("@jupyterlab/services@7.5.1", "esbuild@0.25.10")

_PAGES = Path(__file__).with_name("vscode")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def build_pages(folder: Path, cache: Path) -> None:
    """Make the pages, with the scripts that they load.

    :param folder: for the pages
    :param cache: for what npm gets, which is got once only
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm to get VS Code's widget manager with: install Node.js")
    got = cache / hashlib.sha256(repr((PACKED, INSTALLED)).encode()).hexdigest()[:16]
    if not got.exists():
        _get(npm, got)
    for file in (*_PAGES.glob("*.html"), *(got / "packed").iterdir()):
        shutil.copy(file, folder)
    scripts = [str(path) for path in sorted(_PAGES.glob("*.js"))]
    command = [str(got / "node_modules" / ".bin" / "esbuild"), *scripts, "--bundle", "--log-level=error"]
    env = {**os.environ, "NODE_PATH": str(got / "node_modules")}
    subprocess.run([*command, f"--outdir={folder}"], check=True, env=env, timeout=120)


def _get(npm: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as making:
        got = Path(making) / "got"
        (got / "packed").mkdir(parents=True)
        _get_into(got, npm)
        with contextlib.suppress(OSError):  # another process was faster
            got.rename(folder)


def _get_into(folder: Path, npm: str) -> None:
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    for package, wanted in PACKED.items():
        packed = json.loads(_npm(npm, folder, "pack", package, "--json", *quiet))
        archive = folder / packed[0]["filename"].replace("@", "").replace("/", "-")
        with tarfile.open(archive) as files:
            for name in wanted:
                content = files.extractfile(f"package/{name}")
                assert content is not None
                (folder / "packed" / Path(name).name).write_bytes(content.read())
        archive.unlink()
    _npm(npm, folder, "install", f"--prefix={folder}", *quiet, *INSTALLED)


def _npm(npm: str, folder: Path, *arguments: str) -> str:
    waiting = {**os.environ, "npm_config_fetch_retries": "1"}
    try:
        done = subprocess.run(
            [npm, *arguments], cwd=folder, env=waiting, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm {arguments[0]} does not get {WIDGET_MANAGER} and what goes with it: no answer in 300 s")
    if done.returncode:
        reason = (done.stderr.strip() or "it says nothing").splitlines()[0]
        pytest.skip(f"npm {arguments[0]} does not get {WIDGET_MANAGER} and what goes with it: {reason}")
    return done.stdout


class Notebook:
    """A notebook of its own in such a page.

    :param page: of a browser
    :param server: where a Jupyter server answers
    :param path: of the notebook, from the server's folder
    :param pages: see :func:`build_pages`
    """

    def __init__(self, page: Any, server: str, path: str, pages: Path):
        import playwright.sync_api as playwright

        self.page, self._server = page, server
        #: what the page has said is wrong
        self.errors: list[str] = []
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.request.get(f"{server}/login")  # gives the cookie without which nothing can be started
        (cookie,) = (one["value"] for one in page.context.cookies() if one["name"] == "_xsrf")
        self._headers = {"X-XSRFToken": cookie}
        wanted = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        answer = page.request.post(f"{server}/api/sessions", data=wanted, headers=self._headers)
        assert answer.ok, answer.text()
        self._session = answer.json()

        def give(route: Any) -> None:
            file = pages / route.request.url.partition("?")[0].rpartition("/")[2]
            if file.is_file():
                route.fulfill(body=file.read_bytes(), content_type=_TYPES[file.suffix])
            else:
                route.fulfill(status=404)

        page.route(f"{server}/vscode/**", give)
        # What a test gives for a page counts as from elsewhere than this machine; older browsers do not ask.
        with contextlib.suppress(playwright.Error):
            page.context.grant_permissions(["local-network-access"])

    def open(self) -> None:
        """Open it, be it again: the page knows nothing of what was shown before; the kernel goes on."""
        self.page.goto(f"{self._server}/vscode/host.html?kernel={self._session['kernel']['id']}")
        wait_for(lambda: self.page.evaluate("notebook.isReady"), 60, f"no web view, or no kernel: {self.errors}")

    @property
    def view(self) -> Any:
        """The web view, which holds all outputs."""
        return self.page.frame_locator("iframe")

    def run(self, *cells: str) -> None:
        """Run cells, and wait for their end."""
        for cell in cells:
            self.begin(cell)
            self.finish()

    def begin(self, cell: str) -> None:
        """Run a cell, and do not wait for it."""
        self.page.evaluate("cell => notebook.begin(cell)", cell)

    def finish(self) -> None:
        """Wait for the cell that was begun."""
        ended = wait_for(lambda: self.page.evaluate("notebook.ended"), 120, "the cell does not end")
        assert ended == "ok"

    def scroll_away_and_back(self) -> None:
        """All outputs leave the page, and are shown anew."""
        self.page.evaluate("for (const output of notebook.outputs()) notebook.again(output)")

    def saved(self) -> list[dict[str, str]]:
        """Names and addresses of the data that a person has asked to save."""
        return self.page.evaluate("notebook.saved")

    def close(self) -> None:
        """End the kernel."""
        self.page.request.delete(f"{self._server}/api/sessions/{self._session['id']}", headers=self._headers)
