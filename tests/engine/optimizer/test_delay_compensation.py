"""What makes up for gradients that are averaged in the background: the arithmetic of a step beside an optimizer."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hivenb.engine.averaging.module_changes import ChangesOfModule
from hivenb.engine.optimizer import delay_compensation
from hivenb.engine.optimizer.delay_compensation import DelayCompensation, step_beside, why_not_beside
from hivenb.errors import ProcessEndedError

SHAPES = [(3, 4), (5,), (2, 3, 2), ()]


class LargestOnly(torch.optim.Optimizer):
    """A user's own: moves the numbers with the largest gradients only, remembers by each when, and has state late."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["last"], state["count"] = torch.zeros_like(parameter), [0]
                state["count"][0] += 1
                chosen = parameter.grad.abs() >= parameter.grad.abs().max()
                rate = group["lr"] / math.sqrt(state["count"][0])
                parameter[chosen] -= rate * parameter.grad[chosen] + 0.01 * torch.rand(int(chosen.sum()))
                state["last"][chosen] = group["seen"]


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.1),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "AdamW, each by itself": lambda params: torch.optim.AdamW(params, 0.1, foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, 0.1, weight_decay=0.1),
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, 0.1, weight_decay=0.1, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, 0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, 0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, 0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, 0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, 0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, 0.1),
    "a user's own": LargestOnly,
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    MAKE["Adafactor"] = lambda params: torch.optim.Adafactor(params, 0.1)
if importlib.util.find_spec("bitsandbytes") is not None:

    def in_8_bits(params: Any) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit

        made: torch.optim.Optimizer = AdamW8bit(params, 0.1, min_8bit_size=1)
        return made

    MAKE["in 8 bits, AdamW of bitsandbytes"] = in_8_bits


def make(name: str, steps: int = 3) -> torch.optim.Optimizer:
    """An optimizer of two groups that has made some steps."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    made = MAKE[name]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}])
    for _ in range(steps):
        step(made, gradients())
    return made


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients() -> list[torch.Tensor | None]:
    """One for each parameter but the third."""
    return [None if number == 2 else torch.randn(shape) for number, shape in enumerate(SHAPES)]


def step(optimizer: torch.optim.Optimizer, given: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters(optimizer), given, strict=True):
        parameter.grad = gradient
    optimizer.step()


def all_of(optimizer: torch.optim.Optimizer) -> Any:
    """Parameters, state and settings, to be compared."""
    return copy.deepcopy([[one.detach().tolist() for one in parameters(optimizer)], as_lists(optimizer.state_dict())])


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_lists(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(one) for one in value]
    return value.tolist() if torch.is_tensor(value) else value


def assert_alike(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """By the optimizer's own code it is the same, by a formula the same but for rounding."""
    if name.startswith(("SGD", "AdamW")) or name == "Adam":
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("at_a_time", [1, 9, 10**6])
@pytest.mark.parametrize("name", MAKE)
def test_it_is_the_step_and_changes_nothing(name: str, at_a_time: int) -> None:
    optimizer, own = make(name), gradients()
    before, drawn = all_of(optimizer), torch.random.get_rng_state()
    beside = {}
    for number, value in step_beside(optimizer, own, at_a_time):
        beside[number] = value
    assert all_of(optimizer) == before
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert list(beside) == [0, 1, 3]
    if name == "a user's own" and at_a_time < 10**6:
        return  # it draws a number for each parameter in turn
    given = [None if one is None else one.clone() for one in own]
    kept = parameters(optimizer)[2].detach().clone()
    if name == "a user's own":
        for number, value in beside.items():
            assert (value != torch.tensor(before[0][number])).sum() == 1, "that of the largest gradient"
    else:
        step(optimizer, given)
        for number, value in beside.items():
            assert_alike(name, value, parameters(optimizer)[number])
    assert torch.equal(parameters(optimizer)[2], kept)


