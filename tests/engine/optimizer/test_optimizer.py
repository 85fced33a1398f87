"""The optimizer on any thread: trains, tells, hands its state over, and leaves nothing alive."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import hivemind
import psutil
import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from in_memory.real_time import RealTimeDHT, RealTimeSwarm
from tiny import DELAYS, LOOPBACK, TinyModel, parameters, samples, train

from hivenb.engine.averaging.state_download import Download
from hivenb.engine.network.dht import DHT
from hivenb.engine.optimizer import catch_up as module
from hivenb.engine.optimizer.handover import rehome
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.optimizer.scheduled_rounds import EpochReport
from hivenb.engine.optimizer.skipped_batches import GradScalerOfBatches
from hivenb.engine.progress import tracker
from hivenb.engine.progress.peer_reports import read_peers
from hivenb.errors import SwarmError

Make = Callable[..., Optimizer]


def trackers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, ProgressTracker)}


@pytest.fixture(autouse=True)
def no_tracker_left() -> Iterator[None]:
    before = trackers()
    yield
    for thread in trackers() - before:
        thread.join(10)
    assert trackers() <= before


class TestWithProcesses:
    def test_it_does_what_torch_does(self, make_optimizer: Make) -> None:
        plain, model = TinyModel(), TinyModel()
        train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 3)
        optimizer = make_optimizer(optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
        optimizer.begin()
        train(model, optimizer, 3, batch_size=8)
        assert optimizer.local_epoch == 3
        for expected, got in zip(parameters(plain), parameters(model), strict=True):
            assert torch.allclose(expected, got, atol=1e-7)

    def test_in_a_background_thread_from_birth_to_end(self, dht: DHT, run_id: str) -> None:
        before = signal.getsignal(signal.SIGINT)
        model, reports, failures = TinyModel(), [], []
        children = {child.pid for child in psutil.Process().children()}

        def live() -> None:
            try:
                optimizer = Optimizer(
                    dht=dht,
                    run_id=run_id,
                    target_batch_size=8,
                    optimizer=partial(torch.optim.SGD, lr=0.1),
                    params=list(model.parameters()),
                    offload_optimizer=True,
                    delay_optimizer_step=True,
                    delay_grad_averaging=True,
                    delay_state_averaging=True,
                    matchmaking_time=0.5,
                    averaging_timeout=20,
                    on_epoch=reports.append,
                )
                optimizer.begin()
                train(model, optimizer, 4, batch_size=8)
                optimizer.shutdown()
                optimizer.shutdown()  # once more does no harm
            except BaseException as e:
                failures.append(e)

        thread = threading.Thread(target=live)
        thread.start()
        thread.join(90)
        assert not failures
        assert not thread.is_alive()
        assert [report.epoch for report in reports] == [1, 2, 3, 4]
        assert {child.pid for child in psutil.Process().children()} <= children
        assert signal.getsignal(signal.SIGINT) is before
        # all that was on its way has been applied: torch makes the same of it, but one gradient is a step old each time
        assert not torch.equal(parameters(model)[0], parameters(TinyModel())[0])


class TestAlone:
    @pytest.fixture
    def make_optimizer(self, make_optimizer_in_memory: Make) -> Make:
        """Without processes."""
        return make_optimizer_in_memory

    @pytest.mark.parametrize("sizes", [(5, 3), (1, 7), (3, 3, 2)])
    @pytest.mark.parametrize("factory", [None, GradientAverager], ids=["ours", "the user's"])
    def test_batches_count_by_their_samples(
        self, make_optimizer: Make, sizes: tuple[int, ...], factory: Callable[..., Any] | None
    ) -> None:
        plain, model = TinyModel(), TinyModel()
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
        optimizer = make_optimizer(model.parameters(), grad_averager_factory=factory)
        for x, y in zip(*(part.split(sizes) for part in samples(8)), strict=True):
            assert optimizer.local_epoch == 0
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model.layer(x), y).backward()
            optimizer.step(batch_size=len(x))
        assert optimizer.local_epoch == 1
        for expected, got in zip(parameters(plain), parameters(model), strict=True):
            assert torch.allclose(expected, got, atol=1e-6)

    def test_tells_of_each_epoch_on_the_training_thread(self, make_optimizer: Make) -> None:
        told: list[tuple[EpochReport, threading.Thread]] = []
        model = TinyModel()
        optimizer = make_optimizer(
            model.parameters(), on_epoch=lambda report: told.append((report, threading.current_thread()))
        )
        train(model, optimizer, 2, batch_size=9)
        reports = [report for report, _ in told]
        assert [(r.epoch, r.samples, r.group_size, r.failed) for r in reports] == [(1, 9, 1, None), (2, 9, 1, None)]
        assert all(0 <= report.seconds < 60 for report in reports)
        assert {thread for _, thread in told} == {threading.main_thread()}

    def test_tells_how_long_training_stood_still_in_steps_that_end_no_epoch_too(self, make_optimizer: Make) -> None:
        reports: list[EpochReport] = []
        model = TinyModel()
        optimizer = make_optimizer(model.parameters(), on_epoch=reports.append)
        catching_up = optimizer.state_averager.step

        def slow_step(**kwargs: Any) -> Any:
            time.sleep(0.1)
            return catching_up(**kwargs)

        optimizer.state_averager.step = slow_step
        train(model, optimizer, 4, batch_size=4)
        assert [report.epoch for report in reports] == [1, 2]
        assert all(report.seconds >= 0.2 for report in reports), "each of an epoch's two steps waits for it"

    def test_options_of_the_averagers_reach_both_as_far_as_they_know_them(
        self, make_optimizer: Make, run_id: str
    ) -> None:
        optimizer = make_optimizer(
            TinyModel().parameters(),
            averager_opts={
                "request_timeout": 1.25,
                "target_group_size": 4,
                "initialize_optimizer": False,
                "sync_epoch_when_averaging": True,
                "reuse_tensors": False,
                "parameter_names": ("weight", "bias"),
            },
        )
        for averager in (optimizer.state_averager, optimizer.grad_averager):
            assert averager.matchmaking_kwargs["request_timeout"] == 1.25
            assert averager.matchmaking_kwargs["target_group_size"] == 4
        assert optimizer.state_averager.sync_epoch_when_averaging

    @pytest.mark.parametrize("share", [True, False])
    def test_the_state_is_shared_only_after_the_beginning_and_only_if_wanted(
        self, make_optimizer: Make, share: bool
    ) -> None:
        optimizer = make_optimizer(TinyModel().parameters(), averager_opts={"allow_state_sharing": share})
        assert not optimizer.state_averager.allow_state_sharing
        optimizer.begin()
        assert optimizer.state_averager.allow_state_sharing is share

    @pytest.mark.parametrize("delays", [{}, DELAYS], ids=["synchronous", "all delays"])
    def test_the_others_wait_for_its_last_batch_unless_they_average_in_the_background(
        self, make_optimizer: Make, delays: dict[str, Any]
    ) -> None:
        model = TinyModel()
        optimizer = make_optimizer(optimizer=partial(torch.optim.SGD, lr=0.1), params=model.parameters(), **delays)
        model.layer(torch.ones(1, 4)).sum().backward()
        optimizer.step(batch_size=1)
        assert optimizer.tracker.is_waited_for is not bool(delays)

    @pytest.mark.parametrize(("factory", "has_state"), [(None, False), (PowerSGDGradientAverager, True)])
    def test_newcomers_download_from_the_gradients_averager_what_it_has_to_say(
        self, make_optimizer: Make, monkeypatch: pytest.MonkeyPatch, factory: Any, has_state: bool
    ) -> None:
        if factory is not None:
            factory = partial(factory, averager_rank=1)
        optimizer = make_optimizer(TinyModel().parameters(), grad_averager_factory=factory)
        optimizer.begin()
        assert optimizer.grad_averager.allow_state_sharing is has_state
        asked: list[str] = []
        for name in ("state_averager", "grad_averager"):
            averager = getattr(optimizer, name)
            monkeypatch.setattr(averager, "load_state_from_peers", lambda *_, name=name, **__: asked.append(name))
        optimizer.load_state_from_peers()
        assert asked == ["state_averager", "grad_averager"][: 1 + has_state]

    @pytest.mark.parametrize("asked_for", [None, True, False])
    def test_client_mode_is_the_dhts_unless_asked_for(self, make_optimizer: Make, asked_for: bool | None) -> None:
        optimizer = make_optimizer(TinyModel().parameters(), client_mode=asked_for)
        assert optimizer.client_mode is bool(asked_for)
        assert optimizer.tracker.client_mode is bool(asked_for)
        assert optimizer.state_averager.client_mode is bool(asked_for)
        train(TinyModel(), optimizer, 0)
        optimizer.begin()

    def test_a_client_trains(self, swarm_in_memory: RealTimeSwarm, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_optimizer(model.parameters(), dht=swarm_in_memory.join(client_mode=True))
        optimizer.begin()
        train(model, optimizer, 2, batch_size=8)
        assert optimizer.client_mode
        assert optimizer.local_epoch == 2

    def test_power_sgd_trains(self, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_optimizer(
            model.parameters(), grad_averager_factory=partial(PowerSGDGradientAverager, averager_rank=1)
        )
        train(model, optimizer, 2, batch_size=8)
        assert optimizer.local_epoch == 2

    def test_local_updates_train(self, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_optimizer(model.parameters(), use_local_updates=True)
        optimizer.begin()
        train(model, optimizer, 2, batch_size=8)
        assert optimizer.local_epoch == 2
        optimizer.retire()

    def test_stepping_aside_and_coming_back(
        self, make_optimizer: Make, memory_dht: Any, run_id: str, eventually: Callable[..., None]
    ) -> None:
        dht, model = memory_dht, TinyModel()
        optimizer = make_optimizer(model.parameters())
        optimizer.begin()
        eventually(lambda: len(read_peers(dht, run_id, 10)) == 1)
        optimizer.step_aside()
        optimizer.step_aside()
        eventually(lambda: not read_peers(dht, run_id, 10))
        train(model, optimizer, 2, batch_size=8)
        eventually(lambda: [peer.epoch for peer in read_peers(dht, run_id, 10)] == [2])

    def test_lightnings_wrapper_does_not_end_it(self, make_optimizer: Make) -> None:
        from lightning.pytorch.core.optimizer import LightningOptimizer

        optimizer = make_optimizer(TinyModel().parameters())
        wrapper = LightningOptimizer(optimizer)
        del wrapper
        assert optimizer.is_alive()


class TestState:
    @pytest.fixture
    def make_optimizer(self, make_optimizer_in_memory: Make) -> Make:
        """Without processes."""
        return make_optimizer_in_memory

    @pytest.mark.parametrize("offload", [False, True])
    def test_there_and_back(self, make_optimizer: Make, offload: bool) -> None:
        def make(model: TinyModel, **kwargs: Any) -> Optimizer:
            if offload:
                kwargs |= {"params": list(model.parameters()), "offload_optimizer": True, "optimizer": adam}
            else:
                kwargs |= {"optimizer": adam(model.parameters())}
            return make_optimizer(**kwargs)

        adam = partial(torch.optim.Adam, lr=0.1)
        plain = TinyModel()
        train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), 5)

        first = TinyModel()
        before = make(first)
        train(first, before, 3, batch_size=8)
        saved, weights = before.state_dict(), first.state_dict()
        weights = {key: value.clone() for key, value in weights.items()}
        before.shutdown()

        second = TinyModel()
        after = make(second)  # before the weights are loaded, as Lightning does
        second.load_state_dict(weights)
        after.load_state_dict(saved)
        assert after.local_epoch == 3
        assert after.tracker.local_progress.epoch == after.tracker.global_epoch == 3
        for seed in (3, 4):
            x, y = samples(8, seed=seed)
            after.zero_grad()
            torch.nn.functional.mse_loss(second.layer(x), y).backward()
            after.step(batch_size=8)
        after.state_averager.step(wait_for_delayed_updates=True)
        assert after.local_epoch == 5
        for expected, got in zip(parameters(plain), parameters(second), strict=True):
            assert torch.allclose(expected, got, atol=1e-6)

    def test_torch_can_load_it_and_the_other_way_round(self, make_optimizer: Make) -> None:
        model, other = TinyModel(), TinyModel()
        optimizer = make_optimizer(optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        train(model, optimizer, 2, batch_size=8)
        plain = torch.optim.Adam(other.parameters(), lr=0.3)
        plain.load_state_dict(optimizer.state_dict())
        assert plain.param_groups[0]["lr"] == 0.1
        moments = [state["exp_avg"] for state in plain.state.values()]
        assert all(torch.equal(a, b["exp_avg"]) for a, b in zip(moments, optimizer.opt.state.values(), strict=True))
        train(other, plain, 1)
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.local_epoch == 2, "torch knows of no epochs"
        assert all(float(state["step"]) == 3 for state in optimizer.opt.state.values())

    def test_what_was_saved_does_not_change_while_training_goes_on(self, make_optimizer: Make) -> None:
        model = TinyModel()
        optimizer = make_optimizer(model.parameters())
        state = optimizer.state_dict()
        given = dict(state)
        optimizer.load_state_dict(state)
        assert state == given, "the caller's dict is the caller's"
        assert state["hivemind"] == {"local_epoch": 0}


BAD: list[dict[str, Any]] = [
    {"grad_averager_factory": lambda **kwargs: None},
    {"averager_opts": {"no_such_option": 1}},
    {"tracker_opts": {"no_such_option": 1}},
    {"run_id": "a.dot"},
    {"scheduler": lambda optimizer: 1 / 0},
    {"average_opt_statistics": ("no_such_statistic",)},
]


def test_a_constructor_that_fails_leaves_no_process_alive(make_optimizer: Make) -> None:
    children = {child.pid for child in psutil.Process().children()}
    with pytest.raises(Exception):  # noqa: B017, PT011 - its own
        make_optimizer(TinyModel().parameters(), **BAD[0])
    assert {c.pid for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE} <= children


def test_an_end_that_fails_leaves_no_process_alive_either(
    make_optimizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a device has failed, and fails once more when the last step is applied."""
    optimizer = make_optimizer(TinyModel().parameters())
    averagers = optimizer.state_averager, optimizer.grad_averager
    with monkeypatch.context() as patched:
        patched.setattr(optimizer.state_averager, "step", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.shutdown()
    assert not any(one.is_alive() for one in averagers)


def test_an_interrupt_that_comes_while_the_background_is_waited_for_is_not_dropped(
    make_optimizer_in_memory: Make,
) -> None:
    """In a script with delays, that is where the main thread is most of the time."""
    optimizer = make_optimizer_in_memory(TinyModel().parameters())
    under_way: Future[None] = Future()
    optimizer.state_averager.pending_updates.add(under_way)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.finish_delayed_updates()
    timer.join()
    under_way.set_result(None)
    optimizer.finish_delayed_updates()


class TestFailures:
    @pytest.fixture
    def make_optimizer(self, make_optimizer_in_memory: Make) -> Make:
        """Without processes."""
        return make_optimizer_in_memory

    @pytest.mark.parametrize("bad", BAD, ids=lambda bad: next(iter(bad)))
    def test_a_constructor_that_fails_leaves_nothing_alive(
        self, make_optimizer: Make, swarm_in_memory: RealTimeSwarm, bad: dict[str, Any]
    ) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - each has its own
            make_optimizer(TinyModel().parameters(), **bad)
        assert all(one.poll() is not None for one in swarm_in_memory.served)

    def test_a_state_that_cannot_be_downloaded_is_an_error_after_some_attempts(
        self, make_optimizer: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LOAD_STATE_ATTEMPTS", 2)
        optimizer = make_optimizer(TinyModel().parameters(), load_state_timeout=1.0)
        attempts = []
        load = optimizer.state_averager.load_state_from_peers

        def counted(**kwargs: Any) -> Any:
            attempts.append(kwargs)
            load(**kwargs)
            raise TimeoutError("nobody has it")

        monkeypatch.setattr(optimizer.state_averager, "load_state_from_peers", counted)
        with pytest.raises(SwarmError, match=r"in 2 attempts\. Do all peers train the same model"):
            optimizer.load_state_from_peers()
        assert len(attempts) == 2
        assert not optimizer.tracker.lock_global_progress.locked()

    @pytest.mark.parametrize("times", [1, 2])
    def test_a_state_that_does_not_fit_is_downloaded_once_more(
        self, make_optimizer: Make, monkeypatch: pytest.MonkeyPatch, times: int
    ) -> None:
        """The end of what a peer of plain hivemind sends may be lost."""
        optimizer = make_optimizer(TinyModel().parameters(), load_state_timeout=1.0)
        misfits = [SwarmError("it has 1 tensor, and this peer has 2")] * times
        load = optimizer.state_averager.load_state_from_peers

        def misfit_first(**kwargs: Any) -> Any:
            if misfits:
                raise misfits.pop()
            return load(**kwargs)

        monkeypatch.setattr(optimizer.state_averager, "load_state_from_peers", misfit_first)
        with pytest.raises(SwarmError, match="1 tensor") if times > 1 else contextlib.nullcontext():
            optimizer.load_state_from_peers()
        assert not misfits


def test_shutting_down_after_the_dht(run_id: str, make_optimizer: Make) -> None:
    dht = DHT(start=True, **LOOPBACK)
    model = TinyModel()
    optimizer = make_optimizer(model.parameters(), dht=dht)
    optimizer.begin()
    train(model, optimizer, 1, batch_size=8)
    dht.shutdown()
    optimizer.shutdown()
    assert not optimizer.is_alive()
    assert not optimizer.grad_averager.is_alive()


def test_shutting_down_after_an_averager_was_killed(make_optimizer: Make) -> None:
    model = TinyModel()
    optimizer = make_optimizer(model.parameters())
    optimizer.begin()
    train(model, optimizer, 1, batch_size=8)
    optimizer.state_averager.kill()
    optimizer.shutdown()
    assert not optimizer.grad_averager.is_alive()
    optimizer.tracker.join(10)
    assert not optimizer.tracker.is_alive(), "its threads would keep the interpreter from ending"


def begin_at(optimizer: Optimizer, epoch: int) -> None:
    """As with a checkpoint of that epoch."""
    optimizer.load_state_dict({**optimizer.state_dict(), "hivemind": {"local_epoch": epoch}})
    optimizer.begin()


def counted_downloads(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs at which it has downloaded the state, as it does."""
    epochs: list[int] = []
    load = optimizer.state_averager.load_state_from_peers

    def counted(**kwargs: Any) -> Any:
        epochs.append(optimizer.local_epoch)
        return load(**kwargs)

    monkeypatch.setattr(optimizer.state_averager, "load_state_from_peers", counted)
    return epochs


@pytest.fixture
def silent_peers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the list, also where the machine is slow and the test takes long."""
    monkeypatch.setattr(tracker, "SILENCE", 1000.0)


@pytest.mark.usefixtures("silent_peers_stay")
def test_one_that_joins_takes_the_state_of_those_that_are_there(
    make_optimizer: Make, joining_dht: DHT, dht: DHT
) -> None:
    model, joiner = TinyModel(), TinyModel()
    with torch.no_grad():
        joiner.layer.weight.zero_()
    adam = partial(torch.optim.Adam, lr=0.1)
    # a target that nobody reaches while the newcomer loads
    first = make_optimizer(optimizer=adam(model.parameters()), target_batch_size=10_000)
    first.begin()
    train(model, first, 3, batch_size=10_000)
    assert first.local_epoch == 3
    second = make_optimizer(optimizer=adam(joiner.parameters()), dht=joining_dht, target_batch_size=10_000)
    second.begin()
    assert second.local_epoch == 3
    for theirs, ours in zip(parameters(model), parameters(joiner), strict=True):
        assert torch.equal(theirs, ours)
    assert [float(state["step"]) for state in second.opt.state.values()] == [3.0, 3.0]
    for theirs, ours in zip(first.opt.state.values(), second.opt.state.values(), strict=True):
        assert torch.equal(theirs["exp_avg"], ours["exp_avg"])
    second.shutdown()


@pytest.mark.usefixtures("silent_peers_stay")
class TestJoining:
    @pytest.fixture
    def make_optimizer(self, make_optimizer_in_memory: Make) -> Make:
        """Without processes."""
        return make_optimizer_in_memory

    def test_it_has_that_state_before_its_first_batch_and_downloads_it_once(
        self, make_optimizer: Make, joining_memory_dht: RealTimeDHT, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, joiner = TinyModel(), TinyModel()
        with torch.no_grad():
            joiner.layer.weight.zero_()
        begin_at(make_optimizer(model.parameters(), target_batch_size=10_000), 3)
        second = make_optimizer(joiner.parameters(), dht=joining_memory_dht, target_batch_size=10_000)
        downloads = counted_downloads(second, monkeypatch)
        second.begin()
        assert second.local_epoch == 3
        for theirs, ours in zip(parameters(model), parameters(joiner), strict=True):
            assert torch.equal(theirs, ours)
        train(joiner, second, 3, batch_size=1)
        assert downloads == [0]
        assert second.local_progress.samples_accumulated == 3, "none of its batches was in vain"
        second.shutdown()

    def test_one_that_is_alone_begins_at_once(self, make_optimizer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer = make_optimizer(TinyModel().parameters())
        downloads = counted_downloads(optimizer, monkeypatch)
        began = time.monotonic()
        optimizer.begin()
        assert time.monotonic() - began < module.FIRST_LOOK / 2
        assert not downloads

    def test_one_that_a_checkpoint_has_brought_further_keeps_its_state(
        self, make_optimizer: Make, joining_memory_dht: RealTimeDHT, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin_at(make_optimizer(TinyModel().parameters(), target_batch_size=10_000), 1)
        second = make_optimizer(TinyModel().parameters(), dht=joining_memory_dht, target_batch_size=10_000)
        downloads = counted_downloads(second, monkeypatch)
        begin_at(second, 4)
        assert second.local_epoch == 4
        assert not downloads
        second.shutdown()

    def test_one_that_cannot_have_the_state_does_not_begin(
        self, make_optimizer: Make, joining_memory_dht: RealTimeDHT, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin_at(make_optimizer(TinyModel().parameters(), target_batch_size=10_000), 1)
        second = make_optimizer(torch.nn.Linear(2, 2).parameters(), dht=joining_memory_dht, target_batch_size=10_000)
        with pytest.raises(SwarmError, match="the state of the swarm does not fit this peer"):
            second.begin()
        assert not second.has_begun
        second.shutdown()

    def test_one_that_restores_a_checkpoint_gives_nobody_the_beginning(
        self, make_optimizer: Make, joining_memory_dht: RealTimeDHT
    ) -> None:
        """Nobody may download its state before the checkpoint is loaded."""
        model = TinyModel()
        first = make_optimizer(model.parameters(), target_batch_size=10_000)
        assert not first.state_averager.allow_state_sharing
        joiner = make_optimizer(
            TinyModel().parameters(), dht=joining_memory_dht, target_batch_size=10_000, load_state_timeout=5.0
        )
        assert joiner.state_averager.load_state_from_peers(timeout=5.0) is None
        assert joiner.local_epoch == 0
        joiner.shutdown()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_is_known_of_a_single_number_moves_with_it_and_counts_do_not(kind: Any, shape: tuple[int, ...]) -> None:
    before = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer = kind([before], lr=0.1)
    before.grad = torch.ones_like(before)
    optimizer.step()
    after = torch.nn.Parameter(torch.ones(shape))
    rehome(optimizer, [{"params": [after]}])
    for name, value in optimizer.state[after].items():
        if torch.is_tensor(value):
            assert value.dtype is torch.float32, name
    after.grad = torch.ones_like(after)
    optimizer.step()


def test_a_state_that_was_loaded_is_what_rounds_average(make_optimizer_in_memory: Make) -> None:
    """An offloaded optimizer and its averager share their tensors."""
    names = ("exp_avg", "exp_avg_sq")
    model = TinyModel()
    optimizer = make_optimizer_in_memory(
        optimizer=partial(torch.optim.Adam, lr=0.1),
        params=list(model.parameters()),
        offload_optimizer=True,
        average_opt_statistics=names,
    )
    optimizer.begin()
    train(model, optimizer, epochs=2, batch_size=8)
    averager = optimizer.state_averager
    saved = optimizer.state_dict()

    def assert_shared() -> None:
        own = averager._optimizer_parameters()
        with averager.get_tensors() as averaged:
            kept = [averager.optimizer.state[one][name] for name in names for one in own]
            assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in averaged[len(own) :]]
            assert all(float(one.abs().max()) > 0 for one in kept)

    assert_shared()
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert_shared()
    metadata, tensors, _ = averager.get_current_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averager, "_ask_process", lambda wanted: Download(b"another", metadata, tensors))
        patch.setattr(averager, "_why_refused", lambda loaded: None)
        averager.load_state_from_peers(timeout=5.0)
    assert_shared()


def test_a_batch_in_half_precision_counts_for_nothing_where_the_state_was_downloaded_instead(
    make_optimizer_in_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel()
    optimizer = make_optimizer_in_memory(model.parameters(), target_batch_size=1000)
    optimizer.begin()
    downloads: list[bool] = []

    def download() -> None:
        downloads.append(True)
        optimizer._catching_up.begin()

    monkeypatch.setattr(optimizer, "load_state_from_peers", download)
    scaler = GradScalerOfBatches("cpu")
    counted = []
    for is_behind in (False, True, False):
        if is_behind:
            optimizer.fall_behind()
        optimizer.zero_grad()
        x, y = samples(8)
        scaler.scale(torch.nn.functional.mse_loss(model.layer(x), y)).backward()
        scaler.step(optimizer, batch_size=8)
        scaler.update()
        counted.append(optimizer.local_progress.samples_accumulated)
    assert counted == [8, 8, 16]
    assert downloads == [True]


@pytest.mark.parametrize(("fragments", "every"), [(4, 1), (1, 3), (1, 1)])
def test_what_peers_average_of_several_epochs_weighs_as_that_of_one(
    make_optimizer_in_memory: Make, monkeypatch: pytest.MonkeyPatch, fragments: int, every: int
) -> None:
    """Nobody counts for more than about twice what it has reported of an epoch."""
    optimizer = make_optimizer_in_memory(
        optimizer=partial(torch.optim.SGD, lr=0.1),
        params=[torch.nn.Parameter(torch.ones(3)) for _ in range(4)],
        use_local_updates=True,
        delay_state_averaging=False,
        average_state_every=every,
        averager_opts={"outer_optimizer": partial(torch.optim.SGD, lr=1.0), "outer_fragments": fragments},
    )
    monkeypatch.setattr(hivemind.Optimizer, "_update_global_epoch", lambda *_: None)
    monkeypatch.setattr(type(optimizer.rounds), "is_alone", False)
    monkeypatch.setattr(optimizer.tracker, "local_progress", SimpleNamespace(samples_accumulated=500))
    for _ in range(fragments * every):
        optimizer.scheduled_state = round_ = SimpleNamespace(epoch=3, weight=None, done=lambda: True)
        optimizer._end_epoch(None)
    assert round_.weight == pytest.approx(500)
    optimizer.scheduled_state = None
