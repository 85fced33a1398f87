from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref

import forked
import lightning
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hivenb
from hivenb.errors import OptionsError, SwarmError, TrainingError
from hivenb.options import Options
from hivenb.run import training
from hivenb.run.fit import split_data
from hivenb.run.status import RunState
from hivenb.training import TrainingRun

#: Seconds that anything may take; the machine may be busy.
PATIENCE = 60.0


@pytest.fixture(scope="module")
def home():
    with hivenb.Swarm("training") as swarm:
        yield swarm


@pytest.fixture
def make(home, request):
    """Makes runs of their own names; those that still train are stopped after the test."""
    runs: list[TrainingRun] = []

    name = re.sub(r"\W", "-", request.node.name)

    def make_run(model=None, data=None, target_batch_size: int = 32, **kwargs) -> TrainingRun:
        options = Options(target_batch_size=target_batch_size, run_id=f"{name}-{len(runs)}")
        model = tiny.TinyModel() if model is None else model
        data = tiny.loader() if data is None else data
        runs.append(TrainingRun(model, data, swarm=home, options=options, **{"accelerator": "cpu", **kwargs}))
        return runs[-1]

    yield make_run
    for run in runs:
        run.stop()


class Thorny(tiny.TinyModel):
    """Fails in a step of one's choice."""

    def __init__(self, step: int = 5):
        super().__init__()
        self.thorn = step

    def training_step(self, batch, batch_idx):
        if batch_idx == self.thorn:
            raise ArithmeticError(f"step {batch_idx} went wrong")
        return super().training_step(batch, batch_idx)


class Slow(tiny.TinyModel):
    """Leaves time between its steps."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class Validated(tiny.TinyModel):
    """Tells when its first batch has begun, waits in it, and counts validations."""

    def __init__(self):
        super().__init__()
        self.began, self.goes_on, self.validated = threading.Event(), threading.Event(), 0

    def training_step(self, batch, batch_idx):
        self.began.set()
        assert self.goes_on.wait(PATIENCE)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.validated += 1


class Wider(tiny.TinyModel):
    """Has parameters of other shapes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, bias=False)
        self.layer.bias = torch.nn.Parameter(torch.zeros(1))


# -- before the start ---------------------------------------------------------------------------------------------


def test_a_new_run_is_ready_and_has_done_nothing(make):
    before = threading.active_count()
    run = make()
    status = run.status
    assert (status.state, status.epoch, status.step, status.loss, status.error) == (RunState.READY, 0, 0, None, None)
    assert (status.num_peers, status.eta_seconds, run.peers(), run.exception) == (0, None, (), None)
    assert threading.active_count() == before
    run.stop()
    assert run.status.state is RunState.READY
    assert "ready" in repr(run)


def test_what_cannot_be_done_before_the_start_says_what_to_do(make):
    run = make()
    with pytest.raises(TrainingError, match=r"not started; call run\.start\(\)"):
        run.wait(timeout=1)
    with pytest.raises(TrainingError, match="ready; only one that trains can be paused"):
        run.pause()
    with pytest.raises(TrainingError, match=r"ready; start it with run\.start\(\)"):
        run.resume()


def test_a_strategy_and_wrong_options_are_refused(home, make):
    with pytest.raises(TrainingError, match=r"strategy='ddp' cannot be given.*options="):
        make(strategy="ddp")


@pytest.mark.parametrize("data", [tiny.loader(count=0), tiny.loader(count=4, batch_size=8, shuffle=False)])
def test_data_without_batches_is_a_clear_error(make, data):
    if len(data):
        data = torch.utils.data.DataLoader(data.dataset, batch_size=8, drop_last=True)
    run = make(data=data)
    with pytest.raises(TrainingError, match=r"no batches.*empty"):
        run.start()
    assert run.status.state is RunState.READY
    run.data = tiny.loader()
    run.start()
    assert run.wait(steps=1, timeout=PATIENCE)


