"""Options are checked as a whole, compare by value, and mean the same as arguments and as code."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import subprocess
import sys
from functools import partial
from pathlib import PurePath
from types import ModuleType
from typing import Any

import cloudpickle
import hivemind
import numpy as np
import pytest
import torch
from hivemind import compression as upstream
from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from hivemind.optim.state_averager import TrainingStateAverager
from torch.optim.lr_scheduler import StepLR

from hivenb.compression import PowerSGDGradientAverager, codec_key
from hivenb.errors import OptionsError
from hivenb.options import FIELDS, Options, kinds

SPARSE = partial(PowerSGDGradientAverager, averager_rank=4)
DECAY = partial(StepLR, step_size=10, gamma=0.5)


def options(**values: Any) -> Options:
    return Options(**{"target_batch_size": 256, **values})


def message_for(**values: Any) -> str:
    with pytest.raises(OptionsError) as caught:
        options(**values)
    return str(caught.value)


@pytest.mark.process
def test_import_needs_neither_torch_nor_hivemind_nor_lightning() -> None:
    code = (
        "import sys; from hivenb.options import Options; "
        "o = Options(target_batch_size=8, grad_compression='float16'); o.replace(batch_size=2).to_code(); "
        "print([m for m in ('torch', 'hivemind', 'numpy', 'lightning', 'ipywidgets') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# -- what is known about each option ----


def test_the_docstring_explains_every_option_before_its_errors() -> None:
    """It is what a notebook shows for ``Options?`` and Shift-Tab."""
    explained, _, rest = inspect.getdoc(Options).partition("\n:raises OptionsError: ")
    flat = " ".join(explained.split())
    for name, info in FIELDS.items():
        assert f":param {name}: {info.help} ({info.facts})" in flat
    assert "in seconds" in FIELDS["averaging_timeout"].facts
    assert "default: ``30.0``" in FIELDS["averaging_timeout"].facts
    assert FIELDS["target_batch_size"].facts == "must be given; in samples; the same at all peers"
    assert ":param" not in rest
    assert all(len(line) <= 120 for line in explained.splitlines())


def test_every_option_is_described() -> None:
    assert list(FIELDS) == [field.name for field in dataclasses.fields(Options)]
    for name, info in FIELDS.items():
        assert info.name == name
        assert info.group in ("overlap", "memory", "compression", "rounds")
        assert "_" not in info.label, "labels are words"
        assert info.help.endswith(".")
        assert info.unit in (None, "samples", "seconds", "swarm epochs", "pieces")
        numeric = isinstance(info.default, (int, float)) and not isinstance(info.default, bool)
        assert info.unit or not numeric or name == "performance_ema_alpha"
    assert FIELDS["delay_grad_averaging"].requires == ("delay_optimizer_step",)
    assert {name for name, info in FIELDS.items() if info.swarm_wide} >= {
        "target_batch_size",
        "run_id",
        "grad_averager_factory",
    }


def test_defaults_are_the_documented_ones() -> None:
    documented = {
        "run_id": "lightning_run",
        "batch_size": None,
        "delay_state_averaging": False,
        "delay_optimizer_step": None,
        "delay_grad_averaging": False,
        "offload_optimizer": None,
        "reuse_grad_buffers": False,
        "scheduler_fn": None,
        "matchmaking_time": 5.0,
        "averaging_timeout": 30.0,
        "verbose": False,
        "averager_opts": None,
    }
    assert {name: FIELDS[name].default for name in documented} == documented
    with pytest.raises(TypeError, match="target_batch_size"):
        Options()  # type: ignore[call-arg]


def test_options_cover_hiveminds_optimizer() -> None:
    upstream_names = set(inspect.signature(hivemind.Optimizer.__init__).parameters)
    renamed = {"batch_size_per_step": "batch_size", "scheduler": "scheduler_fn"}
    elsewhere = {"self", "dht", "params", "optimizer", "extra_tensors"}
    # of which hivemind knows nothing
    own = {"average_buffers", "frozen_parameters", "snapshot_every", "robust_aggregation", "auto_roll_back"}
    own |= {"delay_compensation", "outer_fragments", "outer_optimizer"}
    assert {renamed.get(name, name) for name in upstream_names - elsewhere} == set(FIELDS) - own


def test_what_hivemind_takes_is_what_the_checks_know() -> None:
    averager = set(inspect.signature(DecentralizedAverager.__init__).parameters)
    averager |= set(inspect.signature(TrainingStateAverager.__init__).parameters)
    tracker = set(inspect.signature(ProgressTracker.__init__).parameters)
    assert set(kinds.AVERAGER_OPTS) < averager
    assert set(kinds.TRACKER_OPTS) < tracker
    source = inspect.getsource(hivemind.Optimizer._make_state_averager)
    source += inspect.getsource(hivemind.Optimizer.__init__)
    given = averager - set(kinds.AVERAGER_OPTS) - {"self", "kwargs", "averaged_tensors", "tensor_infos"}
    assert all(f"{name}=" in source for name in given), "hivemind sets what the checks leave out"
    factory_source = inspect.getsource(hivemind.Optimizer._make_gradient_averager) + source
    assert all(f"{name}=" in factory_source for name in kinds.FACTORY_ARGUMENTS)


# -- values ----


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("target_batch_size", value) for value in (0, -1, 2.0, "8", True, None, math.nan)),
        *(("batch_size", value) for value in (0, -4, 1.5, False, "8")),
        *(("average_state_every", value) for value in (0, 0.5, None)),
        *(("matchmaking_time", value) for value in (0, -1.0, math.inf, math.nan, None, "5", True)),
        *(("averaging_timeout", value) for value in (0, math.inf, math.nan, None)),
        *(("allreduce_timeout", value) for value in (0, -1, math.nan, "x")),
        *(("load_state_timeout", value) for value in (0, None)),
        *(("performance_ema_alpha", value) for value in (0, 1, -0.1, math.nan, None)),
        *(("delay_state_averaging", value) for value in (None, 1, "yes")),
        *(("offload_optimizer", value) for value in (0, "no")),
        *(("verbose", value) for value in (None, 1)),
        *(("robust_aggregation", value) for value in (None, True, "median", ["none"])),
        *(("frozen_parameters", value) for value in (None, True, "all", ["own"])),
        *(("run_id", value) for value in ("", "  ", "my.run", None, 3)),
        *(("average_opt_statistics", value) for value in ("exp_avg", (1,), None)),
        *(("grad_compression", value) for value in ("fp16", 16, upstream.Float16Compression)),
        *(("load_state_compression", value) for value in ("fp16", object)),
        *(("scheduler_fn", value) for value in (3, "StepLR")),
        *(("grad_averager_factory", value) for value in (3, PowerSGDGradientAverager)),
        *(("averager_opts", value) for value in ("x", [1], {"nonsense": 1}, {"min_matchmaking_time": 3})),
        *(("averager_opts", value) for value in ({"compression": 1}, {"client_mode": True}, {"bandwidth": -1})),
        *(("averager_opts", value) for value in ({"initial_group_bits": "02"}, {"target_group_size": 1})),
        *(("tracker_opts", value) for value in ("x", {"nonsense": 1}, {"performance_ema_alpha": 0.5})),
        ("run_id", "x" * 201),  # an invite could not hold it
    ],
)
def test_wrong_values_are_named(name: str, wrong: Any) -> None:
    message = message_for(**{name: wrong})
    assert name in message
    assert "\n" not in message, "one problem, one line"


def test_all_problems_are_reported_at_once() -> None:
    message = message_for(target_batch_size=0, run_id="a.b", grad_compression="fp16", averager_opts={"x": 1})
    assert message.startswith("4 problems:")
    for name in ("target_batch_size=0", "run_id='a.b'", "'fp16'", "'x'"):
        assert name in message


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "missing_package", lambda name: "a-package")
    assert "pip install a-package" in message_for(grad_compression="float16")


def test_values_are_kept_in_one_form() -> None:
    given = options(
        target_batch_size=np.int64(64),
        matchmaking_time=np.float32(2),
        averaging_timeout=20,
        average_opt_statistics=["exp_avg"],
        averager_opts={},
        grad_compression=upstream.Float16Compression(),
        state_averaging_compression=None,
    )
    assert type(given.target_batch_size) is int
    assert (given.matchmaking_time, given.averaging_timeout) == (2.0, 20.0)
    assert given.average_opt_statistics == ("exp_avg",)
    assert given.averager_opts is None
    assert (given.grad_compression, given.state_averaging_compression) == ("float16", "none")


def test_options_do_not_change() -> None:
    settings = {"bandwidth": 5}
    given = options(averager_opts=settings)
    settings["bandwidth"] = 7
    given.to_strategy_kwargs()["averager_opts"]["bandwidth"] = 8
    assert given.averager_opts == {"bandwidth": 5}
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.verbose = True  # type: ignore[misc]


# -- combinations ----


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"delay_grad_averaging": True}, ("delay_optimizer_step=True", "delay_state_averaging=False")),
        (
            {"delay_grad_averaging": True, "delay_optimizer_step": False},
            ("delay_optimizer_step=True", "delay_optimizer_step=False"),
        ),
        (
            {"delay_optimizer_step": True, "offload_optimizer": False},
            ("offload_optimizer=True and delay_state_averaging=True",),
        ),
        (
            {"delay_optimizer_step": True, "delay_state_averaging": True, "offload_optimizer": False},
            ("offload_optimizer=False",),
        ),
        ({"matchmaking_time": 600.0, "averaging_timeout": 900.0}, ("matchmaking_time=600", "590")),
        ({"target_batch_size": 10**15}, ("target_batch_size=1000000000000000", "at most")),
        ({"averager_opts": {"part_size_bytes": "x"}}, ("part_size_bytes", "'x'")),
        ({"averager_opts": {"part_size_bytes": 2**30}}, ("part_size_bytes", "at most")),
        ({"averager_opts": {"declare_state_period": 3600}}, ("declare_state_period", "590")),
        ({"tracker_opts": {"metadata_expiration": 3600}}, ("metadata_expiration", "120")),
        ({"matchmaking_time": 30.0}, ("averaging_timeout=30", "matchmaking_time=30")),
        ({"averaging_timeout": 2}, ("averaging_timeout=2", "matchmaking_time=5")),
        ({"use_local_updates": True, "offload_optimizer": True}, ("offload_optimizer", "nothing is learned")),
        ({"use_local_updates": True, "reuse_grad_buffers": True}, ("reuse_grad_buffers",)),
        ({"use_local_updates": True, "grad_averager_factory": SPARSE}, ("grad_averager_factory",)),
        (
            {
                "use_local_updates": True,
                "delay_state_averaging": True,
                "averager_opts": {"reuse_tensors": True},
            },
            ("reuse_tensors", "same memory"),
        ),
        ({"auxiliary": True, "client_mode": True}, ("client_mode",)),
        ({"auxiliary": True, "batch_size": 8}, ("batch_size=8",)),
        (
            {
                "auxiliary": True,
                "delay_grad_averaging": True,
                "delay_optimizer_step": True,
                "delay_state_averaging": True,
                "offload_optimizer": True,
                "average_state_every": 2,
            },
            ("average_state_every",),
        ),
        ({"client_mode": True, "averager_opts": {"allow_state_sharing": True}}, ("allow_state_sharing",)),
        (
            {"grad_averager_factory": partial(GradientAverager, compression=1)},
            ("binds compression=1", "grad_compression"),
        ),
        ({"grad_averager_factory": partial(GradientAverager, dht=None)}, ("binds dht=None", "leave it out")),
        ({"grad_averager_factory": PowerSGDGradientAverager}, ("averager_rank", "functools.partial")),
        ({"grad_averager_factory": lambda: None}, ("cannot be called",)),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], named: tuple[str, ...]) -> None:
    message = message_for(**values)
    assert all(part in message for part in named), message


@pytest.mark.parametrize(
    "values",
    [
        {"use_local_updates": True},
        {"use_local_updates": True, "delay_state_averaging": True},
        {"auxiliary": True},
        {"client_mode": True},
        {"run_id": "team/run 1: größer"},
        {"batch_size": 512},
        {"reuse_grad_buffers": True, "offload_optimizer": True},
        {"grad_averager_factory": SPARSE, "grad_compression": "float16"},
        {"grad_averager_factory": lambda **arguments: None},
        {"grad_averager_factory": GradientAverager},
        {"averager_opts": {"target_group_size": 2, "bandwidth": None, "request_timeout": 1.0}},
    ],
)
def test_what_goes_together(values: dict[str, Any]) -> None:
    given = options(**values)
    assert given == options(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"use_local_updates": True, "reuse_grad_buffers": True},
        {"use_local_updates": True, "delay_grad_averaging": True, "delay_optimizer_step": True},
        {"delay_grad_averaging": True, "delay_optimizer_step": False},
        {"auxiliary": True, "batch_size_per_step": 8},
    ],
)
def test_hivemind_still_asserts(values: dict[str, Any]) -> None:
    """The rules above exist because of these; the first assert comes before anything is started."""

    class NeverAlive(hivemind.Optimizer):
        def __del__(self) -> None:
            pass  # hivemind's own fails when construction failed

    with pytest.raises(AssertionError):
        NeverAlive(
            dht=None,
            run_id="x",
            target_batch_size=8,
            params=[torch.zeros(1)],
            optimizer=torch.optim.SGD,
            **values,
        )


# -- changes ----


def test_replace() -> None:
    given = options(grad_compression="float16")
    assert given.replace(batch_size=8) == options(grad_compression="float16", batch_size=8)
    assert given.batch_size is None
    with pytest.raises(OptionsError, match=r"grad_compresion.*grad_compression"):
        given.replace(grad_compresion="float16")
    with pytest.raises(OptionsError, match="delay_state_averaging"):
        given.replace(delay_optimizer_step=True)


def test_gradients_that_come_late_get_a_note() -> None:
    late = options().with_prerequisites(delay_grad_averaging=True, delay_compensation=False)
    (note,) = late.notes
    assert all(words in note for words in ("delay_compensation=False", "late", "lower learning rate", "warm-up"))
    assert late.replace(delay_compensation=True).notes == options(delay_compensation=False).notes == ()
    assert late.replace(auxiliary=True).notes == (), "a helper computes none"


DELAYS = ("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging", "offload_optimizer")


def test_switching_on_brings_what_it_needs() -> None:
    all_on = options().with_prerequisites(delay_grad_averaging=True)
    assert all(getattr(all_on, name) is True for name in DELAYS)
    step_only = options().with_prerequisites(delay_optimizer_step=True)
    assert step_only.delay_grad_averaging is False
    assert options().with_prerequisites(offload_optimizer=True) == options(offload_optimizer=True)


@pytest.mark.parametrize(
    ("delays", "on"),
    [
        ((), {"delay_optimizer_step": None, "offload_optimizer": None}),
        (("delay_state_averaging",), {"delay_optimizer_step": None, "offload_optimizer": None}),
        (
            ("delay_state_averaging", "delay_optimizer_step"),
            {"delay_optimizer_step": True, "offload_optimizer": True},
        ),
        (
            ("delay_state_averaging", "delay_grad_averaging"),
            {"delay_optimizer_step": True, "offload_optimizer": True},
        ),
    ],
    ids=str,
)
def test_what_is_on_as_needed_says_whether_it_is(delays: tuple[str, ...], on: dict[str, bool | None]) -> None:
    """As in hivemind, delays bring what they need unless it is switched off."""
    given = options(**dict.fromkeys(delays, True))
    assert {name: getattr(given, name) for name in on} == on
    assert given == options().replace(**dict.fromkeys(delays, True)) == options(**{**dict.fromkeys(delays, True), **on})
    assert ("offload_optimizer=True" in given.to_code()) is (on["offload_optimizer"] is True)


def test_switching_off_takes_along_what_needs_it() -> None:
    all_on = options().with_prerequisites(delay_grad_averaging=True)
    without_offload = all_on.with_prerequisites(offload_optimizer=False)
    assert without_offload == options(delay_state_averaging=True, offload_optimizer=False)
    without_step = all_on.with_prerequisites(delay_optimizer_step=False)
    assert without_step == all_on.replace(delay_optimizer_step=False, delay_grad_averaging=False)


@pytest.mark.parametrize("name", ["offload_optimizer", "delay_optimizer_step"])
def test_what_becomes_as_needed_is_still_on_where_it_is_needed(name: str) -> None:
    all_on = options().with_prerequisites(delay_grad_averaging=True)
    assert all_on.with_prerequisites(**{name: None}) == all_on.replace(**{name: None}) == all_on


def test_contradicting_changes_are_an_error() -> None:
    with pytest.raises(OptionsError, match="offload_optimizer=False"):
        options().with_prerequisites(delay_grad_averaging=True, offload_optimizer=False)
    with pytest.raises(OptionsError, match="No such option: delay"):
        options().with_prerequisites(delay=True)


def test_every_order_of_switches_gives_valid_options() -> None:
    for first in DELAYS:
        for second in DELAYS:
            for third in DELAYS:
                on = options().with_prerequisites(**{first: True}).with_prerequisites(**{second: True})
                assert getattr(on.with_prerequisites(**{third: False}), third) is False


def test_difference() -> None:
    before = options(grad_compression=upstream.Float16Compression(), scheduler_fn=partial(StepLR, step_size=1))
    after = options(grad_compression="uniform8bit", scheduler_fn=partial(StepLR, step_size=1), verbose=True)
    assert before.difference(after) == {
        "grad_compression": ("float16", "uniform8bit"),
        "verbose": (False, True),
    }
    assert before.difference(before.replace()) == {}


# -- equality, pickles, text ----


def adaptive(threshold: int) -> upstream.CompressionBase:
    return upstream.SizeAdaptiveCompression(threshold, upstream.NoCompression(), upstream.Float16Compression())


EXAMPLES = [
    options(),
    options(grad_compression="size_adaptive", load_state_compression="float16"),
    options(grad_compression=adaptive(9), scheduler_fn=DECAY, average_opt_statistics=("exp_avg",)),
    options(scheduler_fn=StepLR, averager_opts={"target_group_size": 4, "bandwidth": 1e6}, client_mode=False),
    options(grad_averager_factory=SPARSE, matchmaking_time=1.5, average_state_every=3),
    options(run_id='quotes " and \\ backslashes\nand lines').with_prerequisites(delay_grad_averaging=True),
    options(state_averaging_compression=upstream.PerTensorCompression({"w": upstream.NoCompression()})),
]


@pytest.mark.parametrize("given", EXAMPLES, ids=range(len(EXAMPLES)))
def test_pickles_are_equal(given: Options) -> None:
    for dumps in (pickle.dumps, cloudpickle.dumps):
        copy = pickle.loads(dumps(given))
        assert copy == given
        assert hash(copy) == hash(given)
        assert repr(copy) == repr(given)


def test_functions_from_a_notebook_cell_travel() -> None:
    given = options(scheduler_fn=lambda optimizer: StepLR(optimizer, step_size=3))
    copy = pickle.loads(cloudpickle.dumps(given))
    assert copy.scheduler_fn(torch.optim.SGD([torch.zeros(1)], lr=1.0)).step_size == 3


def test_equality_is_by_value() -> None:
    assert options(grad_compression=adaptive(9)) == options(grad_compression=adaptive(9))
    assert options(grad_compression=adaptive(9)) != options(grad_compression=adaptive(10))
    assert options(scheduler_fn=partial(StepLR, step_size=1)) != options(scheduler_fn=partial(StepLR, step_size=2))
    assert options(averager_opts={"bandwidth": 1}) != options(averager_opts={"bandwidth": 2})
    assert options() != "options"
    assert len(set(EXAMPLES)) == len(EXAMPLES)


def test_repr_shows_what_differs_and_no_addresses() -> None:
    assert repr(options(grad_compression="float16")) == "Options(target_batch_size=256, grad_compression='float16')"
    given = repr(options(scheduler_fn=lambda optimizer: None, grad_compression=adaptive(3)))
    assert "0x" not in given
    assert "SizeAdaptiveCompression(3, less=NoCompression(), greater_equal=Float16Compression())" in given


# -- as arguments and as code ----


def test_arguments_are_what_differs_with_codecs_as_objects() -> None:
    assert options().to_strategy_kwargs() == {"target_batch_size": 256}
    arguments = options(
        grad_compression="float16", scheduler_fn=DECAY, state_averaging_compression="none"
    ).to_strategy_kwargs()
    assert isinstance(arguments.pop("grad_compression"), upstream.Float16Compression)
    assert arguments == {"target_batch_size": 256, "scheduler_fn": DECAY}


def same_arguments(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return Options(**first) == Options(**second)


@pytest.mark.parametrize("given", EXAMPLES, ids=range(len(EXAMPLES)))
def test_code_makes_the_same_strategy(given: Options) -> None:
    """Runs the script up to the Trainer, with the real strategy."""
    code = given.to_code()
    compile(code, "script.py", "exec")
    construction, found, _training = code.partition("trainer = ")
    assert found
    namespace: dict[str, Any] = {}
    exec(construction, namespace)
    assert namespace["strategy"].options == given


def test_code_is_a_plain_lightning_script() -> None:
    given = options(grad_compression="float16", scheduler_fn=DECAY)
    assert given.to_code(data="train_loader, validation_loader") == (
        "from functools import partial\n"
        "\n"
        "import lightning\n"
        "from torch.optim.lr_scheduler import StepLR\n"
        "\n"
        "from hivenb import HivemindStrategy\n"
        "from hivenb.compression import Float16Compression\n"
        "\n"
        "# `model` is your LightningModule, `train_loader, validation_loader` your data.\n"
        "# Open to all as it stands: initial_peers= an invite joins a private swarm, secret= starts one.\n"
        "strategy = HivemindStrategy(\n"
        "    target_batch_size=256,\n"
        "    scheduler_fn=partial(StepLR, step_size=10, gamma=0.5),\n"
        "    grad_compression=Float16Compression(),\n"
        ")\n"
        'trainer = lightning.Trainer(strategy=strategy, accelerator="auto", devices=1)\n'
        "trainer.fit(model, train_loader, validation_loader)\n"
    )


class Mine(upstream.NoCompression):
    pass


class Callable:
    def __call__(self, optimizer: Any) -> None: ...


@pytest.mark.parametrize(
    ("values", "comment"),
    [
        ({"scheduler_fn": lambda optimizer: None}, "# scheduler_fn: your own function goes here"),
        ({"scheduler_fn": Callable()}, "# scheduler_fn: an object of your own (Callable) goes here"),
        ({"scheduler_fn": partial(Callable())}, "# scheduler_fn: an object of your own (Callable) goes here"),
        ({"grad_compression": Mine()}, "# grad_compression: a codec of your own (Mine) goes here"),
        ({"averager_opts": {"parameter_names": PurePath()}}, "# averager_opts: an object of your own"),
    ],
)
def test_what_has_no_text_is_a_comment(values: dict[str, Any], comment: str) -> None:
    code = options(**values).to_code()
    compile(code, "script.py", "exec")
    assert comment in code
    assert "target_batch_size=256" in code


def test_a_function_of_the_notebook_is_asked_for_by_name() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def warm_up(optimizer): ...", namespace)
    assert "# scheduler_fn: your own warm_up goes here" in options(scheduler_fn=namespace["warm_up"]).to_code()


def test_two_things_of_one_name_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("other_schedulers")
    exec("class StepLR: ...", vars(other))
    monkeypatch.setitem(sys.modules, other.__name__, other)
    code = options(scheduler_fn=StepLR, averager_opts={"parameter_names": other.StepLR}).to_code()
    compile(code, "script.py", "exec")
    assert "    scheduler_fn=StepLR,\n" in code
    assert "# averager_opts: other_schedulers.StepLR, not torch.optim.lr_scheduler.StepLR, goes here" in code
    assert "# scheduler_fn" in options(scheduler_fn=partial(StepLR, other.StepLR)).to_code()


def test_codecs_in_code_are_equal_to_those_given() -> None:
    given = options(grad_compression=adaptive(77))
    arguments = given.to_strategy_kwargs()
    assert codec_key(arguments["grad_compression"]) == codec_key(adaptive(77))
    assert same_arguments(arguments, {"target_batch_size": 256, "grad_compression": adaptive(77)})
