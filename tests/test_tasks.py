from __future__ import annotations

import subprocess
import sys

import cloudpickle
import pytest
import torch
from lightning import Trainer

from hivenb import tasks
from hivenb.errors import MissingDependencyError, OptionsError

SMALL = {
    "digits": {"hidden": 8, "blocks": 1},
    "text": {"context": 16, "width": 16, "layers": 1},
}


@pytest.fixture(params=sorted(tasks.TASKS))
def task(request: pytest.FixtureRequest) -> tasks.Task:
    return tasks.TASKS[request.param](**SMALL[request.param])


def trainer(**kwargs) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def test_a_task_knows_its_name_and_metric(task):
    assert tasks.TASKS[task.name]
    assert task.metric == "val_acc"
    assert task.target_batch_size >= 256


def test_what_a_short_fit_logs(task):
    fit = trainer(max_steps=2, limit_val_batches=2, val_check_interval=2)
    fit.fit(task.model, task.train, task.validation)
    logged = fit.callback_metrics
    assert {"loss", "val_loss", "val_acc"} <= set(logged)
    assert all(torch.isfinite(value) for value in logged.values())
    assert 0 <= logged["val_acc"] <= 1


def test_digits_are_learned_by_a_plain_trainer():
    task = tasks.digits(hidden=16, blocks=1, batch_size=64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fit = trainer(max_epochs=5)
        fit.fit(task.model, task.train, task.validation)
    finally:
        torch.set_num_threads(threads)
    assert fit.callback_metrics["val_acc"] >= 0.95


def test_text_is_learned_beyond_letter_frequencies():
    task = tasks.text(context=32, width=32, layers=1)
    optimizer = task.model.configure_optimizers()
    for _, batch in zip(range(80), task.train, strict=False):
        scores, target = task.model.predict_and_target(batch)
        loss = torch.nn.functional.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    codes = task.train.dataset.tensors[0].flatten().long()
    share = torch.bincount(codes) / len(codes)
    letter_frequencies_alone = -(share[share > 0] * share[share > 0].log()).sum()
    assert loss < letter_frequencies_alone - 0.3


def test_same_seed_same_model_batches_and_split(task):
    again = tasks.TASKS[task.name](**SMALL[task.name])
    for one, other in zip(task.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(next(iter(task.train))[0], next(iter(again.train))[0])
    assert torch.equal(next(iter(task.validation))[0], next(iter(again.validation))[0])


def test_another_seed_another_order(task):
    other = tasks.TASKS[task.name](**SMALL[task.name], seed=1)
    assert not torch.equal(next(iter(task.train))[0], next(iter(other.train))[0])


def test_the_order_changes_from_one_pass_to_the_next(task):
    first, second = (next(iter(task.train))[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_making_a_task_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    tasks.digits(hidden=8)
    assert torch.equal(before, torch.get_rng_state())


def test_training_and_validation_do_not_overlap():
    task = tasks.digits(hidden=8)
    train, validation = task.train.dataset.tensors[0], task.validation.dataset.tensors[0]
    assert len(train) + len(validation) == 1797
    both = torch.cat([train, validation]).flatten(1)
    whole = tasks.digits(hidden=8, seed=1)
    all_images = torch.cat([whole.train.dataset.tensors[0], whole.validation.dataset.tensors[0]]).flatten(1)
    assert torch.equal(both.double().sum(0), all_images.double().sum(0))


@pytest.mark.process
@pytest.mark.slow
def test_tasks_travel_to_another_process():
    made = [tasks.TASKS[name](**SMALL[name]) for name in sorted(tasks.TASKS)]
    cargo = cloudpickle.dumps(made)
    assert len(cargo) < 2_000_000
    script = (
        "import sys, cloudpickle\n"
        "for task in cloudpickle.load(sys.stdin.buffer):\n"
        "    batch = next(iter(task.train)); scores, target = task.model.predict_and_target(batch)\n"
        "    print(task.name, *batch[0].shape, len(target))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=cargo, capture_output=True, check=True, timeout=60)
    expected = ["digits 32 1 8 8 32", f"text 32 17 {32 * 16}"]
    assert done.stdout.decode().splitlines() == expected


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (tasks.DigitsModel, {"hidden": 8, "blocks": 1}),
        (tasks.TextModel, {"context": 8, "width": 8, "layers": 1}),
    ],
)
def test_a_model_keeps_its_sizes(build, sizes):
    model = build(**sizes, learning_rate=0.5)
    assert {name: getattr(model, name) for name in sizes} == sizes
    assert model.configure_optimizers().param_groups[0]["lr"] == 0.5


def test_no_model_has_state_that_peers_would_not_share(task):
    assert not list(task.model.buffers())


def test_the_text_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = tasks.TextModel(context=8, width=8, layers=2).eval()
    codes = torch.arange(8).unsqueeze(0)
    changed = codes.clone()
    changed[0, 5:] = 60
    with torch.no_grad():
        assert torch.allclose(model(codes)[0, :5], model(changed)[0, :5], atol=1e-6)
        assert not torch.allclose(model(codes)[0, 5:], model(changed)[0, 5:], atol=1e-3)


def test_encode_folds_typographic_signs():
    fancy = "\N{LEFT DOUBLE QUOTATION MARK}it\N{RIGHT SINGLE QUOTATION MARK}s\N{HORIZONTAL ELLIPSIS}"
    assert torch.equal(tasks.encode(fancy), tasks.encode("\"it's..."))
    assert tasks.encode("\N{DEGREE SIGN}").tolist() == [0]
    assert int(tasks.encode(tasks.ALPHABET).max()) == tasks.VOCABULARY_SIZE - 1


@pytest.mark.parametrize(
    ("build", "sizes", "words"),
    [
        (tasks.digits, {"batch_size": 0}, "batch_size=0"),
        (tasks.digits, {"hidden": 30}, "hidden must be a multiple of 4, not 30; 32 would do"),
        (tasks.digits, {"hidden": 1.5}, "hidden=1.5"),
        (tasks.text, {"context": 0, "layers": 0}, "context=0, layers=0"),
        (tasks.text, {"width": 10}, "width must be a multiple of 4, not 10; 12 would do"),
        (tasks.text, {"context": 10**6}, "not 1,000,000"),
    ],
)
def test_sizes_that_do_not_fit(build, sizes, words):
    with pytest.raises(OptionsError, match=words):
        build(**sizes)


@pytest.mark.parametrize(
    ("module", "build", "words"),
    [("sklearn.datasets", tasks.digits, "scikit-learn"), ("pydoc_data.topics", tasks.text, "pydoc_data")],
)
def test_missing_data_is_named(monkeypatch, module, build, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=words):
        build()
