"""What is freed goes back to the system, by itself; in a process of its own, whose memory nobody else uses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif("musl" in sys.version, reason="it has no malloc_trim, and does without"),
]

#: Forked by a process that has imported all and done nothing else: to import takes longer than all that is measured.
FORKS = """
import gc, json, os, psutil, resource, sys, threading, time, torch
from hivenb.engine.process import freed_memory

def run(code, arguments):
    told, telling = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(telling, 1)
        exec(code, {**globals(), "arguments": arguments})
        sys.stdout.flush()
        for one in threading.enumerate():
            if one is not threading.main_thread() and not one.daemon:
                one.join()
        sys.stdout.flush()
        os._exit(0)
    os.close(telling)
    with open(told) as said:
        text = said.read()
    _, status = os.waitpid(pid, 0)
    return [os.waitstatus_to_exitcode(status), text]

print(json.dumps([run(*one) for one in json.load(sys.stdin)]))
"""

CODE = """
def size():
    return psutil.Process().memory_info().rss

how, shape = arguments
gc.disable()  # it would look by itself, at some time
freed_memory.INTERVAL = 0.2
small = size()
blocks = [[bytes(4000)] for _ in range(30_000)]
if shape == "circles":
    for block in blocks:
        block.append(block)
large = size()
blocks = blocks[-1:]  # at the end of the heap, which glibc itself would give back
kept = size()
if how == "regularly":
    freed_memory.give_back_regularly()
end = time.monotonic() + 20 if how == "regularly" else time.monotonic() + 1
while size() > (small + large) / 2 and time.monotonic() < end:
    time.sleep(0.05)
print((kept - small) / (large - small), (size() - small) / (large - small))
"""


SHAPES = ("blocks", "circles")

LARGE_BLOCKS = """
freed_memory.INTERVAL = 1000.0  # what goes back goes back at once
freed_memory.give_back_regularly()
torch.empty(8_000_000, dtype=torch.uint8).fill_(1)  # freed: glibc takes less than this for small from now on
small = psutil.Process().memory_info().rss
blocks = [torch.ones(2_000_000, dtype=torch.uint8) for _ in range(50)]
large = psutil.Process().memory_info().rss
blocks = blocks[-1:]
print((psutil.Process().memory_info().rss - small) / (large - small))
"""


MESSAGES = """
freed_memory.INTERVAL = 1000.0
freed_memory.give_back_regularly()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(100):
    torch.ones(2**19, dtype=torch.uint8)
before = faults()
for _ in range(1000):
    torch.ones(2**19, dtype=torch.uint8)
print(faults() - before)
"""

BATCHES = """
if arguments == ["kept"]:
    freed_memory.keep_for_what_follows()

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def batch():
    gradients = [torch.ones(200_000) for _ in range(100)]  # more than a heap of a thread's arena holds

def train():
    for _ in range(3):
        batch()
    before = faults()
    for _ in range(10):
        batch()
    print((faults() - before) / 10)

threading.Thread(target=train).start()
"""

CASES = {
    **{f"{how} {shape}": (CODE, [how, shape]) for how in ("regularly", "never") for shape in SHAPES},
    "large blocks": (LARGE_BLOCKS, []),
    "messages": (MESSAGES, []),
    "batches as they come": (BATCHES, ["as it comes"]),
    "batches kept": (BATCHES, ["kept"]),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[float]]:
    """What each of the processes has found."""
    command = [sys.executable, "-c", FORKS]
    cases = json.dumps(list(CASES.values()))
    done = subprocess.run(command, input=cases, capture_output=True, text=True, timeout=200, check=True)
    found = dict(zip(CASES, json.loads(done.stdout), strict=True))
    assert {code for code, _ in found.values()} == {0}, done.stderr
    return {name: [float(one) for one in text.split()] for name, (_, text) in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_freed_memory_is_given_back(measured: dict[str, list[float]], shape: str) -> None:
    at_once, later = measured[f"regularly {shape}"]
    assert at_once > 0.8
    assert later < 0.2


@pytest.mark.parametrize("shape", SHAPES)
def test_without_that_it_is_kept(measured: dict[str, list[float]], shape: str) -> None:
    assert measured[f"never {shape}"][1] > 0.8


def test_room_for_a_part_of_a_tensor_is_used_again(measured: dict[str, list[float]]) -> None:
    assert measured["messages"][0] < 1000, "new pages for each of a thousand parts: 128 of them"


def test_large_blocks_go_back_when_they_are_freed(measured: dict[str, list[float]]) -> None:
    assert measured["large blocks"][0] < 0.1


def test_the_gradients_of_a_batch_are_where_those_before_have_been(measured: dict[str, list[float]]) -> None:
    """Pages that the system clears for the gradients of each batch, where a thread of its own trains."""
    assert measured["batches as they come"][0] > 100
    assert measured["batches kept"][0] < 50