@pytest.mark.parametrize("name", MAKE)
def test_the_first_step_is_made_without_a_state(name: str) -> None:
    optimizer, own = make(name, steps=0), gradients()
    before = all_of(optimizer)
    beside = dict(step_beside(optimizer, own))
    assert all_of(optimizer) == before
    if name != "a user's own":
        step(optimizer, [None if one is None else one.clone() for one in own])
        for number, value in beside.items():
            assert_alike(name, value, parameters(optimizer)[number])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_before_2_7_does_not_say_in_groups_how_weights_decay(kind: Any) -> None:
    torch.manual_seed(0)
    optimizer = kind([torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES], 0.1, weight_decay=0.1)
    step(optimizer, gradients())
    own, twin = gradients(), copy.deepcopy(optimizer)
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    beside = dict(step_beside(optimizer, own))
    step(twin, [None if one is None else one.clone() for one in own])
    assert list(beside) == [0, 1, 3]
    for number, value in beside.items():
        assert_alike(kind.__name__, value, parameters(twin)[number])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_of_complex_parameters_too(kind: Any) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
    optimizer = kind([parameter], 0.1)
    for _ in range(2):
        step(optimizer, [torch.randn(4, dtype=torch.complex64)])
    own = torch.randn(4, dtype=torch.complex64)
    ((_, beside),) = step_beside(optimizer, [own])
    step(optimizer, [own])
    assert torch.allclose(beside, parameter.detach())


def test_where_a_formula_fails_the_optimizers_own_code_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_version(*_: Any) -> torch.Tensor:
        raise KeyError("dampening")

    optimizer, own = make("SGD with momentum"), gradients()
    monkeypatch.setattr(delay_compensation, "_by_sgd", of_another_version)
    before = all_of(optimizer)
    beside = dict(step_beside(optimizer, own))
    assert all_of(optimizer) == before
    step(optimizer, [None if one is None else one.clone() for one in own])
    assert list(beside) == [0, 1, 3]
    for number, value in beside.items():
        assert torch.equal(value, parameters(optimizer)[number])


def test_neither_hooks_nor_schedulers_see_it() -> None:
    optimizer = make("AdamW")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # which puts a step of its own there
    optimizer.step()
    scheduler.step()
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    own, rates = gradients(), [group["lr"] for group in optimizer.param_groups]
    beside = dict(step_beside(optimizer, own))
    assert (called, [group["lr"] for group in optimizer.param_groups]) == ([], rates)
    step(optimizer, own)
    assert called == ["before", "after"]
    assert torch.allclose(parameters(optimizer)[0], beside[0]), "at the scheduler's rate"


def test_one_that_would_reach_the_parameters_another_way_is_told() -> None:
    within, flat = make("SGD"), make("SGD")
    optimizer = LargestOnly([torch.nn.Parameter(torch.ones(2))])
    assert why_not_beside(optimizer) is None
    optimizer.inner = [within]  # type: ignore[attr-defined]
    assert "another optimizer in its attribute inner" in str(why_not_beside(optimizer))
    flat.flat = parameters(flat)  # type: ignore[attr-defined]
    assert "parameters in its attribute flat" in str(why_not_beside(flat))


def test_one_whose_state_is_not_all_of_parameters_is_told() -> None:
    optimizer = make("AdamW")
    assert why_not_beside(optimizer) is None
    optimizer.state["step"] = 3  # type: ignore[index, assignment]
    assert "its state has something of no parameter's own ('step')" in str(why_not_beside(optimizer))


@pytest.mark.parametrize(
    "held",
    [
        lambda own: [torch.zeros_like(one) for one in own],
        lambda own: {"by name": [{"deeper": torch.zeros(3)}]},
        lambda own: torch.cat([one.detach().flatten() for one in own]),
        lambda own: own[0].detach().view(-1),
        lambda own: SimpleNamespace(mean=torch.zeros(3)),
    ],
    ids=["a list of moments", "deep within", "a flat buffer", "a view", "an object's attribute"],
)
def test_one_that_remembers_elsewhere_than_in_its_state_is_told(held: Callable[..., Any]) -> None:
    optimizer = make("a user's own")
    optimizer.held = held(parameters(optimizer))  # type: ignore[attr-defined]
    assert "tensors in its attribute held" in str(why_not_beside(optimizer))


