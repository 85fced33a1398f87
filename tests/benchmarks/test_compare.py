"""What comes of pairs of runs: which tree runs first, what counts as worse, and what the exit status is."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import compare
import pytest


def measuring(monkeypatch: pytest.MonkeyPatch, now: list[float], before: list[float]) -> list[str]:
    """Figures in place of runs; gives whose they were, as they are asked for."""
    asked: list[str] = []
    left = {True: iter(now), False: iter(before)}

    def run(benchmark: object, command: object, tree: Path, scripts: Path) -> dict[str, float]:
        asked.append("now" if tree == compare.ROOT else "before")
        return {"steps": next(left[tree == compare.ROOT])}

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "scripts_for", lambda tree, script: compare.HERE)
    return asked


def test_the_trees_take_turns_in_who_is_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = measuring(monkeypatch, now=[0.9, 0.9, 0.6], before=[1.0, 0.6, 0.9])
    *pairs, (row,) = compare.compare("overhead", tmp_path, 3, quick=False)
    assert [len(one.now) for (one,) in pairs] == [1, 2]  # there is something to read after each pair
    assert asked == ["before", "now", "now", "before", "before", "now"]
    assert row.ratios == pytest.approx([0.9, 1.5, 2 / 3])
    assert row.is_worse


@pytest.mark.process
@pytest.mark.parametrize(("now", "status"), [([0.98, 0.99, 0.5], 0), ([0.97, 0.97, 1.5], 1)])
def test_the_exit_status_says_whether_a_median_is_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: list[float], status: int
) -> None:
    measuring(monkeypatch, now=now, before=[1.0, 1.0, 1.0])
    monkeypatch.setattr(compare, "worktree", lambda revision: nullcontext(tmp_path))
    file = tmp_path / "rows.json"
    assert compare.main(["HEAD", "--only", "overhead", "--pairs", "3", "--json", str(file)]) == status
    (row,) = json.loads(file.read_text())["rows"]
    assert row == {"name": "steps", "before": [1.0, 1.0, 1.0], "now": now}


@pytest.mark.process
@pytest.mark.skipif(not (compare.ROOT / ".git").exists(), reason="not in a clone")
def test_a_revision_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no-such-revision"):
        compare.main(["no-such-revision"])
