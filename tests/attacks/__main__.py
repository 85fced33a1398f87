"""Attacks living swarms of this machine, and says of each attack whether the swarm held.

Each attack is also made on a swarm without the one defence against it, where it has to succeed.

    python -m tests.attacks
    python -m tests.attacks --list
    python -m tests.attacks NAME ...
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from attacks.case import Attack, Outcome  # noqa: E402 - a folder of the tests

#: Before the outcome in what an attempt prints.
_MARK = "outcome: "


def all_attacks() -> dict[str, Attack]:
    """Those of all modules of this folder that have ``ATTACKS``, by their names."""
    modules = (importlib.import_module(f"attacks.{path.stem}") for path in sorted(HERE.glob("[a-z]*.py")))
    return {attack.name: attack for module in modules for attack in getattr(module, "ATTACKS", ())}


def attempt(name: str, disarmed: bool) -> Outcome:
    """Make an attack in a process of its own, which is ended with all that it has started if it takes too long."""
    command = [sys.executable, "-m", "tests.attacks", "--attempt", name, *(["--disarmed"] if disarmed else [])]
    process = subprocess.Popen(
        command,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=all_attacks()[name].seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += "\nit did not end in time"
    for line in output.splitlines():
        if line.startswith(_MARK):
            return Outcome(**json.loads(line.removeprefix(_MARK)))
    raise RuntimeError(f"{name}: no outcome. The last that it printed:\n{output[-3000:]}")


def tell(attack: Attack) -> bool:
    """Try both ways, print a line, and say whether all was as it should be."""
    began = time.monotonic()
    with_defence, without = attempt(attack.name, False), attempt(attack.name, True)
    word = "held " if with_defence.held else "broke"
    tooth = "" if not without.held else "  (held without the defence, too: this attack shows nothing)"
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{word}  {attack.name}: {with_defence.figure}; without the defence: {without.figure}  [{seconds}]{tooth}")
    return with_defence.held and not without.held


def _attempt_here(name: str, disarmed: bool) -> None:
    attack = all_attacks()[name]
    if disarmed:
        attack.disarm()
    outcome = attack.attempt()
    print(_MARK + json.dumps({"held": outcome.held, "figure": outcome.figure}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of attacks; all by default")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--attempt", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--disarmed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attempt:
        _attempt_here(given.attempt, given.disarmed)
        return 0
    known = all_attacks()
    if given.list:
        for attack in known.values():
            print(f"{attack.name}: {attack.about}")
        return 0
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"no attack {', '.join(unknown)}; there are {', '.join(known)}")
    as_they_should = [tell(known[name]) for name in given.names or known]
    print(f"{sum(as_they_should)} of {len(as_they_should)} as they should be")
    return 0 if all(as_they_should) else 1


if __name__ == "__main__":
    raise SystemExit(main())
