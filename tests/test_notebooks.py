"""What holds for all notebooks as they are committed, and that their install cell leaves Colab as it is."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
from environments import colab_constraints, colab_packages, interpreter

from hivenb.system.environment import Environment, Kind, install_command

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests run apart from the source tree"
)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

INSTALL = install_command(Environment(kind=Kind.COLAB, interactive=True, has_widgets=True, reachable=False))

#: The first cell of code of every notebook.
INSTALL_CELL = f"""\
import importlib.util

if importlib.util.find_spec("hivenb") is None:
    # What is installed here stays as it is: others need it, on Colab above all. Packages are only added.
{indent(INSTALL, "    ")}"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_installs_hivenb_in_the_same_way(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert first == INSTALL_CELL, (
        f"{path.name}: the first cell of code has to be tests/test_notebooks.py's INSTALL_CELL, letter by letter; "
        f"replace its source by\n\n{INSTALL_CELL}\n"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_says_that_its_install_cell_needs_a_release(path):
    """Take this test out with the first one, as CONTRIBUTING says: hivenb is not on PyPI yet."""
    opening = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    assert "\n\nhivenb is not on PyPI yet: install it from a clone" in opening


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> ColabInName:
    python = interpreter("3.13")
    if python is None:
        pytest.skip("there is no Python 3.13, which Colab has")
    pytest.importorskip("hatchling", reason="hatchling is not installed in this environment")
    return ColabInName(python, tmp_path_factory.mktemp("colab"))


# What it finds depends on what others have released since, not on a change of ours.
@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
def test_the_install_cell_replaces_nothing_on_colab(colab):
    """And without what holds it fast, the second of its lines would, so that this can fail."""
    listing, install = (line.removeprefix("%pip ") for line in INSTALL.splitlines())
    colab.shell(listing)
    added = colab.installed_by(install)
    assert {"hivenb", "hivemind", "lightning", "grpcio-tools"} <= set(added)
    assert replaced(added) == {}
    assert {"protobuf", "grpcio"} <= set(replaced(colab.installed_by(install.partition(" -c ")[0])))


class ColabInName:
    """An environment with the names and versions of all packages on Colab, and nothing in them.

    Whatever pip looks at has its requirements, too, as the index gives them; of torch's, those that come with CUDA are
    left out, which the build on Colab, of another index, does not have.

    :param python: a Python of Colab's version
    :param folder: an empty one
    """

    def __init__(self, python: Path, folder: Path) -> None:
        self._folder, self._environment = folder, folder / "environment"
        self._pip = shlex.join([str(python), "-m", "pip", "--python", str(self._environment / "bin" / "python")])
        wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True, timeout=60)
        subprocess.run([python, "-m", "venv", "--without-pip", self._environment], check=True, timeout=60)
        (folder / "known.txt").write_text("\n".join(colab_constraints()))
        looked_at = self.metadata_of("install -q hivenb pandas scikit-learn -c known.txt")
        (site,) = self._environment.glob("lib/python*/site-packages")
        for name, version in colab_packages().items():
            about = site / f"{normal(name).replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            requirements = looked_at.get(normal(name), {}).get("requires_dist", [])
            lines = [f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {one}" for one in requirements if not re.match(r"nvidia|cuda|triton", one)]
            (about / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))

    def shell(self, arguments: str) -> None:
        """Run pip as a cell does, by a shell."""
        done = subprocess.run(
            f"{self._pip} {arguments}", shell=True, cwd=self._folder, capture_output=True, text=True, timeout=170
        )
        if "No matching distribution found for hivemind" in done.stderr:
            pytest.skip("there is no index of packages to be reached")
        assert done.returncode == 0, done.stderr[-3000:]

    def metadata_of(self, install: str) -> dict[str, dict]:
        """What a line would install, by its normal name."""
        self.shell(f"{install} --dry-run --find-links . --report report.json")
        report = json.loads((self._folder / "report.json").read_text())
        return {normal(one["metadata"]["name"]): one["metadata"] for one in report["install"]}

    def installed_by(self, install: str) -> dict[str, str]:
        """Which versions a line would install, by their normal names."""
        return {name: metadata["version"] for name, metadata in self.metadata_of(install).items()}


def replaced(installed: dict[str, str]) -> dict[str, str]:
    """What of it is on Colab already, in another version or, torch above all, in another build."""
    there = {normal(name) for name in colab_packages()}
    return {name: version for name, version in installed.items() if name in there}


def normal(name: str) -> str:
    """A name as an index knows it."""
    return re.sub(r"[-_.]+", "-", name).lower()
