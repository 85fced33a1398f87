from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

import pytest

import hivenb

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests run apart from the source tree"
)


def build(target: str, into: Path) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed in this environment")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def test_the_wheel_has_the_version_of_the_package(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    described = BytesParser().parsebytes(wheel.read(name))
    assert described["Name"] == "hivenb"
    assert described["Version"] == hivenb.__version__
    assert described["License-Expression"] == "Apache-2.0"


def test_the_wheel_carries_every_module_and_the_licence(wheel):
    carried = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hivenb").rglob("*.py")}
    assert modules <= carried
    assert {"hivenb/py.typed", "hivenb/view/chart_pointer.js"} <= carried
    assert any(name.endswith("licenses/LICENSE") for name in carried)
    assert not any(name.startswith(("tests/", "notebooks/")) for name in carried)
    assert {Path(name).suffix for name in carried if name.startswith("hivenb/_notebooks/")} == {".ipynb", ".png"}


def test_the_wheel_installs_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "hivenb = hivenb.app.cli:main" in wheel.read(name).decode()


def test_notebooks_are_found_from_a_wheel(wheel, tmp_path):
    there = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    if not there:
        pytest.skip("there is no notebook yet")
    wheel.extractall(tmp_path)
    script = "from hivenb.system.environment import notebook; import sys; print(notebook(sys.argv[1]))"
    for name in there:
        done = subprocess.run(
            [sys.executable, "-c", script, name],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found = Path(done.stdout.strip())
        assert found.is_relative_to(tmp_path)
        assert found.read_bytes() == (ROOT / "notebooks" / name).read_bytes()


def test_an_installed_package_knows_its_version():
    try:
        installed = metadata.version("hivenb")
    except metadata.PackageNotFoundError:
        pytest.skip("hivenb is imported from the checkout and not installed")
    assert installed == hivenb.__version__


def test_ci_and_readme_give_the_same_commands():
    ci, readme = (ROOT / ".ci" / "run").read_text().replace(" --quiet", ""), (ROOT / "README.md").read_text()
    install = 'pip install -e ".[test]" -c binder/constraints.txt'
    without, with_processes = 'pytest -m "not process" -n auto', "pytest -m process -n 2 --dist loadfile"
    assert f"{install}\n{without} && {with_processes}\n" in readme
    assert all(f"{command}\n" in ci for command in (install, without, with_processes))
    fuzzer, minute = 'pip install -e ".[fuzz]" -c binder/constraints.txt', "python -m tests.fuzzing --seconds 60"
    assert f"{fuzzer}\n{minute}\n" in readme
    assert f"{fuzzer}\n" in ci
    assert f"{minute} --seed 1\n" in ci
    install_book = 'pip install -e ".[book]" -c binder/constraints.txt'
    build_book = "jupyter-book build notebooks --path-output build/book -W -n --keep-going"
    assert f"{install_book}\n{build_book}\n" in readme
    assert f"{build_book}\n" in ci
    assert 'pip install -e ".[demo]" -c binder/constraints.txt && hivenb demo' in readme
    assert 'readme = "README.md"' in (ROOT / "pyproject.toml").read_text()


def test_the_changelog_knows_this_version_or_has_what_is_unreleased():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert {"Unreleased", hivenb.__version__} & set(headings)


def test_compromised_lightning_releases_are_refused():
    text = (ROOT / "pyproject.toml").read_text()
    assert "!=2.6.2" in text
    assert "!=2.6.3" in text
