"""An environment with ipywidgets 7.7.1 and IPython 7.34, as in Colab, for tests."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

#: Without what they depend on: that comes from the environment of the tests, but for what only they need.
OLDER = ("ipywidgets==7.7.1", "ipython==7.34.0", "ipykernel==6.17.1")
ONLY_THEIRS = ("backcall==0.2.0", "decorator==5.1.1", "ipython_genutils==0.2.0", "pickleshare==0.7.5")


def packages_of(folder: Path) -> Path:
    """Where the packages of an environment are."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def make_older_environment(folder: Path, *more: str) -> str:
    """Make an environment that finds the older packages first, and torch and all else where the tests find it.

    :param folder: for the environment
    :param more: further packages that it needs, with their versions
    :returns: its interpreter
    """
    venv.create(folder, symlinks=True, with_pip=False)
    packages = packages_of(folder)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"--target={packages}"]
    done = subprocess.run([*install, *OLDER, *ONLY_THEIRS, *more], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"the older packages cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")