@pytest.mark.parametrize("held", [lambda own: [[own[0]]], lambda own: {"a": own}, set, lambda own: {own[0]: 1}])
def test_parameters_are_found_however_deep_they_are(held: Callable[..., Any]) -> None:
    optimizer = make("a user's own")
    optimizer.held = held(parameters(optimizer))  # type: ignore[attr-defined]
    assert "parameters in its attribute held" in str(why_not_beside(optimizer))


def test_one_that_frees_or_draws_something_of_its_own_is_told() -> None:
    class Freeing(LargestOnly):
        def __del__(self) -> None:
            pass

    assert "__del__" in str(why_not_beside(Freeing([torch.nn.Parameter(torch.ones(2))])))
    drawing = make("a user's own")
    drawing.generator = torch.Generator()  # type: ignore[attr-defined]
    assert "random numbers in its attribute generator" in str(why_not_beside(drawing))


@pytest.mark.parametrize("name", MAKE)
def test_torchs_own_are_not_refused(name: str) -> None:
    optimizer = make(name)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert why_not_beside(optimizer) is None


class Counting(torch.optim.Optimizer):
    """Counts its steps in attributes of its own, in several ways, and moves by that count."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})
        self.steps, self.by_tensor, self.by_name = 0, torch.tensor(0.0), {"seen": [0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.by_tensor += 1
        self.by_name["seen"][0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= self.by_tensor * self.by_name["seen"][0] * parameter.grad


def test_what_an_optimizer_counts_goes_on_as_without_a_step_beside_it() -> None:
    optimizer = Counting([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))])
    assert why_not_beside(optimizer) is None
    beside = dict(step_beside(optimizer, [torch.ones(3), torch.ones(3)], at_a_time=3))
    assert (optimizer.steps, float(optimizer.by_tensor), optimizer.by_name) == (0, 0.0, {"seen": [0]})
    step(optimizer, [torch.ones(3), torch.ones(3)])
    assert all(torch.equal(value, parameters(optimizer)[number]) for number, value in beside.items())


def test_hooks_of_all_optimizers_are_not_called() -> None:
    called: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        optimizer = make("Adagrad")
        called.clear()
        dict(step_beside(optimizer, gradients()))
        assert called == []
        optimizer.step()
        assert called == ["before", "after"]
    finally:
        for hook in hooks:
            hook.remove()


class Hidden(torch.optim.Optimizer):
    """Reaches its parameters by a way that nobody sees."""

    def __init__(self, params: Any):
        super().__init__(params, {})
        own = self.param_groups[0]["params"]
        self.reach = lambda: own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.reach():
            parameter -= 1.0


def test_a_step_beside_one_that_writes_to_its_parameters_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Hidden([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="Hidden beside it has written to its own parameters"):
        list(step_beside(optimizer, [torch.ones(2)]))
    compensation = DelayCompensation()
    for _ in range(2):
        compensation.note_gradients([torch.ones(2)], [True])
        compensation.speculate(Averager(optimizer))  # type: ignore[arg-type]
    assert parameters(optimizer)[0].tolist() == [-1.0, -1.0], "once above, and once here"
    assert "has written to its own parameters" in caplog.text


# -- the model, ahead -------------------------------------------------------------------------------------------------


def write(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def ahead(values: Iterable[tuple[int, torch.Tensor]]) -> tuple[ChangesOfModule, list[torch.Tensor], list[torch.Tensor]]:
    """A model of two parameters that has been let be ahead, and the optimizer's copies of them."""
    model, copies = ([torch.tensor([1.0, 2.0]), torch.tensor([3.0])] for _ in range(2))
    changes = ChangesOfModule()
    changes.take_in(model, copies, remember=True)
    changes.lead(values, model, write)
    return changes, model, copies


def test_the_model_is_ahead_until_it_gets_what_the_optimizer_has() -> None:
    changes, model, copies = ahead([(0, torch.tensor([5.0, 6.0]))])
    assert [one.tolist() for one in model] == [[5.0, 6.0], [3.0]]
    changes.take_in(model, copies, remember=True)
    assert [one.tolist() for one in copies] == [[1.0, 2.0], [3.0]], "it is no change of the module's own"
    copies[0] += 0.5
    changes.hand_out(copies, model, write)
    assert [one.tolist() for one in model] == [[1.5, 2.5], [3.0]]


