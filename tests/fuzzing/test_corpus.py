"""All inputs that are kept: a few of each kind, and each at which a target has failed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from .__main__ import CORPUS, all_targets

TARGETS = all_targets()
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_it_is_read_or_refused(path: Path) -> None:
    TARGETS[path.parent.name].feed(path.read_bytes())


def test_each_target_has_a_corpus_and_each_corpus_a_target() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_what_is_kept_is_small(target) -> None:
    assert target.longest <= 65_536
    assert sum(path.stat().st_size for path in (CORPUS / target.name).iterdir()) < 100_000
