"""Builds of this checkout: a wheel, or a source distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def build(target: str, source: Path, into: Path) -> Path:
    """What hatchling makes; the test is skipped where that is not installed.

    :param target: ``wheel`` or ``sdist``
    :param source: the folder of ``pyproject.toml``
    :param into: an empty folder
    :returns: the one file that is in it then
    """
    pytest.importorskip("hatchling", reason="hatchling is not installed in this environment")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = into.iterdir()
    return built
