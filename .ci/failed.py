"""Prints what failed in pytest's last run, one in a line: tests, and whole notebooks, since a cell needs those before it."""

from __future__ import annotations

import json
from pathlib import Path

LAST = Path(".pytest_cache/v/cache/lastfailed")

failed = json.loads(LAST.read_text()) if LAST.exists() else {}
print(*dict.fromkeys(name.partition("::")[0] if ".ipynb" in name else name for name in failed), sep="\n")
