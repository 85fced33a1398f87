"""Names what failed in the last run of pytest, one in a line: tests, and whole notebooks, not cells by themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAST = Path(".pytest_cache/v/cache/lastfailed")

failed = json.loads(LAST.read_text()) if LAST.exists() else {}
names = dict.fromkeys(name.partition("::")[0] if ".ipynb" in name else name for name in failed)
sys.stdout.writelines(f"{name}\n" for name in names)