def test_an_empty_stream_is_found_out_while_training(make):
    class Nothing(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    run = make(data=torch.utils.data.DataLoader(Nothing()), max_epochs=2)
    run.start()
    with pytest.raises(TrainingError, match="no batches"):
        run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FAILED


def test_no_data_at_all_is_a_clear_error():
    with pytest.raises(TrainingError, match="data is None"):
        split_data(None)
    with pytest.raises(TrainingError, match="data is None"):
        split_data((None, tiny.loader()))


def test_wrong_trainer_arguments_surface_at_start(make):
    run = make(accelerator="abacus")
    with pytest.raises(ValueError, match="abacus"):
        run.start()
    assert run.status.state is RunState.READY
    run.trainer_kwargs["accelerator"] = "cpu"
    run.start()
    assert run.wait(steps=1, timeout=PATIENCE)


def test_a_start_that_is_refused_changes_nothing_of_the_next_one(make, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    other = make(max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    other.start()
    assert other.wait(timeout=PATIENCE)
    run = make()
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.stop()
    epoch = run.status.epoch
    with torch.no_grad():
        run.model.layer.bias.fill_(7.0)
    run.trainer_kwargs["accelerator"] = "abacus"
    with pytest.raises(ValueError, match="abacus"):
        run.start(tmp_path / "last.ckpt")
    assert run.status.epoch == epoch
    run.trainer_kwargs["accelerator"] = "cpu"
    run.start()
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    assert run.strategy.hivemind_epoch == epoch
    assert run.model.layer.bias.tolist() == [7.0, 7.0], "what somebody has put in"


def test_where_no_thread_can_begin_the_run_has_failed_and_starts_again(make, monkeypatch):
    run = make()

    def full(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(training.BackgroundThread, "start", full)
        with pytest.raises(TrainingError, match="can't start new thread"):
            run.start()
    assert run.status.state is RunState.FAILED
    run.stop()
    run.start()
    assert run.wait(steps=1, timeout=PATIENCE)


@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, MemoryError, ValueError])
def test_an_error_of_memory_holds_none(make, kind):
    """Others keep what was in the variables where they were raised, to be looked at."""
    held = []

    class Hungry(tiny.TinyModel):
        def training_step(self, batch, batch_idx):
            ballast = torch.zeros(4)
            held.append(weakref.ref(ballast))
            raise kind("there is no more")

    run = make(Hungry())
    run.start()
    with pytest.raises(kind, match="there is no more"):
        run.wait(timeout=PATIENCE)
    gc.collect()
    assert (held[0]() is None) is (kind is not ValueError)


def test_start_in_a_closed_swarm_is_a_clear_error(swarm):
    run = TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=32))
    swarm.close()
    with pytest.raises(SwarmError, match=r"a swarm '.*' that is closed.* make another run with .*run\.model"):
        run.start()
    assert run.status.state is RunState.READY


# -- waiting ------------------------------------------------------------------------------------------------------


def test_waiting_for_epochs_steps_and_time(make):
    run = make(model=Slow())
    run.start()
    assert run.status.state is RunState.STARTING
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert run.status.epoch >= 2
    before = run.status.step
    assert run.wait(steps=3, timeout=PATIENCE)
    assert run.status.step >= before + 3
    assert not run.wait(timeout=0.01)
    assert not run.wait(epochs=1000, timeout=0.05)
    assert not run.wait(epochs=1, steps=100_000, timeout=0.2)
    run.stop()
    assert run.wait()
    assert not run.wait(epochs=1)
    assert not run.wait(steps=1)
    assert run.wait(epochs=0)


def test_a_run_with_an_end_finishes(make):
    run = make(max_epochs=3)
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FINISHED
    assert run.status.step == 24
    assert run.status.epoch == 6
    assert not run.wait_for(RunState.TRAINING)


