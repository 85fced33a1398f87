"""What the README shows runs as it stands: the notebook, a friend who joins it, and the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from hivenb.peers.fork_server import VARIABLE, start_server

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

FRIEND = """
run.wait(epochs=2)
swarm.close()
"""


def snippets() -> tuple[str, str, str]:
    notebook, friend, script = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return notebook, friend, script


def run_code(folder: str, code: str) -> None:
    os.chdir(folder)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def run_forked(folder: Path, code: str) -> str:
    """What it prints, in a process that has imported what it needs."""
    ended = forked.run(run_code, str(folder), code, seconds=PATIENCE)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


@pytest.mark.slow
def test_the_notebook_runs_and_a_friend_joins(tmp_path: Path) -> None:
    notebook, friend, _ = snippets()
    assert '"hivenb://..."' in friend
    start_server()  # which imports what the friend needs while the host does, not while three peers train
    script = tmp_path / "notebook.py"
    script.write_text(notebook + HOST.format(patience=PATIENCE))
    # local peers are forked from a copy, as on Binder: a server of their own would import all once more
    env, streams = {**os.environ, VARIABLE: "1"}, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    host = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=env, text=True, **streams)
    try:
        lines = iter(host.stdout.readline, "")
        said = []
        invite = next(line.split()[1] for line in lines if said.append(line) or line.startswith("INVITE"))
        run_forked(tmp_path, friend.replace("hivenb://...", invite) + FRIEND)
        assert "FRIENDS 1 COPY DigitsModel" in host.communicate(timeout=2 * PATIENCE)[0], "".join(said)
        assert host.returncode == 0
    finally:
        host.kill()
        host.wait()


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    _, _, script = snippets()
    said = run_forked(tmp_path, script + "\nprint('STEPS', strategy.last_epoch_report.epoch)\n")
    assert int(re.findall(r"^STEPS (\d+)$", said, re.MULTILINE)[0]) >= 5
