"""hivenb shares its process with others: nothing of theirs is changed by its import, and no method by an open swarm."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

WITNESS = Path(__file__).with_name("import_witness.py")

#: What is otherwise after the import, and why.
BY_IMPORT = {
    # Trainer(strategy="hivemind"): five names more, by the registry's own method; Lightning has no other way
    "lightning.pytorch.strategies.StrategyRegistry",
    "lightning.pytorch.trainer.connectors.accelerator_connector.StrategyRegistry",
}

#: What is otherwise while a swarm is open, as patterns, and why.
BY_SWARM = {
    # what hivemind itself notes as soon as a process of its own is started, and what Python does
    "hivemind.utils.mpfuture.MPFuture._*",
    "hivemind.utils.mpfuture.SharedBytes._*",
    "asyncio.events._event_loop_policy",
    "multiprocessing.reduction.ForkingPickler._extra_reducers",  # of types of ours
    "threads",
    # an exit of the process closes the swarm
    "threading._threading_atexits",
    # what background work logs and warns of is kept instead of printed into whichever cell ran last: system/logs.py
    "hivemind.utils.logging._current_mode",
    "logger hivemind",
    "logger lightning*",
    "warnings.showwarning",
}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, str]]:
    """What is otherwise after the import, and then with an open swarm, in a process of its own."""
    done = subprocess.run([sys.executable, str(WITNESS)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("looked at") > 50_000
    return told


@pytest.mark.slow
def test_the_import_of_all_modules_changes_nothing_of_others(seen: dict[str, dict[str, str]]) -> None:
    found = seen["by import"]
    assert set(found) == BY_IMPORT, found
    for change in found.values():
        assert change.startswith("has no more [],")


def test_an_open_swarm_replaces_no_function_and_no_class_of_others(seen: dict[str, dict[str, str]]) -> None:
    found = seen["by swarm"]
    unknown = {name: change for name, change in found.items() if not any(fnmatchcase(name, one) for one in BY_SWARM)}
    assert unknown == {}
    assert "hivemind.utils.mpfuture.MPFuture._active_pid" in found, "it looks at what changes"


#: hivemind's objects warn as they are thrown away, of an event loop that they had elsewhere: not in a test's process.
EXPERTS = """
import hivemind, hivenb, torch
from hivemind.moe import declare_experts, get_experts
from hivemind.moe.server import background_server
from hivemind.utils import get_dht_time

made = {"expert_uids": ["expert.0"], "expert_cls": "nop", "hidden_dim": 8, "num_handlers": 1}
with hivenb.Swarm() as swarm, background_server(**made, device="cpu", optim_cls=None, shutdown_timeout=30) as server:
    dht = hivemind.DHT(initial_peers=[str(address) for address in server.addrs], start=True)
    declared = declare_experts(dht, ["other.0", "other.1"], expiration_time=get_dht_time() + 60)
    assert len(declared) >= 2 and all(declared.values())
    missing, own = get_experts(dht, ["missing.0", "other.1"])
    assert missing is None and own.peer_id == dht.peer_id
    (expert,) = get_experts(dht, ["expert.0"])
    given = torch.ones(2, 8)
    assert torch.equal(expert(given), given)
    assert swarm.is_open
    print(expert.info["forward_schema"][0][0].size)
    dht.shutdown()
"""


def test_hivemind_finds_and_asks_experts_in_the_process_of_a_swarm() -> None:
    """Its mixture of experts packs descriptors of tensors, which hivenb's own processes refuse to read."""
    done = subprocess.run([sys.executable, "-c", EXPERTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["(None, 8)"], done.stderr
