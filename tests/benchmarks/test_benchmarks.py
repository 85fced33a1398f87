"""The benchmarks run, and write what they promise; how long anything took is asserted nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

#: Seconds that the quick mode may take on a busy machine.
PATIENCE = 170

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(PATIENCE + 30)]


def run(script: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The quick mode of a benchmark: the JSON that it wrote, and the table that it printed."""
    file = folder / "rows.json"
    command = [sys.executable, str(Path(__file__).with_name(script)), "--quick", "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert "hivemind" in found["machine"]
    assert found["machine"].partition(", load")[0] in done.stdout
    return found, done.stdout


@pytest.mark.long
def test_rounds_say_how_much_of_the_computing_becomes_training(tmp_path: Path) -> None:
    found, printed = run("rounds.py", tmp_path)
    (row,) = found["rows"]
    figures = row["course"]["figures"]
    assert (row["who"], row["peers"]) == ("hivenb", 2)
    assert row["efficiency"] > 0
    assert figures["rounds"] == 6, "three epochs of two peers"
    assert 1 <= figures["group_size"] <= 2
    assert 0 <= figures["stalled"] <= figures["in_step"] < 1
    assert 0 <= figures["waiting"] <= figures["in_step"]
    assert row["course"]["cpu"] > 0
    assert len(row["course"]["start"]) == 2
    assert all(word in printed for word in ("efficiency", "stalled", "CPU", "first epochs"))


@pytest.mark.long
def test_a_mixed_pair_is_compared_with_a_plain_one(tmp_path: Path) -> None:
    found, printed = run("mixed.py", tmp_path)
    assert {row["who"] for row in found["rows"]} == {"hivenb and plain", "plain and hivenb", "two plain"}
    assert all(0 <= row["met"] <= row["of"] == 3 for row in found["rows"])
    assert "two plain" in printed


@pytest.mark.long
def test_gradients_that_are_late_are_compared_with_those_that_are_made_up_for(tmp_path: Path) -> None:
    found, printed = run("delay_compensation.py", tmp_path)
    assert [row["mode"] for row in found["rows"]] == ["synchronous", "late", "own gradients", "last step sizes"]
    assert all(0 <= row["accuracy"] <= 1 for row in found["rows"])
    assert {step["way"] for step in found["steps"]} >= {"the step itself", "by formulas", "some at a time"}
    assert all(step["bytes_held"] >= 0 for step in found["steps"])
    assert "a speculative step" in printed


@pytest.mark.long
def test_blamed_and_found_changes_are_counted(tmp_path: Path) -> None:
    found, printed = run("loss_rises.py", tmp_path)
    assert len(found["rows"]) == 2 + 4 * 2
    assert all(len(row["changes"]) == 5 for row in found["rows"][:2])
    assert "of 10 changes without harm were blamed" in printed


@pytest.mark.long
def test_optimizers_and_schedulers_are_compared_with_plain_torch(tmp_path: Path) -> None:
    found, printed = run("optimizers_and_schedulers.py", tmp_path)
    assert [row["kind"] for row in found["rows"]] == ["optimizer", "scheduler"]
    for row in found["rows"]:
        assert f"| {row['kind']} | {row['name']} | {row['moved']:.2f} |" in printed
        assert row["moved"] > 0.01
        assert max(row["differences"].values()) < 1e-5


@pytest.mark.long
def test_overhead_compares_each_way_with_lightning_alone(tmp_path: Path) -> None:
    found, printed = run("overhead.py", tmp_path)
    assert len(found["rows"]) == 5
    for row in found["rows"]:
        assert len(row["seconds"]) == len(row["computing"]) == 3
        assert row["ratio"] > 0
        assert row["ratio_computing"] > 0
        assert row["ratio"] == 1 or row["who"] != row["against"]
        assert row["who"] in printed


@pytest.mark.long
def test_allreduce_compares_rounds_with_moving_their_bytes(tmp_path: Path) -> None:
    found, printed = run("allreduce.py", tmp_path)
    assert [(row["peers"], row["codec"]) for row in found["rows"]] == [(2, "none"), (2, "float16")]
    for row, megabytes in zip(found["rows"], (0.4, 0.2), strict=True):
        assert row["megabytes"] == pytest.approx(megabytes, rel=0.01)
        assert len(row["rounds"]) == len(row["tcp"]) == 2
        assert min(*row["rounds"], *row["tcp"]) > 0
        assert row["error"] < 1e-3
    assert "MB sent by each" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.long
@pytest.mark.parametrize("script", ["gpu.py", "staging.py"])
def test_without_a_gpu_its_benchmarks_say_so(tmp_path: Path, script: str) -> None:
    found, printed = run(script, tmp_path)
    assert found["rows"] == []
    assert "no GPU here" in printed
    assert found["skipped"] == "no GPU here"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_that_a_gpu_is_to_show_works_on_a_cpu(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "gpu" / "all.py"
    command = [sys.executable, str(script), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("01_quickstart-*.png"))) > 0
    assert (tmp_path / "demo.png").exists()
    assert [row["way"] for row in json.loads((tmp_path / "staging.json").read_text())["rows"]]


@pytest.mark.long
def test_overlap_measures_each_swarm_each_way(tmp_path: Path) -> None:
    found, printed = run("overlap.py", tmp_path)
    assert [row["way"] for row in found["rows"]] == ["synchronous", "all delays", "and reused buffers"]
    assert all(0 <= row["course"]["figures"]["in_step"] < 1 for row in found["rows"])
    assert "all delays" in printed


@pytest.mark.long
def test_the_ends_of_epochs_are_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found, printed = run("trace_epochs.py", tmp_path, "--out", str(trace))
    ends = [row for row in found["rows"] if row["name"] == "end of an epoch"]
    assert [row["peer"] for row in ends] == [0, 1]
    assert all(0 < row["seconds"] <= row["most"] for row in found["rows"])
    shown = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"compute", "matchmaking", "exchange gradients"} <= {event["name"] for event in shown}
    assert "within the ends of epochs" in printed


