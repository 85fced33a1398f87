"""What the README shows runs as it stands: the notebook, a friend who joins it, and the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hivenb.peers.fork_server import VARIABLE

ROOT = Path(__file__).resolve().parents[1]

#: Seconds that a snippet may take; the machine may be busy.
PATIENCE = 240.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the tests run apart from the source tree"),
]

#: What the notebook's kernel does afterwards: it lets a friend in, tells whether that came, and closes.
HOST = """
print("INVITE", swarm.invite, flush=True)
import time
until = time.monotonic() + {patience}
friends = set()
while time.monotonic() < until and not friends:
    friends = {{one.peer_id for one in run.peers()}} - {{swarm.peer_id, *(one.peer_id for one in swarm.local_peers)}}
    run.wait(epochs=1)
print("FRIENDS", len(friends), "COPY", type(run.snapshot()).__name__, flush=True)
run.stop()
swarm.close()
"""

#: The friend's kernel has imported what it needs when the invite comes: nobody trains on just to wait for that.
BEFORE = """
import hivenb
from hivenb import tasks
hivenb.Swarm, hivenb.TrainingRun, tasks.digits()
invite = input()
"""

FRIEND = """
run.wait(epochs=2)
swarm.close()
"""


def snippets() -> tuple[str, str, str]:
    notebook, friend, script = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return notebook, friend, script


def started(tmp_path: Path, name: str, code: str) -> subprocess.Popen[str]:
    (tmp_path / f"{name}.py").write_text(code)
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.STDOUT}
    # local peers are forked from a copy, as on Binder: a server of their own would import all once more
    env = {**os.environ, VARIABLE: "1"}
    return subprocess.Popen([sys.executable, f"{name}.py"], cwd=tmp_path, env=env, text=True, **streams)


def test_the_notebook_runs_and_a_friend_joins(tmp_path: Path) -> None:
    notebook, friend, _ = snippets()
    assert '"hivenb://..."' in friend
    host = started(tmp_path, "notebook", notebook + HOST.format(patience=PATIENCE))
    guest = started(tmp_path, "friend", BEFORE + friend.replace('"hivenb://..."', "invite") + FRIEND)
    try:
        lines = iter(host.stdout.readline, "")
        said = []
        invite = next(line.split()[1] for line in lines if said.append(line) or line.startswith("INVITE"))
        guest.stdin.write(f"{invite}\n")
        guest.stdin.flush()
        assert "FRIENDS 1 COPY DigitsModel" in host.communicate(timeout=2 * PATIENCE)[0], "".join(said)
        told, _ = guest.communicate(timeout=PATIENCE)
        assert (host.returncode, guest.returncode) == (0, 0), told
    finally:
        for one in (host, guest):
            one.kill()
            one.wait()


def test_the_script_runs(tmp_path: Path) -> None:
    _, _, script = snippets()
    done = started(tmp_path, "script", script + "\nprint('STEPS', strategy.last_epoch_report.epoch)\n")
    said, _ = done.communicate(timeout=PATIENCE)
    assert done.returncode == 0, said
    assert int(re.findall(r"^STEPS (\d+)$", said, re.MULTILINE)[0]) >= 5
