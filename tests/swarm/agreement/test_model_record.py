"""Peers of a run compare their models before they train."""

from __future__ import annotations

import os
import re
import signal

import lightning
import pytest
import torch
from hivemind.utils import get_dht_time
from torch.utils.data import DataLoader, TensorDataset

import hivenb
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.model_record import (
    agree_on_model,
    declare_model,
    declared_model,
    describe_parameters,
    first_difference,
)

OURS = (("a.weight", (3, 4)), ("a.bias", (3,)))


def trained(module):
    return module, torch.optim.SGD(module.parameters())


def test_describes_names_and_shapes_in_order():
    assert describe_parameters(*trained(torch.nn.Linear(4, 3))) == (("weight", (3, 4)), ("bias", (3,)))


def test_describes_in_which_precision_they_are_averaged_unless_that_is_single():
    assert describe_parameters(*trained(torch.nn.Linear(4, 3).bfloat16())) == (("weight", (3, 4)), ("bias", (3,)))
    double = describe_parameters(*trained(torch.nn.Linear(4, 3).double()))
    assert double == (("weight", (3, 4), "float64"), ("bias", (3,), "float64"))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (OURS, None),
        ((("b.weight", (3, 4)), ("b.bias", (3,))), None),  # names do not matter for averaging
        ((("a.weight", (3, 5)), ("a.bias", (3,))), r"parameter 1 is a.weight of shape \(3, 4\) here and .*\(3, 5\)"),
        (OURS[:1], "2 parameters here and 1 in the swarm"),
        ((("a.weight", (3, 4), "float64"), OURS[1]), r"parameter 1, a\.weight, .* float32 here and in float64 in the"),
    ],
)
def test_first_difference(theirs, words):
    difference = first_difference(OURS, theirs)
    if words is None:
        assert difference is None
    else:
        assert difference is not None
        assert re.search(words, difference)


class Linear(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make_run(width, swarm):
    data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
    options = hivenb.Options(target_batch_size=64, matchmaking_time=1.0, run_id="models")
    return hivenb.TrainingRun(Linear(width), data, swarm=swarm, options=options, accelerator="cpu")


@pytest.mark.process
def test_another_model_is_refused_and_the_others_train_on(eventually):
    with hivenb.Swarm("host") as host, hivenb.Swarm.join(host.invite, "guest") as guest:
        # a peer that trains, seen from outside
        run = make_run(2, host)
        run.start()
        eventually(lambda: guest.peers("models"), 60)  # two epochs may be over before its first report arrives
        with pytest.raises(SwarmError, match=r"another model.*layer\.weight of shape \(5, 4\) here.*\(2, 4\)"):
            agree_on_model(guest.dht, "models", describe_parameters(*trained(Linear(5))))
        agree_on_model(guest.dht, "models", describe_parameters(*trained(Linear(2))))

        mistaken = make_run(5, guest)
        mistaken.start()
        with pytest.raises(SwarmError, match="another model"):
            mistaken.wait(timeout=60)
        assert run.wait(epochs=2, timeout=60)


@pytest.mark.process
def test_a_corrected_model_can_be_trained_under_the_same_name_when_nobody_else_trains():
    with hivenb.Swarm("alone") as swarm:
        for width in (2, 3):
            run = make_run(width, swarm)
            run.start()
            assert run.wait(epochs=1, timeout=60)
            run.stop()


@pytest.mark.process
def test_a_large_model_fits_and_rubbish_is_passed_over():
    many = tuple((f"layers.{i}.some.long.name.weight", (1024, 1024)) for i in range(500))
    with hivenb.Swarm("host") as host, hivenb.Swarm.join(host.invite, "guest") as guest:
        guest.dht.store("large_model", subkey=0, value=["?"], expiration_time=get_dht_time() + 1)
        declare_model(host.dht, "large", many)
        deadline = get_dht_time() + 10
        while declared_model(guest.dht, "large") != many and get_dht_time() < deadline:
            pass
        assert declared_model(guest.dht, "large") == many


@pytest.mark.process
def test_two_swarms_of_one_process_count_as_two_peers():
    with hivenb.Swarm("host") as host, hivenb.Swarm.join(host.invite, "guest") as guest:
        runs = [make_run(2, host), make_run(2, guest)]
        for run in runs:
            run.start()
        deadline = get_dht_time() + 90
        while len(host.peers("models")) < 2 and get_dht_time() < deadline:
            runs[0].wait(timeout=0.2)
        assert len({peer.peer_id for peer in host.peers("models")}) == 2


def test_a_dht_that_does_not_answer_is_an_error_at_whichever_read(swarm, eventually, monkeypatch):
    with hivenb.Swarm.join(swarm.invite, "slow") as guest:
        report = {"epoch": 0, "samples_accumulated": 1, "samples_per_second": 1.0, "client_mode": False}
        report |= {"peer_id": swarm.dht.peer_id.to_bytes(), "time": get_dht_time()}
        assert swarm.dht.store("slow_progress", report, expiration_time=get_dht_time() + 120, subkey="other")
        eventually(lambda: guest.peers("slow"))
        read = guest.dht.get
        for stopped_at in ("slow_progress", "slow_model"):

            def stop_and_read(key, *args, stopped_at=stopped_at, **kwargs):
                if key == stopped_at:
                    os.kill(guest.dht.pid, signal.SIGSTOP)
                return read(key, *args, **kwargs)

            monkeypatch.setattr(guest.dht, "get", stop_and_read)
            try:
                with pytest.raises(SwarmError, match=r"did not answer within 2\.0 s; is its process overloaded"):
                    agree_on_model(guest.dht, "slow", OURS, timeout=2.0)
            finally:
                os.kill(guest.dht.pid, signal.SIGCONT)
        monkeypatch.undo()
        agree_on_model(guest.dht, "slow", OURS)


def test_a_description_that_is_not_whole_is_none(swarm):
    def write(key, subkey, value):
        assert swarm.dht.store(key, subkey=subkey, value=value, expiration_time=get_dht_time() + 60)

    write("torn_model", 0, [2, b'[["a.weight",'])
    assert declared_model(swarm.dht, "torn") is None
    write("torn_model", 1, [2, b"[3,4]]]"])
    assert declared_model(swarm.dht, "torn") == (("a.weight", (3, 4)),)
    write("withdrawn_model", 0, None)
    assert declared_model(swarm.dht, "withdrawn") is None
    assert swarm.dht.store("plain_model", {"a": 1}, expiration_time=get_dht_time() + 60)
    assert declared_model(swarm.dht, "plain") is None
