"""Peers of a run compare their models before they train."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading

import lightning
import pytest
import torch
from hivemind.utils import get_dht_time
from torch.utils.data import DataLoader, TensorDataset

import hivenb
from hivenb.engine.network.record_board import RecordBoard
from hivenb.errors import SwarmError
from hivenb.swarm.agreement.model_record import (
    ModelRecord,
    agree_on_model,
    declare_model,
    describe_parameters,
    digest_of,
    first_difference,
    parse_description,
    parse_record,
    whose_model,
)

OURS = (("a.weight", (3, 4)), ("a.bias", (3,)))


@pytest.fixture(scope="module")
def swarm():
    with hivenb.Swarm("models") as opened:
        yield opened


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
        ((("b.weight", (3, 4)), ("b.bias", (3,))), None),  # one has it as self.a, the other one as self.b
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


def two_layers(*names):
    return tuple((name, (4, 4)) for name in names)


@pytest.mark.parametrize(
    "theirs",
    [
        ("enc.weight", "dec.weight"),
        ("enc._orig_mod.weight", "dec._orig_mod.weight"),  # each compiled
        ("_orig_mod.enc.weight", "_orig_mod.dec.weight"),
        ("module.enc.weight", "module.dec.weight"),
        ("net.model.enc.weight", "net.model.dec.weight"),  # in a LightningModule
        ("(not of the module)", "dec.weight"),
    ],
)
def test_names_that_only_a_wrapper_makes_others_are_no_difference(theirs):
    ours = two_layers("enc.weight", "dec.weight")
    assert first_difference(ours, two_layers(*theirs)) is None
    assert first_difference(two_layers(*theirs), ours) is None


def test_parameters_in_another_order_are_a_difference_though_shapes_are_equal():
    difference = first_difference(two_layers("enc.weight", "dec.weight"), two_layers("dec.weight", "enc.weight"))
    assert difference is not None
    assert "parameter 1, of shape (4, 4), is enc.weight here and dec.weight in the swarm" in difference
    assert "in the same order" in difference
    renamed = first_difference(two_layers("enc.weight", "dec.weight"), two_layers("enc.weight", "out.weight"))
    assert renamed is not None
    assert "parameter 2, of shape (4, 4), is dec.weight here and out.weight in the swarm" in renamed
    assert "the same names" in renamed


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
        with pytest.raises(SwarmError, match=r"another model.*is layer\.gain here and layer\.weight in the swarm"):
            agree_on_model(guest.dht, "models", (("layer.gain", (2, 4)), ("layer.bias", (2,))))
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


def test_a_large_model_fits(swarm, eventually):
    many = tuple((f"layers.{i}.some.long.name.weight", (1024, 1024)) for i in range(500))
    with hivenb.Swarm.join(swarm.invite, "guest") as guest:
        declare_model(swarm.dht, "large", many)

        def found():
            records = RecordBoard(guest.dht, "large_model").read()
            return parse_description(digest_of(many), {key: one.value for key, one in records.items()})

        eventually(lambda: found() == many)


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


def test_who_has_died_is_waited_for_and_who_trains_is_not(swarm, eventually):
    report = {"epoch": 0, "samples_accumulated": 1, "samples_per_second": 1.0, "client_mode": False}
    report |= {"peer_id": swarm.dht.peer_id.to_bytes(), "time": get_dht_time()}
    board = RecordBoard(swarm.dht, "ended_progress", expiration=4.0)
    with hivenb.Swarm.join(swarm.invite, "guest") as guest:
        declare_model(swarm.dht, "ended", (("a.weight", (5, 5)),))
        board.write(board.owner, report)
        eventually(lambda: guest.peers("ended") and RecordBoard(guest.dht, "ended_model").read())
        agree_on_model(guest.dht, "ended", OURS)  # it reports no more
        assert not guest.peers("ended")
        board.write(board.owner, report)
        eventually(lambda: guest.peers("ended"))
        trains = threading.Timer(1.0, board.write, (board.owner, report))
        trains.start()
        with pytest.raises(SwarmError, match="another model"):
            agree_on_model(guest.dht, "ended", OURS)
        assert guest.peers("ended"), "it has not waited until that report was forgotten"
        trains.join()


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


def board(*parts):
    """What stands on the board of a model that is described by that, and its digest."""
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    return digest, {f"{digest}/{number}": [len(parts), part] for number, part in enumerate(parts)}


@pytest.mark.parametrize(
    "packed",
    [
        b"[" * 2000,
        b"\xff",
        b'[["a",[1e999]]]',
        b'[["a",[-1]]]',
        b'[["a",[true]]]',
        b'[["a",{"0":1}]]',
        b'[["a",[3],7]]',
        b'[["a",[3],"x","y"]]',
        b'[[["a"],[3]]]',
        b'{"a":[3]}',
        b'[["a",[' + b"1," * 64 + b"1]]]",
    ],
)
def test_what_is_no_description_is_passed_over(packed):
    assert parse_description(*board(packed)) is None


@pytest.mark.parametrize("value", [None, 7, [1e999, b"[]"], [True, b"[]"], [10**9, b"[]"], [1, "[]"], [0, b"[]"], [1]])
def test_parts_that_are_none_are_passed_over(value):
    digest, _ = board(b"[]")
    assert parse_description(digest, {f"{digest}/0": value}) is None


def test_a_description_is_read_as_it_was_written_and_not_as_somebody_has_changed_it():
    digest, records = board(b'[["a",[3,4]],', b'["b",[],"float64"]]')
    assert parse_description(digest, records) == (("a", (3, 4)), ("b", (), "float64"))
    assert parse_description(digest, {**records, f"{digest}/1": [2, b'["b",[9],"float64"]]']}) is None
    del records[f"{digest}/1"]
    assert parse_description(digest, records) is None


def test_the_model_of_the_inviting_peer_counts_or_else_that_of_most():
    records = [ModelRecord(b"1", "forged"), ModelRecord(b"2", "forged"), ModelRecord(b"3", "true", inviting="host")]
    assert whose_model(records, frozenset({"host"})) == "true"
    assert whose_model(records, frozenset({"another"})) == "forged"
    assert whose_model([*records[1:2], ModelRecord(b"4", "true"), ModelRecord(b"5", "true")], frozenset()) == "true"
    assert whose_model([], frozenset()) is None


@pytest.mark.parametrize("value", [None, 7, "x", [], ["d" * 65, "peer", b""], ["d", "0OIl", b""], ["d", "Qm", "text"]])
def test_what_is_no_record_is_passed_over(value):
    assert parse_record(b"owner", value) is None


def test_only_the_peer_itself_counts_as_the_one_that_has_invited(swarm):
    with hivenb.Swarm.join(swarm.invite, "guest") as guest:
        own, others = RecordBoard(swarm.dht, "x").owner, RecordBoard(guest.dht, "x").owner
        for dht, owner, inviting in (
            (swarm.dht, own, swarm.peer_id),
            (guest.dht, own, ""),
            (guest.dht, others, ""),
        ):
            record = parse_record(owner, ["digest", swarm.peer_id, dht.prove(owner)])
            assert record == ModelRecord(owner, "digest", inviting)