def test_what_the_module_changes_meanwhile_stays_changed() -> None:
    changes, model, copies = ahead([(0, torch.tensor([5.0, 6.0]))])
    model[0][0] += 0.25
    model[1].fill_(7.0)
    copies[0] += 0.5
    changes.hand_out(copies, model, write)
    assert [one.tolist() for one in model] == [[1.75, 2.5], [7.0]]
    changes.take_in(model, copies, remember=False)
    assert [one.tolist() for one in copies] == [[1.75, 2.5], [7.0]]


def test_what_a_model_that_is_ahead_would_have_is_known() -> None:
    changes, model, copies = ahead([(0, torch.tensor([5.0, 6.0]))])
    model[0][0] += 0.25
    model[1].fill_(7.0)
    before = [one.clone() for one in (*model, *copies)]
    assert [one.tolist() for one in changes.handed_out(copies, model)] == [[1.25, 2.0], [7.0]]
    assert all(map(torch.equal, (*model, *copies), before))
    copies[0] += 0.5
    changes.hand_out(copies, model, write)
    assert [one.tolist() for one in model] == [[1.75, 2.5], [7.0]], "it was only looked at"


def test_a_step_that_fails_on_its_way_leaves_the_model_as_it_was() -> None:
    model, copies = ([torch.tensor([1.0, 2.0]), torch.tensor([3.0])] for _ in range(2))
    changes = ChangesOfModule()
    changes.take_in(model, copies, remember=True)

    def failing() -> Iterable[tuple[int, torch.Tensor]]:
        yield 0, torch.tensor([5.0, 6.0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        changes.lead(failing(), model, write)
    changes.take_in(model, copies, remember=False)
    assert [one.tolist() for one in (*model, *copies)] == [[1.0, 2.0], [3.0]] * 2


@pytest.mark.parametrize("fails", ["before", "on its way"])
def test_a_model_that_could_not_be_given_its_result_gets_all_of_it_the_next_time(fails: str) -> None:
    changes, model, copies = ahead([(0, torch.tensor([5.0, 6.0])), (1, torch.tensor([9.0]))])
    copies[0] += 0.5

    def failing(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
        if fails == "on its way":
            write(list(sources)[:1], list(targets)[:1])
        raise MemoryError

    with pytest.raises(MemoryError):
        changes.hand_out(copies, model, failing)
    changes.hand_out(copies, model, write)
    changes.take_in(model, copies, remember=False)
    assert [one.tolist() for one in model] == [one.tolist() for one in copies] == [[1.5, 2.5], [3.0]]


class Averager:
    """As a speculative step knows the averager of the state: an optimizer that works on copies."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.led, self.kept = optimizer, {}, []

    def lead_model(self, steps: Any, keep_in: Any) -> None:
        self.led = dict(steps(self.optimizer))
        self.kept = keep_in


def test_own_gradients_are_clipped_as_those_of_the_step() -> None:
    compensation, averager = DelayCompensation(), Averager(make("SGD"))
    clipped: list[torch.optim.Optimizer] = []

    def clip(optimizer: torch.optim.Optimizer) -> None:
        clipped.append(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters(optimizer), 0.5)

    compensation.clip = clip
    own = [torch.ones(shape) for shape in SHAPES]
    compensation.note_gradients(own, [True, True, False, True])
    before = all_of(averager.optimizer)
    compensation.speculate(averager)  # type: ignore[arg-type]
    assert all_of(averager.optimizer) == before
    assert all(one.eq(1.0).all() for one in own), "which the round sends"
    assert isinstance(clipped[0], torch.optim.SGD)
    assert clipped[0] is not averager.optimizer
    moved = torch.cat(
        [(parameters(averager.optimizer)[number] - value).flatten() for number, value in averager.led.items()]
    )
    per_number = 0.5 / math.sqrt(12 + 5 + 1)
    expected = torch.tensor([0.1] * 12 + [0.03] * 6) * per_number
    assert torch.allclose(moved, expected, atol=1e-6)


def moved_by(compensation: DelayCompensation, size: float) -> float:
    """How far a speculative step of SGD goes with own gradients of that size."""
    averager = Averager(make("SGD", steps=0))
    compensation.note_gradients([torch.full(shape, size) for shape in SHAPES], [True, True, False, True])
    compensation.speculate(averager)  # type: ignore[arg-type]
    return float((parameters(averager.optimizer)[0].detach() - averager.led[0]).flatten()[0])


def test_own_gradients_of_few_samples_go_no_farther_than_twice_the_average() -> None:
    compensation = DelayCompensation()
    per_number = math.sqrt(12 + 5 + 1)  # the numbers that have a gradient
    assert moved_by(compensation, 7.0) == pytest.approx(0.7, rel=1e-4), "nothing is known of others yet"
    compensation.note_average(3.0 * per_number)
    assert moved_by(compensation, 5.0) == pytest.approx(0.5, rel=1e-4)
    assert moved_by(compensation, 60.0) == pytest.approx(0.6, rel=1e-4)
    compensation.note_average(math.inf)
    assert moved_by(compensation, 7.0) == pytest.approx(0.7, rel=1e-4)


def test_clipping_may_give_parameters_other_gradients_or_none() -> None:
    compensation, averager = DelayCompensation(), Averager(make("SGD"))

    def clip(optimizer: torch.optim.Optimizer) -> None:
        first, *others = parameters(optimizer)
        first.grad = None
        for parameter in others:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.5, 0.5)

    compensation.clip = clip
    compensation.note_gradients([torch.ones(shape) for shape in SHAPES], [True, True, False, True])
    compensation.speculate(averager)  # type: ignore[arg-type]
    assert list(averager.led) == [1, 3]
    for number, value in averager.led.items():
        assert torch.allclose(parameters(averager.optimizer)[number] - value, torch.tensor(0.03 * 0.5), atol=1e-6)


def test_without_own_gradients_the_model_stays_where_it_is() -> None:
    compensation, averager = DelayCompensation(), Averager(make("SGD"))
    compensation.speculate(averager)  # type: ignore[arg-type]
    compensation.note_gradients([torch.ones(shape) for shape in SHAPES], [True] * 4)
    compensation.begin()  # another round, to which this peer has nothing to add
    compensation.speculate(averager)  # type: ignore[arg-type]
    compensation.note_gradients([torch.ones(shape) for shape in SHAPES], [False] * 4)
    compensation.speculate(averager)  # type: ignore[arg-type]
    assert averager.led == {}


def test_gradients_that_cannot_be_kept_are_no_error_of_the_round(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compensation, averager = DelayCompensation(), Averager(make("SGD"))
    own = [torch.ones(shape) for shape in SHAPES]

    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        for _ in range(2):
            compensation.begin()
            compensation.note_gradients(own, [True] * 4)
            compensation.speculate(averager)  # type: ignore[arg-type]
    assert averager.led == {}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "own gradients cannot be kept" in told[0]
    assert "not enough memory" in told[0]
    compensation.begin()
    compensation.note_gradients(own, [True] * 4)
    compensation.speculate(averager)  # type: ignore[arg-type]
    assert list(averager.led) == [0, 1, 2, 3], "there is memory again"


def test_an_averager_that_has_ended_is_no_fault_of_the_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    compensation, averager = DelayCompensation(), Averager(make("SGD"))

    class Ended(Averager):
        def lead_model(self, steps: Any, keep_in: Any) -> None:
            raise ProcessEndedError("it was killed")

    for one in (Ended(averager.optimizer), averager):
        compensation.note_gradients([torch.ones(shape) for shape in SHAPES], [True] * 4)
        compensation.speculate(one)  # type: ignore[arg-type]
    assert not caplog.records
    assert list(averager.led) == [0, 1, 2, 3]


def test_an_optimizer_that_cannot_step_beside_itself_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make("SGD")

    class Picky(Averager):
        def lead_model(self, steps: Any, keep_in: Any) -> None:
            raise KeyError("unknown parameter")

    compensation = DelayCompensation()
    for averager in (Picky(optimizer), Picky(optimizer)):
        compensation.note_gradients([torch.ones(shape) for shape in SHAPES], [True] * 4)
        compensation.speculate(averager)  # type: ignore[arg-type]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "SGD" in told[0]
    assert "unknown parameter" in told[0]
