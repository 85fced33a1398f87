from __future__ import annotations

import subprocess
import sys

import pytest

from hivenb.system.process_tree import descendants, left_running

pytestmark = pytest.mark.process


def test_descendants_are_found_even_when_their_parents_are_gone():
    # a child that starts another one in a session of its own, tells its id, and waits to be ended
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        known = descendants()
        assert {parent.pid, child} <= {process.pid for process in known}
        parent.communicate(timeout=30)
        assert {process.pid for process in left_running(known, 0.0)} == {child}
    finally:
        subprocess.run(["kill", "-9", str(child)], check=True)
    assert not left_running(known, 10.0)


def test_a_child_that_has_ended_but_was_not_waited_for_does_not_count():
    child = subprocess.Popen(["true"])
    assert not left_running(descendants(), 10.0)
    child.wait(10)


def test_the_helpers_of_multiprocessing_do_not_count():
    code = (
        "import multiprocessing.forkserver as f, multiprocessing.resource_tracker as r\n"
        "from hivenb.system.process_tree import descendants\n"
        "f.ensure_running(); r.ensure_running(); print(len(descendants()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "0\n"


def test_whoever_has_started_a_child_still_learns_how_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert not left_running(descendants(), 10.0)
    assert child.wait(10) == 3


def test_what_was_forked_from_the_fork_server_is_nobodys_own():
    code = (
        "import multiprocessing as mp, subprocess, time\n"
        "from hivenb.system.process_tree import descendants, own_descendants\n"
        "if __name__ == '__main__':\n"
        "    child = subprocess.Popen(['sleep', '30'])\n"
        "    forked = mp.get_context('forkserver').Process(target=time.sleep, args=(30,))\n"
        "    forked.start()\n"
        "    own = {process.pid for process in own_descendants()}\n"
        "    print(own == {child.pid}, {forked.pid} < {process.pid for process in descendants()})\n"
        "    child.kill(); forked.kill(); forked.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "True True\n"