@pytest.mark.long
def test_swarms_across_an_internet_and_a_peer_that_is_away(tmp_path: Path) -> None:
    found, printed = run("internet.py", tmp_path)
    if reason := found.get("skipped"):
        assert reason in printed
        pytest.skip(reason)
    (row,), (absence,) = found["rows"], found["away"]
    assert (row["name"], row["who"], row["epochs"]) == ("synchronous-2", "hivenb", 2)
    assert row["efficiency"] > 0
    assert row["course"]["sent"] > 40_000, "the numbers of a model, at least"
    assert absence["seconds"] == 2
    assert len(absence["lost"]) == 2
    assert found["broken"] == []
    assert all(word in printed for word in ("efficiency", "synchronous-2", "one of three is away"))


@pytest.mark.long
def test_rounds_are_compared_with_what_lines_allow(tmp_path: Path) -> None:
    found, printed = run("internet.py", tmp_path, "--line-rate")
    if reason := found.get("skipped"):
        pytest.skip(reason)
    (row,) = found["rows"]
    assert row["megabytes"] == pytest.approx(1.0)
    assert row["allowed"] == pytest.approx(8 * 1.0 / 20, rel=0.01)
    assert min(*row["rounds"], *row["tcp"]) > row["allowed"]
    assert "share of the line" in printed


