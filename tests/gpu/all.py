"""Everything that only a GPU can show: ``python tests/gpu/all.py --out DIR``.

Nothing is taken from a network. Each step is a process of its own with a limit; what it prints, its figures and its
pictures are in the folder, and a table at the end says what has passed. What is measured is measured alone; what only
has to pass runs side by side before. On a GPU all of it takes less than ten minutes; ``--device cpu`` tries the same on
a CPU with tiny sizes, so that it works on the day.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
import torch
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]

#: The notebooks that are run, whose Trainers take a GPU where there is one.
NOTEBOOKS = ("01_quickstart", "03_memory")


#: Where tests of a GPU are.
GPU_TESTS = (
    "tests/gpu",
    "tests/run/test_memory_use.py",
    "tests/engine/averaging/test_staging.py",
    "tests/engine/averaging/test_finite.py",
)


@dataclass(frozen=True)
class Step:
    """One program.

    :param limit: seconds after which it is ended
    :param alone: whether nothing runs beside it
    """

    name: str
    command: tuple[str, ...]
    limit: float
    alone: bool = False


def steps(out: Path, device: str) -> Iterator[Step]:
    """What is run, with what matters most first."""
    python, quick = sys.executable, [] if device == "cuda" else ["--quick"]
    benchmarks = ROOT / "tests" / "benchmarks"
    cores = len(os.sched_getaffinity(0))
    demo = ["-m", "hivenb", "demo", "--epochs", "20", "--accelerator", "gpu" if device == "cuda" else "cpu"]
    yield Step("demo", (python, *demo, "--png", str(out / "demo.png"), "--json", str(out / "demo.json")), 120)
    tests = [
        "-q",
        "-m",
        "gpu",
        "-n",
        str(max(1, cores // 2)),
        "--durations=10",
        *GPU_TESTS,
    ]
    yield Step("tests", (python, "-m", "pytest", *tests), 240)
    for name in NOTEBOOKS:
        copied = Path(shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", out))
        yield Step(name, (python, str(ROOT / "tests" / "save_notebook.py"), str(copied)), 180)
    for name, more in (("gpu", ["--epochs", "1"]), ("staging", [])):
        script = [str(benchmarks / f"{name}.py"), "--device", device, "--json", str(out / f"{name}.json")]
        yield Step(name, (python, *script, *more, *quick), 300, alone=True)


def run(step: Step, out: Path, device: str) -> tuple[str, float]:
    """How a step ended, and after how many seconds; what it printed is in a file of its name."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["HIVENB_GPU_TESTS_ON"] = "cpu"
    since = time.monotonic()
    with (out / f"{step.name}.txt").open("w") as printed:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            code = process.wait(step.limit)
            ended = "passed" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            process.kill()  # its children end with it
            process.wait()
            ended = f"took more than {step.limit:.0f} s"
    return ended, time.monotonic() - since


def save_pictures(notebook: Path, out: Path) -> None:
    """Write each picture in the outputs of a notebook to a file of its own."""
    cells: list[NotebookNode] = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    for number, picture in enumerate(pictures, start=1):
        (out / f"{notebook.stem}-{number}.png").write_bytes(base64.b64decode(picture))


def main() -> int:
    """The command; returns 1 if a step has not passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where figures, pictures and what was printed go")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to try the script")
    parser.add_argument("--only", nargs="*", metavar="STEP", help="these steps alone")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was run; --device cpu tries the script")
        return 1
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name(0) if given.device == "cuda" else "a CPU"
    lines = [f"{card}, torch {torch.__version__}"]

    def do(step: Step) -> bool:
        ended, seconds = run(step, out, given.device)
        if step.name in NOTEBOOKS and ended == "passed":
            save_pictures(out / f"{step.name}.ipynb", out)
        lines.append(f"{seconds:5.0f} s  {step.name:14} {ended}")
        print(lines[-1], flush=True)
        (out / "all.txt").write_text("\n".join(lines) + "\n")  # after each step: a lease may end in the middle
        return ended == "passed"

    chosen = [step for step in steps(out, given.device) if not given.only or step.name in given.only]
    # each is several processes that wait for each other
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as beside:
        passed = list(beside.map(do, [step for step in chosen if not step.alone]))
    passed += [do(step) for step in chosen if step.alone]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