def test_a_run_that_has_come_to_its_end_says_so_and_stays_as_it_is(make, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    run = make(max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    run.start()
    assert run.wait(timeout=PATIENCE)
    with pytest.raises(TrainingError, match=r"max_epochs=1 is reached\. For more, make a TrainingRun of"):
        run.start()
    assert (run.status.state, run.status.error) == (RunState.FINISHED, None)
    another = make(max_steps=8)
    another.start(tmp_path / "last.ckpt")
    with pytest.raises(TrainingError, match="max_steps=8 is reached"):
        another.wait(timeout=PATIENCE)
    another.trainer_kwargs["max_steps"] = 12
    another.start(tmp_path / "last.ckpt")
    assert another.wait(timeout=PATIENCE)
    assert another.status.step == 4


def test_a_run_whose_time_is_up_says_so(make):
    run = make(max_time={"milliseconds": 200})
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.FINISHED
    with pytest.raises(TrainingError, match=r"max_time, 0\.2 seconds, is up"):
        run.start()
    assert run.status.state is RunState.FINISHED


def test_a_stop_ends_all_waiting(make):
    run = make(model=Slow())
    run.start()
    results: list[bool] = []
    waiters = [
        threading.Thread(target=lambda kwargs=kwargs: results.append(run.wait(**kwargs)), daemon=True)
        for kwargs in ({}, {"epochs": 10_000}, {"steps": 10_000})
    ]
    for waiter in waiters:
        waiter.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    run.stop()
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert sorted(results) == [False, False, True]


# -- pausing ------------------------------------------------------------------------------------------------------


def test_a_pause_holds_and_resume_goes_on(make, eventually):
    run = make(model=Slow())
    run.start()
    assert run.wait(steps=3, timeout=PATIENCE)
    run.pause()
    assert run.wait_for("paused", timeout=PATIENCE)  # as it is written
    held = run.status
    weights = tiny.parameters(run.model)
    assert not run.wait(steps=1, timeout=0.5)
    assert (run.status.state, run.status.step, run.status.epoch) == (RunState.PAUSED, held.step, held.epoch)
    assert all(map(torch.equal, weights, tiny.parameters(run.model)))
    eventually(lambda: run.swarm.peers(run.options.run_id) == ())  # nobody waits for it
    run.pause()
    run.resume()
    assert run.wait(epochs=2, timeout=PATIENCE)
    assert run.status.state is RunState.TRAINING
    assert [event.text for event in run.history.snapshot().events if event.kind == "run"] == [
        "started",
        "paused",
        "resumed",
    ]
    eventually(lambda: len(run.swarm.peers(run.options.run_id)) == 1)


def test_a_run_that_is_paused_before_it_trains_waits_before_its_first_step(make):
    run = make()
    run.start()
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    assert run.status.step == 0
    run.start()  # goes on, as resume does
    assert run.wait(steps=1, timeout=PATIENCE)


def test_a_paused_run_can_be_stopped_and_started(make):
    run = make(model=Slow())
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    steps = run.status.step
    run.stop()
    assert (run.status.state, run.status.step) == (RunState.STOPPED, steps)
    run.start()
    assert run.wait(steps=1, timeout=PATIENCE)


# -- stopping, and going on ---------------------------------------------------------------------------------------


def test_a_second_start_goes_on_from_where_it_was(make):
    model = tiny.TinyModel(optimizer=torch.optim.Adam, lr=0.02)
    run = make(model, (tiny.loader(), tiny.loader(seed=1)))
    run.start()
    assert run.wait(epochs=6, timeout=PATIENCE)
    run.stop()
    stopped, weights = run.status, tiny.parameters(model)
    moments = optimizer_state(run)
    assert stopped.state is RunState.STOPPED
    assert moments[0]["step"].item() == stopped.epoch
    first_loss = run.history.snapshot().series["loss"].values[0]

    run.start()
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    assert (run.status.epoch, run.status.step) == (stopped.epoch, stopped.step)
    assert run.strategy.hivemind_epoch == stopped.epoch
    assert all(map(torch.equal, weights, tiny.parameters(model)))
    for one, other in zip(moments, optimizer_state(run), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    run.resume()
    assert run.wait(epochs=30, timeout=PATIENCE)
    run.stop()
    assert run.status.epoch >= stopped.epoch + 30
    assert optimizer_state(run)[0]["step"].item() == run.status.epoch
    snapshot = run.history.snapshot()
    assert snapshot.last("loss") < first_loss
    assert list(snapshot.series["loss"].epochs) == sorted(snapshot.series["loss"].epochs)
    assert [event.text for event in snapshot.events if event.kind == "run"][:3] == ["started", "stopped", "resumed"]


def test_a_pass_that_is_stopped_goes_on_in_its_middle(make):
    run = make(Slow(), tiny.loader(160), max_epochs=1)
    run.start()
    assert run.wait(steps=5, timeout=PATIENCE)
    run.stop()
    stopped = run.status.step
    assert 5 <= stopped < 20
    assert run.trainer.current_epoch == 0
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert (run.status.state, run.status.step) == (RunState.FINISHED, 20)
    assert not any("ended before the epoch ended" in line for line in run.log_lines)


@pytest.mark.parametrize("least", [{"min_steps": 10_000}, {"min_epochs": 10_000}, {}], ids=str)
def test_a_stop_waits_for_no_validation_and_for_nothing_that_was_to_be_trained_at_least(make, least):
    model = Validated()
    run = make(model, (tiny.loader(), tiny.loader(seed=1)), **least)
    run.start()
    assert model.began.wait(PATIENCE)
    run.stop(wait=False)  # in the middle of the first batch
    model.goes_on.set()
    assert run.wait(timeout=PATIENCE)
    assert (run.status.state, run.status.step, model.validated) == (RunState.STOPPED, 1, 0)


def test_a_wrong_checkpoint_is_forgotten(make, tmp_path):
    run = make()
    run.start()
    assert run.wait(epochs=3, timeout=PATIENCE)
    run.stop()
    epoch, weights = run.status.epoch, tiny.parameters(run.model)
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    other = make(Wider(), max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    other.start()
    assert other.wait(timeout=PATIENCE)
    run.start(tmp_path / "last.ckpt")
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.wait(timeout=PATIENCE)
    assert run.status.epoch == epoch
    run.start()
    run.pause()
    assert run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    assert run.strategy.hivemind_epoch == epoch
    assert all(map(torch.equal, weights, tiny.parameters(run.model)))


def test_what_was_to_be_written_outlives_the_run(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving = ModelCheckpoint(save_last=True)
    run = make(max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert saving.last_model_path == str(tmp_path / "checkpoints" / "last.ckpt")


def test_a_run_of_another_session_goes_on_from_a_checkpoint(make, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_last=True)
    first = make(adam_model(), callbacks=[saving], enable_checkpointing=True)
    first.start()
    assert first.wait(epochs=6, timeout=PATIENCE)
    first.stop()
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    (of_optimizer,) = checkpoint["optimizer_states"]
    epoch = of_optimizer["hivemind"]["local_epoch"]
    assert epoch >= 5

    second = make(adam_model())
    second.start(str(tmp_path / "last.ckpt"))
    second.pause()
    assert second.wait_for(RunState.PAUSED, timeout=PATIENCE)
    assert second.strategy.hivemind_epoch == epoch
    assert all(map(torch.equal, checkpoint["state_dict"].values(), second.model.state_dict().values()))
    for one, other in zip(of_optimizer["state"].values(), optimizer_state(second), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    with pytest.raises(
        TrainingError, match=r"cannot begin at checkpoint='last\.ckpt'; stop it with run\.stop\(\) first"
    ):
        second.start("last.ckpt")
    assert second.status.epoch == epoch
    second.resume()
    assert second.wait(epochs=2, timeout=PATIENCE)
    assert second.status.epoch >= epoch + 2
    assert second.history.snapshot().series["loss"].epochs[0] == epoch
    assert next(event.text for event in second.history.snapshot().events if event.kind == "run") == "resumed"


def test_a_checkpoint_that_is_none_is_named_and_nothing_starts(make, tmp_path):
    run = make()
    with pytest.raises(TrainingError, match=r"no file checkpoint='nowhere\.ckpt'; a Trainer writes one with"):
        run.start("nowhere.ckpt")
    (tmp_path / "other.ckpt").write_text("nothing that torch has saved")
    with pytest.raises(TrainingError, match=r"other\.ckpt' is none of a training with one optimizer"):
        run.start(tmp_path / "other.ckpt")
    assert run.status.state is RunState.READY


def adam_model() -> tiny.TinyModel:
    return tiny.TinyModel(optimizer=torch.optim.Adam, lr=0.02)


def optimizer_state(run: TrainingRun) -> list[dict[str, torch.Tensor]]:
    """Copies of the moments of each parameter."""
    state = run.strategy.optimizer.opt.state_dict()["state"]
    return [{name: value.clone() for name, value in one.items()} for one in state.values()]


def test_a_second_start_while_training_does_no_harm(make):
    run = make()
    run.start()
    trainer, thread_count = run.trainer, threading.active_count()
    assert run.wait(steps=1, timeout=PATIENCE)
    run.start()
    assert run.trainer is trainer
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert sum(thread.name == "hivenb-trainer" for thread in threading.enumerate()) == 1
    assert threading.active_count() <= thread_count + 10


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
def test_a_stop_right_after_the_start_stops(make, delay):
    run = make()
    for _ in range(2):
        run.start()
        time.sleep(delay)  # no condition to wait for: any moment of the start has to do
        run.stop()
        assert run.status.state is RunState.STOPPED
        assert run.exception is None
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)


def test_starts_and_stops_from_several_threads(make):
    run = make()
    problems: list[Exception] = []

    def toggle() -> None:
        for _ in range(5):
            try:
                run.start()
                run.stop(wait=False)
            except TrainingError as e:
                if "is stopping" not in str(e):
                    problems.append(e)

    threads = [threading.Thread(target=toggle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    run.stop()
    assert problems == []
    assert run.exception is None
    assert run.status.state is RunState.STOPPED


def test_a_stop_that_does_not_wait_returns_at_once_and_start_says_so(make):
    class Lengthy(tiny.TinyModel):
        def training_step(self, batch, batch_idx):
            entered.set()
            leave.wait(PATIENCE)
            return super().training_step(batch, batch_idx)

    entered, leave = threading.Event(), threading.Event()
    run = make(model=Lengthy())
    run.start()
    assert entered.wait(PATIENCE)
    run.stop(wait=False)
    assert run.status.state is RunState.STOPPING
    with pytest.raises(TrainingError, match=r"is stopping; wait for it with run\.wait\(\)"):
        run.start()
    leave.set()
    assert run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.STOPPED


def test_a_stop_from_inside_of_training_does_not_deadlock(make):
    class Enough(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step >= 5:
                run.stop()

    run = make(callbacks=Enough())
    run.start()
    assert run.wait(timeout=PATIENCE)
    assert run.status.state is RunState.STOPPED
    assert run.status.step == 5


def test_a_run_that_stops_another_one_waits_for_its_end(make):
    class Enough(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2 and not seen:
                other.stop()
                seen.append(other.status.state)

    seen: list[RunState] = []
    other, run = make(), make(callbacks=Enough())
    other.start()
    assert other.wait(steps=1, timeout=PATIENCE)
    run.start()
    assert run.wait(epochs=4, timeout=PATIENCE)
    assert seen[:1] == [RunState.STOPPED]


def test_closing_the_swarm_ends_the_run(swarm):
    run = TrainingRun(Slow(), tiny.loader(), swarm=swarm, options=Options(target_batch_size=32), accelerator="cpu")
    run.start()
    assert run.wait(steps=2, timeout=PATIENCE)
    swarm.close()
    assert run.status.state is RunState.STOPPED
    assert run.exception is None
    assert not any(thread.name.startswith("hivenb-trainer") for thread in threading.enumerate())
    with pytest.raises(SwarmError):
        run.start()


def test_a_run_that_nobody_refers_to_trains_on_and_leaves_no_folder(home):
    run = TrainingRun(
        tiny.TinyModel(), tiny.loader(), swarm=home, options=Options(target_batch_size=32), accelerator="cpu"
    )
    run.start()
    history, folder = run.history, run._folder.path
    assert run.wait(epochs=1, timeout=PATIENCE)
    trainer = next(thread for thread in threading.enumerate() if thread.name == "hivenb-trainer")
    seen = history.version
    del run
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while history.version == seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert trainer.is_alive()
    assert history.version > seen
    assert folder.is_dir()
    (run,) = [run for run in (known() for known in home.runs._runs) if run is not None and run.history is history]
    run.stop()
    assert list(folder.iterdir())  # what a second start goes on from
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    run.stop()
    del run
    gc.collect()
    assert not folder.exists()


# -- failing ------------------------------------------------------------------------------------------------------


def test_an_error_in_training_surfaces_and_a_corrected_start_works(make, capfd):
    model = Thorny()
    run = make(model)
    run.start()
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="step 5 went wrong"):
            run.wait(timeout=PATIENCE)
    with pytest.raises(ArithmeticError):
        run.wait(epochs=1)
    status = run.status
    assert (status.state, status.error) == (RunState.FAILED, "ArithmeticError: step 5 went wrong")
    assert isinstance(run.exception, ArithmeticError)
    assert (status.step, status.epoch) == (5, 1)
    assert "failed: ArithmeticError" in [event.text for event in run.history.snapshot().events]
    told = f"the run {run.options.run_id!r} has failed: ArithmeticError: step 5 went wrong Traceback"
    assert len([line for line in run.log_lines if told in line and "in training_step" in line]) == 1
    assert capfd.readouterr() == ("", ""), "only kept"

    model.thorn = -1
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    status = run.status
    assert (status.state, status.error, run.exception) == (RunState.TRAINING, None, None)
    assert status.epoch >= 3
    assert status.step > 5


def test_a_failure_before_the_first_step_can_be_corrected(make):
    model = Thorny(step=0)
    run = make(model)
    run.start()
    with pytest.raises(ArithmeticError):
        run.wait(timeout=PATIENCE)
    model.thorn = -1
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)


def test_an_error_wakes_a_paused_pause(make):
    run = make(Thorny())
    run.start()
    with pytest.raises(ArithmeticError):
        run.wait_for(RunState.PAUSED, timeout=PATIENCE)
    with pytest.raises(TrainingError, match="failed; only one that trains"):
        run.pause()


# -- options ------------------------------------------------------------------------------------------------------


def test_options_can_be_changed_before_the_start_and_while_stopped(make):
    run = make()
    assert run.apply(target_batch_size=64) is run.options
    assert run.options.target_batch_size == 64
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.status.target_batch_size == 64
    run.stop()
    run.apply(run.options.replace(target_batch_size=16))
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    assert run.strategy.options.target_batch_size == 16
    marks = [event.text for event in run.history.snapshot().events if event.kind == "option"]
    assert marks == ["target batch size: 16"]


def test_what_is_wrong_never_reaches_the_training(make):
    run = make()
    run.start()
    assert run.wait(steps=1, timeout=PATIENCE)
    before = run.options
    with pytest.raises(OptionsError, match="target_batch_size"):
        run.apply(target_batch_size=0)
    with pytest.raises(OptionsError, match="no_such_option"):
        run.apply(no_such_option=1)
    with pytest.raises(OptionsError, match="would be another run"):
        run.apply(run_id="another")
    assert run.options is before
    assert run.wait(epochs=2, timeout=PATIENCE)


# -- what is seen -------------------------------------------------------------------------------------------------


def test_the_history_tells_loss_validation_and_peers(make, eventually):
    run = make(data=(tiny.loader(), tiny.loader(seed=1)))
    run.start()
    assert run.wait(epochs=4, timeout=PATIENCE)
    eventually(lambda: {"peers", "memory"} <= set(run.history.snapshot().series))
    eventually(lambda: run.status.samples_per_second > 0)
    status, peers = run.status, run.peers()
    assert (status.state, status.num_peers) == (RunState.TRAINING, 1)
    assert status.swarm_samples_per_second == sum(peer.samples_per_second for peer in peers)
    assert [peer.is_self for peer in peers] == [True]
    run.stop()
    snapshot = run.history.snapshot()
    series = snapshot.series
    assert {"loss", "val_loss", "peers", "samples_per_second", "stalled_seconds", "group_size"} <= set(series)
    named = set(re.findall(r"``(\w+)``", TrainingRun.__doc__))
    assert set(series) - {"val_loss"} <= named, "the docstring names all but what the module logs"
    assert snapshot.last("loss") < series["loss"].values[0]
    assert snapshot.last("val_loss") < series["val_loss"].values[0]
    assert snapshot.last("peers") == 1
    assert series["memory"].values[-1] > 50e6
    assert snapshot.events[0].text == "started"
    assert (run.peers(), run.status.num_peers) == ((), 0)


def test_nothing_is_printed_from_the_background(make, capfd):
    class Talkative(tiny.TinyModel):
        def configure_optimizers(self):
            lightning.pytorch.utilities.rank_zero_info("configured")
            return super().configure_optimizers()

    run = make(Talkative())
    run.start()
    assert run.wait(epochs=2, timeout=PATIENCE)
    run.stop()
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    run.stop()
    assert capfd.readouterr() == ("", "")
    assert any("configured" in line for line in run.log_lines)


def test_the_main_thread_stays_free(make):
    """Neither a lock nor a swarm epoch holds up those who look."""
    run = make(model=Slow())
    run.start()
    assert run.wait(epochs=1, timeout=PATIENCE)
    goal, looks, longest = run.status.epoch + 3, 0, 0.0
    deadline = time.monotonic() + PATIENCE
    while run.status.epoch < goal and time.monotonic() < deadline:
        started = time.monotonic()
        assert run.status.state is RunState.TRAINING
        run.peers(), run.log_lines, repr(run), run.history.snapshot()
        longest = max(longest, time.monotonic() - started)
        looks += 1
    assert run.status.epoch >= goal
    assert looks > 100
    assert longest < 2.0


# -- interrupts ---------------------------------------------------------------------------------------------------


def wait_and_be_interrupted() -> None:
    """As a person does: in a session of its own, by what Ctrl-C in its terminal does."""
    os.setsid()
    with hivenb.Swarm() as swarm:
        options = Options(target_batch_size=32)
        run = TrainingRun(tiny.PacedModel(), tiny.loader(), swarm=swarm, accelerator="cpu", options=options)
        run.start()
        assert run.wait(epochs=1, timeout=60)
        for _ in range(3):
            threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
            started = time.monotonic()
            try:
                run.wait(timeout=60)
            except KeyboardInterrupt:
                print("interrupted", time.monotonic() - started < 5)
            print(run.status.state.value, run.wait(epochs=2, timeout=60))
        try:
            threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
            run.stop()
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", end=" ")
        run.wait(timeout=60)
        print(run.status.state.value)


@pytest.mark.process
@pytest.mark.slow
def test_an_interrupt_ends_the_waiting_and_not_the_training():
    done = forked.run(wait_and_be_interrupted, seconds=120.0)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["interrupted True", "training True"] * 3 + ["interrupted stopped"]
