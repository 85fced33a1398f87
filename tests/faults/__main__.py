"""Injects faults into living swarms of this machine, and says of each whether the swarm has withstood it.

Each is tried in a swarm of three peers. Afterwards parameters are looked at (finite, alike at all peers after the next
rounds, no epoch lost, checkpoints whole), progress (epochs go on within a bound) and processes (none left).

    python -m tests.faults
    python -m tests.faults --list
    python -m tests.faults NAME ...
    python -m tests.faults --count 200 --seed 1     # at random, many in a row in one swarm
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from faults.case import BrokeError, Fault  # noqa: E402 - a folder of the tests

#: Before the outcome in what an attempt prints.
_MARK = "outcome: "

#: Faults that one swarm takes in a row before another one takes its place.
IN_A_ROW = 20


def all_faults() -> dict[str, Fault]:
    """Those of all modules of this folder that have ``FAULTS``, by their names."""
    names = (path.stem for path in sorted(HERE.glob("[a-z]*.py")) if not path.stem.startswith("test_"))
    modules = map(importlib.import_module, (f"faults.{name}" for name in names))
    return {fault.name: fault for module in modules for fault in getattr(module, "FAULTS", ())}


def attempt(names: list[str], seed: int) -> list[tuple[str, bool, str]]:
    """Inject faults into one swarm, in a process of its own, which is ended with all that it has started.

    :returns: of each that was tried, its name, whether the swarm has withstood it, and a figure; the first that broke
      is the last
    """
    command = [sys.executable, "-m", "tests.faults", "--attempt", *names, "--seed", str(seed)]
    process = subprocess.Popen(
        command,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seconds = 60.0 + sum(all_faults()[name].seconds for name in names)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nit did not end within {seconds:.0f} s"
    outcomes = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    if len(outcomes) < len(names) and (not outcomes or outcomes[-1][1]):
        outcomes.append((names[len(outcomes)], False, "no outcome"))
    if not outcomes[-1][1]:
        print(output[-4000:], file=sys.stderr)
    return [(name, held, figure) for name, held, figure in outcomes]


def _attempt_here(names: list[str], seed: int) -> None:
    from faults.field import open_field  # needs all of hivenb

    from hivenb.engine.process.child import end_with

    end_with(os.getppid())
    # a shell that starts this in the background lets it ignore interrupts, and so would all peers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance, known, tried = Random(seed), all_faults(), ""
    try:
        with open_field() as field:
            for tried in names:
                began = time.monotonic()
                done = known[tried].inject(field, chance)
                held = field.check()
                _tell_outcome(tried, True, f"{done}; {held}  [{time.monotonic() - began:.0f} s]")
    except (BrokeError, AssertionError) as e:
        _tell_outcome(tried or names[0], False, str(e))


def _tell_outcome(name: str, held: bool, figure: str) -> None:
    print(_MARK + json.dumps((name, held, figure)), flush=True)


def try_each(names: list[str], seed: int) -> int:
    """Try each fault in a swarm of its own; print a line for each.

    :returns: how many broke a swarm
    """
    broke = 0
    for name in names:
        if (reason := all_faults()[name].why_not()) is not None:
            print(f"skip   {name}: {reason}", flush=True)
            continue
        for _, held, figure in attempt([name], seed):
            print(f"{'held ' if held else 'broke'}  {name}: {figure}", flush=True)
            broke += not held
    print("all held" if not broke else f"{broke} broke")
    return broke


def try_many(names: list[str], count: int, seed: int) -> int:
    """Inject so many faults, at random, many in a row into one swarm.

    :returns: how many broke a swarm
    """
    chance = Random(seed)
    injected: Counter[str] = Counter()
    broke, began = 0, time.monotonic()
    while injected.total() < count:
        chosen = [chance.choice(names) for _ in range(min(IN_A_ROW, count - injected.total()))]
        for name, held, figure in attempt(chosen, chance.randrange(2**32)):
            injected[name] += 1
            broke += not held
            word = "held " if held else "broke"
            print(f"{word}  {injected.total()} of {count}, {name}: {figure}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(", ".join(f"{number} x {name}" for name, number in sorted(injected.items())))
    print(f"{injected.total()} faults in {minutes:.0f} minutes: {broke} broke (seed {seed})")
    return broke


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults; all by default")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--count", type=int, help="inject so many faults at random")
    parser.add_argument("--seed", type=int, default=1, help="of what is left to chance")
    parser.add_argument("--attempt", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = all_faults()
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"no fault {', '.join(unknown)}; there are {', '.join(known)}")
    if given.attempt:
        _attempt_here(given.names, given.seed)
        return 0
    if given.list:
        for fault in known.values():
            print(f"{fault.name}: {fault.about}")
        return 0
    if given.count is None:
        return 1 if try_each(given.names or list(known), given.seed) else 0
    names = [name for name in given.names or known if known[name].repeats and known[name].why_not() is None]
    return 1 if try_many(names, given.count, given.seed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
