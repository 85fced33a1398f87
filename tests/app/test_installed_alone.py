"""A wheel, and one that is built from an sdist, do all that the command promises where no source is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from building import build
from test_cli import _ask, _free_port, running

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="the tests run apart from the source tree"),
    pytest.mark.process,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def hivenb_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that holds the wheel, beside the packages of this one, which is no checkout's."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    (site,) = environment.glob("lib/python*/site-packages")
    # what a .pth file of these packages adds, such as the checkout, is not added by this one
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return environment / "bin" / "hivenb"


@pytest.fixture
def away(tmp_path: Path) -> dict[str, str]:
    """An environment of processes that know nothing of a checkout, with Jupyter's files in a folder of the test."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    private = {f"JUPYTER_{kind}_DIR": str(tmp_path / ".jupyter" / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    return {**kept, **private, "JUPYTERLAB_DIR": str(Path(sys.prefix) / "share" / "jupyter" / "lab")}


def test_it_is_the_wheel_that_runs(hivenb_alone: Path, away: dict[str, str], tmp_path: Path) -> None:
    where = "import hivenb; print(hivenb.__file__)"
    told = subprocess.run(
        [hivenb_alone.parent / "python", "-c", where],
        cwd=tmp_path,
        env=away,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(told.stdout.strip()).is_relative_to(hivenb_alone.parents[1])


@pytest.mark.long
def test_the_demo_runs(hivenb_alone: Path, away: dict[str, str], tmp_path: Path) -> None:
    with running([str(hivenb_alone), "demo", "--epochs", "4"], tmp_path, away) as demo:
        assert demo.wait(150) == 0, demo.output
    assert "3 peers" in demo.output
    assert "all peers have ended" in demo.output
    assert "Traceback" not in demo.output
    assert (tmp_path / "hivenb-demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_lab_opens_a_copy_of_the_quickstart(hivenb_alone: Path, away: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    port = _free_port()
    lab = [str(hivenb_alone), "lab", "--no-browser", "--port", str(port), "--", "--IdentityProvider.token=abc"]
    with running(lab, tmp_path, away) as server:
        server.wait_for(rf"http://\S+{port}/lab/tree/01_quickstart\.ipynb", 90)
        assert _ask(f"http://localhost:{port}/api/contents/01_quickstart.ipynb?content=0&token=abc", 30)
        server.process.terminate()
        server.wait(30)
    assert (tmp_path / "01_quickstart.ipynb").read_bytes() == (ROOT / "notebooks/01_quickstart.ipynb").read_bytes()


#: Some of what is in an sdist beside the package and all tests, as those look at it.
LOOKED_AT = frozenset(
    {
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", ".ci/run",
        "binder/constraints.txt", "notebooks/_toc.yml", "notebooks/book/start.md", "notebooks/01_quickstart.ipynb",
    }
)  # fmt: skip


def test_an_sdist_holds_what_its_tests_look_at_and_a_wheel_from_it_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
        held_by_sdist = {name.partition("/")[2] for name in opened.getnames()}
    assert held_by_sdist >= LOOKED_AT
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")} <= held_by_sdist
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        held = {name: one.getinfo(name).CRC for name in one.namelist() if not name.endswith("/RECORD")}
        assert held == {name: other.getinfo(name).CRC for name in other.namelist() if not name.endswith("/RECORD")}
    assert again.name == wheel.name
