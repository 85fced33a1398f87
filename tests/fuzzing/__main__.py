"""Feeds what others may send to the code that reads it, again and again, guided by which lines of it are reached.

Each target is fed in a process of its own, by atheris, beginning with its corpus in tests/fuzzing/corpus. An input at
which it fails is kept there, and is tried with all others in the tests. What is fed is imported once, before.

    python -m tests.fuzzing --seconds 60
    python -m tests.fuzzing --inputs 1000000 TARGET ...
    python -m tests.fuzzing --list
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import io
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzzing.target import Target  # noqa: E402 - a folder of the tests

CORPUS = HERE / "corpus"

#: MiB by which a process may grow while it is fed, and seconds that one input may take.
GROWTH, HANG = 512, 30

#: Seconds for which a process may read its corpus, which is not counted.
_START = 180

#: Whose lines are watched; libraries below are taken as they are.
_WATCHED = ["hivenb", "hivemind"]

#: Before the MiB that a process had when it began.
_BEGAN = "began with MiB: "


def all_targets() -> dict[str, Target]:
    """Those of all modules of this folder that have ``TARGETS``, by their names."""
    names = (path.stem for path in sorted(HERE.glob("[a-z]*.py")) if not path.stem.startswith("test_"))
    modules = (importlib.import_module(f"fuzzing.{name}") for name in names)
    return {target.name: target for module in modules for target in getattr(module, "TARGETS", ())}


def fuzz(target: Target, limits: Sequence[str], seconds: float | None) -> bool:
    """Feed one target in a process of its own, print a line, and say whether nothing was found."""
    kept = CORPUS / target.name
    kept.mkdir(parents=True, exist_ok=True)
    before = set(kept.iterdir())
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryFile("w+", errors="replace") as written:
        arguments = [work, str(kept), f"-artifact_prefix={kept}/", *limits]
        pid = os.fork()
        if pid == 0:
            try:
                _feed_here(target, arguments, written.fileno())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                ctypes.CDLL(None).exit(1)  # not os._exit(): at C's own, libFuzzer keeps the input that it was at
        code = _exit_code_of(pid, None if seconds is None else seconds + _START)
        written.seek(0)
        output = written.read()
    found = sorted(path.name for path in set(kept.iterdir()) - before)
    print(line_of(target.name, output, code, found), flush=True)
    if code:
        print("\n".join(f"    {line}" for line in output.splitlines()[-40:]), flush=True)
    return code == 0


def _exit_code_of(pid: int, seconds: float | None) -> int:
    """How a child has ended; it is killed when it has not within so many seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if end is not None and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def line_of(name: str, output: str, code: int, found: Sequence[str]) -> str:
    """What became of a target, in a line.

    :param output: of its process, and its exit code
    :param found: files of inputs at which it failed
    """

    def last(pattern: str) -> str:
        figures = re.findall(pattern, output)
        return figures[-1] if figures else "?"

    fed = last(r"number_of_executed_units:\s*(\d+)")
    pace = last(r"average_exec_per_sec:\s*(\d+)")
    began, peak = last(_BEGAN + r"(\d+)"), last(r"peak_rss_mb:\s*(\d+)")
    outcome = "nothing found" if code == 0 else f"FOUND {', '.join(found) or f'exit code {code}'}"
    return f"{name}: {fed} inputs, {pace} a second, {began} to {peak} MiB: {outcome}"


def _feed_here(target: Target, arguments: list[str], output: int) -> None:
    """Feed a target in this process, until a limit among the arguments of libFuzzer is reached."""
    import atheris

    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    warnings.simplefilter("ignore")
    logging.disable()
    sys.setrecursionlimit(1000)  # as without the fuzzer
    for path in sorted((CORPUS / target.name).iterdir()):
        target.feed(path.read_bytes())  # what is imported and made once is there now
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{_BEGAN}{began}", flush=True)
    limits = [f"-rss_limit_mb={began + GROWTH}", f"-timeout={HANG}", f"-max_len={target.longest}"]

    def feed(data: bytes) -> None:
        target.feed(data)

    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", *arguments], feed)
    _limit_address_space()
    atheris.Fuzz()


def _watched_targets() -> dict[str, Target]:
    """All of them, whose lines the fuzzer sees."""
    import atheris

    warnings.simplefilter("ignore")
    told = io.StringIO()  # a line for each module
    with contextlib.redirect_stderr(told), atheris.instrument_imports(include=_WATCHED):
        return all_targets()


def _limit_address_space() -> None:
    """Let whoever asks for much memory at once, and would not use it, get none."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 4 * GROWTH * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--seconds", type=float, help="for all targets together; 60 by default")
    parser.add_argument("--inputs", type=int, help="for each target, however long that takes")
    parser.add_argument(
        "--seed", type=int, help="to feed the same inputs in the same order; by default others each time"
    )
    given = parser.parse_args(arguments)
    if given.list:
        for target in all_targets().values():
            print(f"{target.name}: {target.about}")
        return 0
    known = _watched_targets()
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    names = given.names or list(known)
    if given.inputs is not None:
        seconds, limits = None, [f"-runs={given.inputs}"]
    else:
        seconds = max(1, round((given.seconds or 60) / len(names)))
        limits = [f"-max_total_time={seconds}"]
    if given.seed is not None:
        limits.append(f"-seed={given.seed}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fine = list(pool.map(lambda name: fuzz(known[name], limits, seconds), names))
    print(f"{sum(fine)} of {len(fine)} targets without a finding")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set would lead the fuzzer another way
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzzing", *sys.argv[1:]], environment)
    raise SystemExit(main())
