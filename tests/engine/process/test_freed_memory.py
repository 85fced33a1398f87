"""What is freed goes back to the system, by itself; in a process of its own, whose memory nobody else uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif("musl" in sys.version, reason="it has no malloc_trim, and does without"),
]

CODE = """
import gc, psutil, sys, time
from hivenb.engine.process import child as freed_memory

def size():
    return psutil.Process().memory_info().rss

how, shape = sys.argv[1:]
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


def shares_of_what_was_freed(how: str, shape: str) -> tuple[float, float]:
    """That the process has still: at once, and later."""
    command = [sys.executable, "-c", CODE, how, shape]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    at_once, later = done.stdout.split()
    return float(at_once), float(later)


@pytest.mark.parametrize("shape", ["blocks", "circles"])
def test_freed_memory_is_given_back(shape: str) -> None:
    at_once, later = shares_of_what_was_freed("regularly", shape)
    assert at_once > 0.8
    assert later < 0.2


@pytest.mark.parametrize("shape", ["blocks", "circles"])
def test_without_that_it_is_kept(shape: str) -> None:
    assert shares_of_what_was_freed("never", shape)[1] > 0.8


LARGE_BLOCKS = """
import psutil, torch
from hivenb.engine.process import child as freed_memory

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
import resource, torch
from hivenb.engine.process import child as freed_memory

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


def test_room_for_a_part_of_a_tensor_is_used_again() -> None:
    told = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, timeout=60, check=True)
    assert int(told.stdout) < 1000, "new pages for each of a thousand parts: 128 of them"


def test_large_blocks_go_back_when_they_are_freed() -> None:
    command = [sys.executable, "-c", LARGE_BLOCKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 0.1


BATCHES = """
import resource, sys, threading, torch
from hivenb.engine.process import child as freed_memory

if sys.argv[1] == "kept":
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


def faults_in_a_batch(how: str) -> float:
    """Pages that the system clears for the gradients of each batch, where a thread of its own trains."""
    command = [sys.executable, "-c", BATCHES, how]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_the_gradients_of_a_batch_are_where_those_before_have_been() -> None:
    assert faults_in_a_batch("as it comes") > 100
    assert faults_in_a_batch("kept") < 50
