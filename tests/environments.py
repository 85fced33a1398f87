"""Builds an environment by hand and runs hivenb in it: ``python tests/environments.py NAME``.

``colab`` has Python 3.13 and, of what hivenb and its tests need, the versions that Colab says it has
(``tests/colab_packages.txt``); ``python3.10``, ``python3.12`` and ``python3.13`` have the newest release of everything.
In each, the tests that start no process run, then every notebook, and a table says how they ended. That takes gigabytes
of packages and a quarter of an hour or more. Which index pip asks, and so which build of torch it finds, is for pip's
own configuration to say.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: By the name of an environment, the Python that it has.
PYTHONS = {"colab": "3.13", "python3.10": "3.10", "python3.12": "3.12", "python3.13": "3.13"}

#: What decides how hivenb behaves, for the first lines of the report.
TELLING = (
    *("torch", "lightning", "hivemind", "numpy", "protobuf", "grpcio", "grpcio-tools"),
    *("ipykernel", "ipython", "ipywidgets", "jupyter_client", "pytest"),
)

#: Of the tests' tools, those that Colab's older Jupyter leaves no room for; tests that need one are skipped.
NOT_ON_COLAB = {"hivenb", "jupyter-repo2docker", "playwright"}


def interpreter(version: str) -> Path | None:
    """Find a Python on this machine.

    :param version: such as ``3.13``
    :returns: its executable, or None if there is none, or only a launcher without a Python behind it
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    for path in [*([Path(found)] if found else []), *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]:
        asked = subprocess.run([path, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
        if asked.returncode == 0:
            return Path(asked.stdout.strip())
    return None


def colab_packages() -> dict[str, str]:
    """What Colab says is installed there: versions by name, as the list spells it."""
    lines = (ROOT / "tests" / "colab_packages.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def colab_constraints() -> list[str]:
    """That list as far as any index has it: without builds for one kind of machine, and without parts of CUDA."""
    return [
        f"{name}=={version.partition('+')[0]}"
        for name, version in colab_packages().items()
        if not name.startswith("nvidia-")
    ]


def build(name: str, folder: Path) -> Path:
    """Make an environment, and install hivenb's checkout, the demonstration's needs and the tests' tools.

    :param name: one of :data:`PYTHONS`
    :param folder: where it is to be; one that is there already is used as it is, and what is missing is added
    :returns: its Python
    """
    base = interpreter(PYTHONS[name])
    if base is None:
        sys.exit(f"{name} needs Python {PYTHONS[name]}, and this machine has none")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name == "colab":
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(colab_constraints()))
        there = ["ipykernel", "pandas", "scikit-learn", "transformers"]
        wanted = ["-e", str(ROOT), "-c", str(constraints), *there, *tools()]
    else:
        wanted = ["--upgrade", "-e", f"{ROOT}[test]"]
    subprocess.run([*install, *wanted], check=True)
    return python


def tools() -> list[str]:
    """What the extra ``test`` asks for, but for what is not for Colab."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^test = \[\n(.*?)^\]", text, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    listed = re.findall(r'^\s*"(.+)",$', block[1], flags=re.MULTILINE)
    return [line for line in listed if re.split(r"[^\w-]", line)[0] not in NOT_ON_COLAB]


def versions(python: Path) -> str:
    """What an environment has, in a line for each."""
    script = (
        "import sys; from importlib.metadata import version; print('python', sys.version.split()[0]);"
        "[print(name, version(name)) for name in sys.argv[1:]]"
    )
    return subprocess.run([python, "-c", script, *TELLING], check=True, capture_output=True, text=True).stdout


def run(python: Path, *arguments: str) -> tuple[bool, str]:
    """Run pytest in an environment, in the checkout; what fails is printed.

    :returns: whether it passed, and pytest's closing line
    """
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-5_000:], sep="\n", flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1].strip("= ") if lines else f"pytest ended with {done.returncode}"


@contextmanager
def folder_for(kept: Path | None) -> Iterator[Path]:
    """The folder that a person has named, which stays; without one, one that does not."""
    if kept is not None:
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="hivenb-environment-") as made:
        yield Path(made)


def main() -> int:
    """Builds, runs, and prints the table; returns 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PYTHONS)
    parser.add_argument("--folder", type=Path, help="where to build it, and keep it; else it is removed at the end")
    parser.add_argument("--no-tests", action="store_true", help="notebooks only")
    parser.add_argument("--notebooks", nargs="*", metavar="NAME", help="those whose names begin so; by default, all")
    given = parser.parse_args()
    beginnings = tuple(given.notebooks) if given.notebooks is not None else ("",)
    runs = {} if given.no_tests else {"tests without processes": ("-m", "not process", "-n", "auto")}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if path.name.startswith(beginnings or ("/",)):
            runs[path.stem] = (str(path.relative_to(ROOT)),)
    rows: list[tuple[bool, str, int, str]] = []
    with folder_for(given.folder) as folder:
        python = build(given.name, folder)
        print(versions(python), flush=True)
        for what, arguments in runs.items():
            since = time.monotonic()
            passed, ended = run(python, *arguments)
            rows.append((passed, what, round(time.monotonic() - since), ended))
            print(f"{'passed' if passed else 'FAILED'}  {what}", flush=True)
    print(f"\n{given.name}")
    for passed, what, seconds, ended in rows:
        print(f"{'passed' if passed else 'FAILED':6}  {seconds:5} s  {what:24}  {ended}")
    return 0 if all(passed for passed, *_ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
