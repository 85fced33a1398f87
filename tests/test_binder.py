from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BINDER = ROOT / "binder"

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests run apart from the source tree"
)


def lines_of(name: str) -> list[str]:
    lines = [line.strip() for line in (BINDER / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def constraints() -> dict[str, Requirement]:
    pins = [Requirement(line) for line in lines_of("constraints.txt")]
    return {pin.name.lower(): pin for pin in pins}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    if not shutil.which("jupyter-repo2docker", path=str(Path(sys.executable).parent)):
        pytest.skip("jupyter-repo2docker is not installed in this environment")
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_binder_builds_the_python_that_is_tested(dockerfile):
    assert re.search(r"environment.*3.{1,3}11.*lock", dockerfile)


def test_binder_installs_the_requirements_once_the_package_is_there(dockerfile):
    copied = dockerfile.index("COPY --chown=0:0 src/ ${REPO_DIR}/")
    installed = dockerfile.index('pip install --no-cache-dir -r "binder/requirements.txt"')
    assert copied < installed


def test_binder_installs_the_package_in_the_tested_versions_with_the_cpu_build():
    lines = lines_of("requirements.txt")
    assert "-c constraints.txt" in lines
    assert "." in lines
    assert any(line.startswith("--extra-index-url") and line.endswith("/cpu") for line in lines)


def test_binder_has_what_the_demo_needs_but_for_its_own_jupyterlab():
    listed = {line for line in lines_of("requirements.txt") if re.fullmatch(r"[\w-]+", line)}
    demo = {Requirement(line).name for line in project()["optional-dependencies"]["demo"]}
    assert listed == demo - {"jupyterlab"}


def test_what_needs_a_newer_python_than_the_oldest_is_pinned_for_newer_ones_only():
    """Else whoever has the oldest Python that hivenb supports cannot install it as the README says."""
    oldest = {"python_version": "3.10", "python_full_version": "3.10.0"}
    looked_at = 0
    for name, pin in constraints().items():
        try:
            described = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        if pin.specifier.contains(described["Version"]) and described["Requires-Python"]:
            looked_at += 1
            can_have_it = SpecifierSet(described["Requires-Python"]).contains("3.10")
            is_for_it = pin.marker is None or pin.marker.evaluate(oldest)
            assert can_have_it or not is_for_it, f"{name} is not to be had for Python 3.10"
    assert looked_at > 30


def test_every_constraint_is_one_exact_version():
    for pin in constraints().values():
        (only,) = pin.specifier
        assert only.operator == "==", pin
        assert "*" not in only.version, pin
        assert pin.url is None, pin


def test_no_package_is_held_to_two_versions():
    names = [canonicalize_name(Requirement(line).name) for line in lines_of("constraints.txt")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_direct_dependency_has_a_tested_version_within_its_range():
    pins = constraints()
    extras = project()["optional-dependencies"]
    for line in [*project()["dependencies"], *(one for extra in extras.values() for one in extra)]:
        wanted = Requirement(line)
        if wanted.name == "hivenb" or wanted.marker is not None:
            continue
        assert wanted.name.lower() in pins, f"{wanted.name} is missing in binder/constraints.txt"
        (tested,) = pins[wanted.name.lower()].specifier
        assert wanted.specifier.contains(tested.version), f"{line} leaves out the tested {tested.version}"


def test_runtime_is_supported_by_the_package():
    (runtime,) = lines_of("runtime.txt")
    assert Requirement(f"python{project()['requires-python']}").specifier.contains(runtime.removeprefix("python-"))


def test_binder_starts_jupyter_through_our_script(dockerfile):
    start = BINDER / "start"
    assert os.access(start, os.X_OK)
    assert start.read_text().rstrip().endswith('exec "$@"')
    assert "binder/start" in dockerfile
