"""The benchmark of the codecs runs, and the bytes that it counts are those of the theory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("codecs.py")


@pytest.fixture
def benchmark() -> Iterator[Any]:
    """The script as a module; its own name is that of one in the standard library."""
    spec = importlib.util.spec_from_file_location("benchmark_of_codecs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


@pytest.mark.process
@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_theory(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, names = tmp_path / "rows.json", ["none", "float16", "uniform8bit", "power_sgd_4", "power_sgd_32"]
    side = 1000
    chatter = 4096 / side**2  # DHTs may say more to each other in one round than in another
    assert benchmark.main(["--parameters", str(side**2), "--repeat", "1", "--json", str(file), "--only", *names]) == 0
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert row["serialized"] == pytest.approx(row["theory"], rel=0.05)
        assert row["wire"] - found["besides"] / side**2 == pytest.approx(row["theory"], rel=0.05, abs=chatter)
        assert min(row["encode"], row["decode"]) > 0
    assert [rows[name]["theory"] for name in names[:2]] == [4, 2]
    assert rows["uniform8bit"]["theory"] == pytest.approx(1, rel=0.05)
    assert rows["power_sgd_4"]["theory"] == 2 * side * 4 / side**2 * 4
    assert rows["none"]["error"] < 1e-6 < rows["float16"]["error"] < 1e-3 < rows["uniform8bit"]["error"] < 0.05
    for name in ("power_sgd_4", "power_sgd_32"):
        assert rows[name]["error_few"] < 1e-3, "PowerSGD is exact for a matrix of no more components than its rank"
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
