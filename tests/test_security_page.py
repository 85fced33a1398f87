"""The page of attacks, ``hivenb/SECURITY.md``, names all that are made, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from attacks.__main__ import all_attacks

import hivenb

PAGE = Path(hivenb.__file__).parent / "SECURITY.md"


def test_each_attack_stands_there_with_what_it_does() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: attack.about for name, attack in all_attacks().items()}
    assert len(rows) == len(all_attacks())
