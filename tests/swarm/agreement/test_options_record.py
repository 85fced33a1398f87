"""The swarm follows its host: all peers train with the same swarm-wide options, from the same epoch on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from joining_peer import DiaryModel, diaries, peer
from tiny import LOOPBACK, loader

import hivenb
from hivenb.engine.network.record_board import RECORD_BYTES, is_owned, owner_of
from hivenb.errors import OptionsError
from hivenb.options import FIELDS, Options
from hivenb.options.swarm_wide import PART_SIZE, SHARED_FIELDS, shared_part, with_shared_part
from hivenb.run.status import RunState
from hivenb.swarm.agreement.options_record import (
    EXPIRATION,
    NOTICE,
    Declaration,
    Plan,
    Records,
    epochs_ahead,
    parse,
)

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 90.0

OPTIONS = Options(target_batch_size=512, matchmaking_time=3.0, averaging_timeout=20.0, run_id="followed")
OWN = {"target_batch_size": 512, "matchmaking_time": 3.0, "averaging_timeout": 20.0}
SHARED = shared_part(OPTIONS)
OWNER = owner_of(RSAPrivateKey())


# -- what travels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_batch_size": 96, "average_state_every": 3},
        {"average_opt_statistics": ("exp_avg", "exp_avg_sq"), "use_local_updates": True},
        {"grad_averager_factory": partial(PowerSGDGradientAverager, averager_rank=4)},
        {"averager_opts": {PART_SIZE: 2**17, "min_group_size": 2}},
    ],
)
def test_what_all_peers_need_alike_survives_the_journey_and_the_rest_stays(changes: dict[str, Any]) -> None:
    there, here = (
        OPTIONS.replace(**changes),
        OPTIONS.replace(grad_compression="float16", averager_opts={"bandwidth": 7}),
    )
    declared = parse(OWNER, Declaration(OWNER, "peer", 1.0, Plan(1, ((0, shared_part(there)),))).pack())
    assert declared is not None
    after = with_shared_part(here, declared.plan.newest)
    assert shared_part(after) == shared_part(there) == declared.plan.newest
    assert after.grad_compression == "float16"
    assert after.averager_opts["bandwidth"] == 7
    assert with_shared_part(after, SHARED) == here


def test_every_swarm_wide_option_travels() -> None:
    wide = {name for name, info in FIELDS.items() if info.swarm_wide}
    assert set(SHARED_FIELDS) == wide - {"run_id"}
    assert {*SHARED_FIELDS, PART_SIZE} == set(SHARED)


class OwnAverager(PowerSGDGradientAverager):
    """Of this test alone."""


@pytest.mark.process
def test_an_averager_of_ones_own_is_named_and_taken_from_whoever_has_it() -> None:
    own = partial(OwnAverager, averager_rank=2)
    shared = shared_part(OPTIONS.replace(grad_averager_factory=own))
    with pytest.raises(OptionsError, match=r"test_options_record\.OwnAverager, which is not hivemind's own: give this"):
        with_shared_part(OPTIONS, shared)
    assert with_shared_part(OPTIONS, shared, OPTIONS.replace(grad_averager_factory=own)).grad_averager_factory is own


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"[]",
        b"\xff",
        "text",
        7,
        b'{"peer":"x","since":1,"version":0,"steps":[]}',
        b'{"peer":"x","since":NaN,"version":0,"steps":[[0,{}]]}',
        b'{"peer":7,"since":1,"version":0,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[5,{}],[4,{}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,{"target_batch_size":-5}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,{"target_batch_size":"many"}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,{"average_opt_statistics":[7]}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":' + b"[" * 1500 + b"}",
        b'{"peer":"x","since":1,"version":1e999,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1,"version":1.0,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1,"version":true,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1,"version":' + b"9" * 1500 + b',"steps":[[0,{}]]}',
        b'{"peer":"x","since":true,"version":0,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1e300,"version":0,"steps":[[0,{}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[1e999,{}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,{}],[1]]}',
        b'{"peer":"x","since":1,"version":0,"steps":{"0":{}}}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,{"target_batch_size":1e999}]]}',
        b'{"peer":"x","since":1,"version":0,"steps":[[0,7]]}',
        b'{"peer":"' + b"x" * 101 + b'","since":1,"version":0,"steps":[[0,{}]]}',
        b'{"peer":"' + b"x" * RECORD_BYTES + b'","since":1,"version":0,"steps":[[0,{}]]}',
    ],
)
def test_what_is_no_declaration_is_passed_over(value: Any) -> None:
    assert parse(OWNER, value) is None


def test_a_declaration_counts_only_where_nobody_else_can_write() -> None:
    packed = Declaration(OWNER, "peer", 1.0, Plan(0, ((0, SHARED),))).pack()
    assert parse(OWNER, packed) is not None
    for place in (b"", b"anywhere", "text", 7, OWNER + b"x", b"x" + OWNER, OWNER + OWNER):
        assert parse(place, packed) is None
    assert not is_owned(b"[owner:]x")


def test_what_a_newer_version_declares_beside_is_passed_over() -> None:
    packed = b'{"peer":"x","since":1,"version":0,"steps":[[0,{"target_batch_size":96,"mood":"good"}]],"more":1}'
    declared = parse(OWNER, packed)
    assert declared is not None
    assert with_shared_part(OPTIONS, declared.plan.newest) == OPTIONS.replace(target_batch_size=96)


def test_what_is_too_long_to_travel_says_so() -> None:
    shared = shared_part(OPTIONS.replace(average_opt_statistics=[f"statistic_{n}" for n in range(200)]))
    with pytest.raises(OptionsError, match=r"takes \d+ bytes, and 2048 can travel"):
        Declaration(OWNER, "peer", 1.0, Plan(0, ((0, shared),))).require_short()


def test_an_order_travels_where_there_is_room_for_it() -> None:
    order = tuple(f"{number:016x}" for number in range(20))
    proven = Declaration(OWNER, "peer", 1.0, Plan(1, ((0, SHARED),)), order, b"x" * 64)
    told = parse(OWNER, proven.pack())
    assert told is not None
    assert (told.order, told.proof) == (order[:8], b"x" * 64)
    wide = shared_part(OPTIONS.replace(average_opt_statistics=["s" * 1500]))
    told = parse(OWNER, Declaration(OWNER, "peer", 1.0, Plan(1, ((0, wide),)), order, b"x" * 64).pack())
    assert told is not None
    assert (told.order, told.proof) == ((), b"x" * 64)


def test_a_plan_says_what_counts_in_each_epoch() -> None:
    first, second, third, fourth = ({"target_batch_size": n} for n in (1, 2, 3, 4))
    plan = Plan(0, ((0, first),)).changed(second, since=12, now=10)
    assert [plan.at(epoch) for epoch in (0, 10, 11, 12, 99)] == [first, first, first, second, second]
    later = plan.changed(third, since=14, now=11)
    assert [later.at(epoch) for epoch in (11, 12, 13, 14)] == [first, second, second, third]
    assert later.changed(fourth, since=12, now=11).newest == fourth, "what was to come after it is overtaken"
    assert later.changed(fourth, since=20, now=15).steps == ((0, third), (20, fourth)), "what is over is forgotten"
    assert plan.changed(third, since=11, now=11).steps == ((11, third),)
    assert later.version == 2


@pytest.mark.parametrize(
    ("left", "each", "ahead"),
    [(None, None, 2), (None, 100.0, 2), (2 * NOTICE, 100.0, 1), (1.0, 100.0, 2), (0.1, NOTICE / 4, 5), (1.0, 0.0, 2)],
)
def test_a_change_is_announced_early_enough_and_no_earlier(left: float, each: float, ahead: int) -> None:
    assert epochs_ahead(left, each) == ahead


# -- the DHT ------------------------------------------------------------------------------------------------------


@pytest.fixture
def intruder(swarm: hivenb.Swarm) -> Iterator[Callable[[RSAPrivateKey | None], hivemind.DHT]]:
    """Makes DHTs of plain hivemind that check nothing of what they store."""
    made = []

    def make(key: RSAPrivateKey | None) -> hivemind.DHT:
        validators = [] if key is None else [RSASignatureValidator(key)]
        made.append(
            hivemind.DHT(initial_peers=list(swarm.addresses), record_validators=validators, start=True, **LOOPBACK)
        )
        return made[-1]

    yield make
    for dht in made:
        dht.shutdown()


def test_records_that_are_forged_unsigned_or_malformed_are_ignored(
    swarm: hivenb.Swarm, intruder: Any, eventually: Callable[..., None]
) -> None:
    true = Plan(0, ((0, SHARED),))
    host = Records(swarm.dht, "forged")
    host.write(Declaration(host.owner, swarm.peer_id, 100.0, true))
    unsigning, key = intruder(None), RSAPrivateKey()
    signing = intruder(key)
    false = Declaration(host.owner, "evil", 0.0, Plan(9, ((0, shared_part(OPTIONS.replace(target_batch_size=1))),)))

    def store(dht: hivemind.DHT, subkey: Any, value: Any, seconds: float = EXPIRATION + 5) -> None:
        dht.store("forged_options", subkey=subkey, value=value, expiration_time=get_dht_time() + seconds)

    store(unsigning, host.owner, false.pack())  # over the host's, without a signature
    store(signing, host.owner, false.pack())  # with that of another
    store(unsigning, owner_of(RSAPrivateKey()), false.pack())  # for somebody, without a signature
    store(unsigning, b"anybody", false.pack())
    store(unsigning, host.owner, None)  # as if the host had left
    store(signing, owner_of(key), b'{"since": 0, "steps": "none"}')
    with hivenb.Swarm.join(swarm.invite, "another") as another:
        reader = Records(another.dht, "forged")
        eventually(lambda: reader.read())
        assert [(one.owner, one.plan.newest) for one in reader.read()] == [(host.owner, SHARED)]
        # signed, but to stand for ever
        store(signing, owner_of(key), false.pack(), seconds=1e6)
        assert [one.owner for one in reader.read()] == [host.owner]
        # whoever has a key of its own may declare itself: it is in the swarm as any other peer
        store(signing, owner_of(key), Declaration(owner_of(key), "late", 200.0, true).pack())
        host.withdraw(10.0)
        eventually(lambda: host.owner not in [one.owner for one in reader.read()])


# -- real peers ---------------------------------------------------------------------------------------------------


def make_run(swarm: hivenb.Swarm, folder: Path, options: Options = OPTIONS) -> hivenb.TrainingRun:
    return hivenb.TrainingRun(
        DiaryModel(folder), loader(4096, 8, shuffle=True), swarm=swarm, options=options, accelerator="cpu"
    )


def texts(run: hivenb.TrainingRun) -> list[str]:
    return [event.text for event in run.history.snapshot().events]


def changed_at(diary: list[tuple[int, int]], target: int) -> int:
    """The first epoch of a target batch size in a diary; each epoch in it must have one target."""
    epochs = [epoch for epoch, _ in diary]
    assert epochs == sorted(set(epochs)), "an epoch went on with other options than it began with"
    return next(epoch for epoch, size in diary if size == target)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_peers_change_at_the_same_epoch_and_only_the_host_can_change_it(
    tmp_path: Path, swarm: hivenb.Swarm, eventually: Callable[..., None]
) -> None:
    run = make_run(swarm, tmp_path)
    swarm.add_local_peers(1, run)
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.not_host_reason is None
    with peer(
        swarm.invite, tmp_path, "followed", **{**OWN, "target_batch_size": 64, "average_state_every": 3}
    ) as guest:
        # it adopts what is agreed on, and says so
        assert guest.ask("wait", epochs=1, timeout=PATIENCE)
        told = guest.ask("tell")
        assert told["options"] == {"target_batch_size": 512, "average_state_every": 1}
        assert {"target batch size: 512", "swarm epochs between averagings: 1"} <= set(told["events"])
        said = [line for line in told["log"] if "instead of its own" in line]
        assert len(said) == 1
        assert "the swarm's target batch size, swarm epochs between averagings" in said[0]
        assert swarm.peer_id[-6:] in said[0]
        eventually(lambda: run.history.snapshot().last("group_size") == 3, PATIENCE)

        # it cannot change it
        with pytest.raises(AssertionError, match=rf"OptionsError: target batch size cannot be .*{swarm.peer_id[-6:]}"):
            guest.ask("apply", target_batch_size=64)
        assert guest.ask("apply", grad_compression="float16") == 512
        assert guest.ask("tell")["options"]["target_batch_size"] == 512

        # the host can
        epoch = run.strategy.hivemind_epoch
        run.apply(target_batch_size=384, wait=False)
        assert run.pending_options is not None
        assert run.pending_options.target_batch_size == 384
        assert run.options.target_batch_size == 512
        assert run.apply(grad_compression="float16").target_batch_size == 384
        assert run.options == OPTIONS.replace(grad_compression="float16"), "what is this peer's own does not wait"
        eventually(lambda: run.options.target_batch_size == 384, PATIENCE)
        assert run.pending_options is None
        assert run.strategy.options == run.options
        assert run.wait(epochs=2, timeout=PATIENCE)
        eventually(lambda: guest.ask("tell")["options"]["target_batch_size"] == 384, PATIENCE)
        assert guest.ask("wait", epochs=1, timeout=PATIENCE)
        eventually(lambda: run.history.snapshot().last("group_size") == 3, PATIENCE)
        written = diaries(tmp_path)
        assert set(written) == {os.getpid(), swarm.local_peers[0].pid, guest.process.pid}
        at = {pid: changed_at(diary, 384) for pid, diary in written.items()}
        assert len(set(at.values())) == 1, at
        assert at[os.getpid()] > epoch + 1
        assert "target batch size: 384" in guest.ask("tell")["events"]

    # nothing was lost by it
    assert run.status.state is RunState.TRAINING
    epochs = [epoch for epoch, _ in diaries(tmp_path)[os.getpid()]]
    assert epochs == list(range(epochs[0], epochs[-1] + 1))
    losses = run.history.snapshot().series["loss"].values
    assert losses[-5:].mean() < losses[:5].mean()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("goodbye", [True, pytest.param(False, marks=pytest.mark.long)], ids=["leaves", "is killed"])
def test_when_the_host_goes_the_next_peer_can_change_options(
    tmp_path: Path, goodbye: bool, eventually: Callable[..., None]
) -> None:
    with peer(None, tmp_path, "followed", **OWN) as first:
        assert first.ask("wait", epochs=1, timeout=PATIENCE)
        host = first.ask("tell")
        assert host["not_host_reason"] is None
        with hivenb.Swarm.join(host["invite"], "next") as swarm:
            run = make_run(swarm, tmp_path, OPTIONS.replace(target_batch_size=96))
            run.start()
            eventually(lambda: run.history.snapshot().last("group_size") == 2, PATIENCE)
            assert run.options.target_batch_size == 512
            assert run.not_host_reason is not None
            with pytest.raises(OptionsError, match=rf"cannot be changed at this peer: .*{host['peer_id'][-6:]}"):
                run.apply(average_state_every=2)
            with peer(swarm.invite, tmp_path, "followed", **OWN) as third:
                assert third.ask("wait", epochs=1, timeout=PATIENCE)
                eventually(lambda: run.history.snapshot().last("group_size") == 3, PATIENCE)
                if goodbye:
                    first.ask("stop")
                else:
                    first.process.kill()
                eventually(lambda: run.not_host_reason is None, EXPIRATION + 30)
                # each sees it at its own next look
                eventually(lambda: swarm.peer_id[-6:] in str(third.ask("tell")["not_host_reason"]), PATIENCE)
                eventually(lambda: run.history.snapshot().last("group_size") == 2, PATIENCE)
                assert run.apply(target_batch_size=256).target_batch_size == 256
                eventually(lambda: third.ask("tell")["options"]["target_batch_size"] == 256, PATIENCE)
                assert run.wait(epochs=2, timeout=PATIENCE)
                written = diaries(tmp_path)
                at = {changed_at(written[pid], 256) for pid in (os.getpid(), third.process.pid)}
                assert len(at) == 1, written
                if goodbye:  # the one who started the run is host again, and goes on with what was decided meanwhile
                    first.ask("start")
                    assert first.ask("wait", epochs=1, timeout=PATIENCE)
                    eventually(lambda: run.not_host_reason is not None, PATIENCE)
                    assert first.ask("tell")["options"]["target_batch_size"] == 256


@pytest.mark.slow
def test_alone_nothing_has_to_be_waited_for(tmp_path: Path, swarm: hivenb.Swarm) -> None:
    run = make_run(swarm, tmp_path)
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    epoch = run.strategy.hivemind_epoch
    run.apply(target_batch_size=64)
    assert run.options.target_batch_size == 64
    assert run.strategy.hivemind_epoch <= epoch + 1
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    run.apply(target_batch_size=128)
    assert run.options.target_batch_size == 128
    run.stop()
    run.apply(target_batch_size=96)
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.options.target_batch_size == 96
    run.stop()