@pytest.mark.long
def test_it_is_told_how_soon_a_loss_is_reached_in_each_mode(tmp_path: Path) -> None:
    found, printed = run("time_to_loss.py", tmp_path)
    assert [row["case"]["mode"] for row in found["rows"]] == ["synchronous", "delayed", "compensated"]
    for row in found["rows"]:
        assert row["looks"][-1]["epoch"] == row["case"]["updates"] == 3
        assert row["looks"][-1]["loss"] < row["looks"][0]["loss"]
        assert row["samples"] >= 2.5 * 1024
        assert 0 <= row["stalled"] < 1
        assert row["round_seconds"] > 0
        assert row["case"]["mode"] in printed
    assert found["broken"] == []
    again = [sys.executable, str(Path(__file__).with_name("time_to_loss.py")), "--rows", str(tmp_path / "rows.json")]
    shown = subprocess.run(again, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    assert shown.splitlines()[1:] == printed.splitlines()[1:], "but for the machine, the same table"


@pytest.mark.long
def test_the_same_loss_is_reached_both_ways(tmp_path: Path) -> None:
    found, printed = run("time_to_loss.py", tmp_path, "--outer")
    if reason := found.get("skipped"):
        pytest.skip(reason)
    synchronous, outer = found["rows"][:2], found["rows"][2:]
    assert [row["samples"] for row in synchronous] == [512, 1024]
    assert outer[-1]["loss"] <= min(row["loss"] for row in synchronous)
    assert found["sooner"] > 0
    assert "times sooner" in printed


@pytest.mark.long
def test_transports_are_compared(tmp_path: Path) -> None:
    found, printed = run("internet.py", tmp_path, "--transports")
    if reason := found.get("skipped"):
        pytest.skip(reason)
    controls = [row["control"] for row in found["rows"]]
    assert controls[0] is None, "QUIC"
    assert "reno" in controls, "which each Linux has"
    assert all(0.1 < seconds < PATIENCE for row in found["rows"] for seconds in row["rounds"]), "two ways of 50 ms"
    assert "times QUIC" in printed


@pytest.mark.long
def test_a_change_is_compared_with_the_end_of_an_epoch(tmp_path: Path) -> None:
    found, printed = run("live_change.py", tmp_path)
    assert [row["way"] for row in found["rows"]] == ["in place", "made anew"]
    assert all(0 < seconds < PATIENCE for row in found["rows"] for seconds in (*row["still"], row["epoch_end"]))
    assert "stood still" in printed


@pytest.mark.long
def test_an_outer_optimizer_is_compared_with_synchronous_training(tmp_path: Path) -> None:
    found, printed = run("outer_optimizer.py", tmp_path)
    assert [row["name"] for row in found["rows"]] == ["synchronous", "diloco"]
    assert all(row["sent"] > 0 and row["loss"] > 0 for row in found["rows"])
    assert found["loss"] > 0
    assert "fewer bytes" in printed


@pytest.mark.long
def test_startup_measures_imports_and_two_peers(tmp_path: Path) -> None:
    found, _ = run("startup.py", tmp_path)
    seconds = {row["what"]: row["seconds"] for row in found["rows"]}
    assert {"import hivenb", "run.start() to the first optimizer step", "first picture"} <= set(seconds)
    assert all(len(each) == 1 for each in seconds.values())


@pytest.mark.long
def test_the_dashboard_is_compared_with_none(tmp_path: Path) -> None:
    found, printed = run("dashboard.py", tmp_path)
    assert all(block[side][0] > 0 for block in found["rows"] for side in ("closed", "opened"))
    few, many = found["frames"]
    assert few["points"] < many["points"]
    assert many["size"] < 2 * few["size"], "a history is bounded"
    assert all(seconds > 0 for frame in (few, many) for seconds in (*frame["frame"], *frame["axes"]))
    assert "with dashboard" in printed


@pytest.mark.long
def test_the_soak_looks_at_all_processes(tmp_path: Path) -> None:
    found, printed = run("soak.py", tmp_path)
    looks = found["rows"]
    processes = {look["role"]: look["processes"] for look in looks if look["seconds"] == looks[-1]["seconds"]}
    kernels_own = {"the kernel": 1, "its DHT": 1, "its p2pd": 1, "its averagers": 2, "fork server": 1}
    assert processes == {**kernels_own, "local peers": 2, "their DHT": 2, "their p2pd": 2, "their averagers": 4}
    assert all(min(look["memory"], look["threads"], look["descriptors"]) > 0 for look in looks)
    assert found["course"]["epochs"] > 0
    assert {len(seen) for seen in found["cycles"].values()} == {2}
    assert "with a dashboard" in printed


@pytest.mark.long
def test_the_guard_is_measured_against_an_open_swarm(tmp_path: Path) -> None:
    found, printed = run("guard.py", tmp_path)
    (turn,) = found["rows"]
    assert turn["ratio"] == found["ratio"] == pytest.approx(turn["private_rate"] / turn["open_rate"])
    assert min(turn["open_cpu"], turn["private_cpu"], *found["request"].values()) > 0
    assert f"at {found['ratio']:.4f} times the rate" in printed


@pytest.mark.long
def test_swarms_of_several_sizes_are_compared_with_plain_hivemind(tmp_path: Path) -> None:
    found, printed = run("large_swarms.py", tmp_path)
    assert [(row["who"], row["peers"]) for row in found["rows"]] == [("hivenb", 2), ("hivemind", 2), ("hivenb", 3)]
    for row in found["rows"]:
        assert min(row["asked"]["rpc_find"], row["asked"]["rpc_store"]) > 0
        assert row["answered"] > 0
        assert row["most_sent"] >= row["sent"] > 0
        assert row["met"] > 0
        assert row["known"] >= 0
    ((count, calls, sent),) = found["beside"]
    assert count == 2
    assert f"2 peers of plain hivemind make {calls:.1f} times the calls, and send {sent:.1f} times" in printed
    assert found["laws"] == [], "of so few, nothing is said of many"


KILLS_A_PEER = """
from bench_peer import Work
from swarm_bench import starting

if __name__ == "__main__":
    with starting() as start:
        peer = start(Work(target=64, step=0.01))
        peer.wait_for_epoch(1)
        print(*(process.pid for process in peer.tree()))
"""


@pytest.mark.long
def test_peers_that_are_killed_leave_nothing_in_shared_memory(
    tmp_path: Path, eventually: Callable[[Callable[[], Any]], None]
) -> None:
    script = tmp_path / "kills_a_peer.py"
    script.write_text(KILLS_A_PEER)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True, env=environment)
    owners = tuple(f"torch_{pid}_" for pid in done.stdout.split())
    assert len(owners) >= 4, "it, its node and two averagers"
    eventually(lambda: not [name for name in os.listdir("/dev/shm") if name.startswith(owners)])
