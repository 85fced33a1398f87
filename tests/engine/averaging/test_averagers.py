"""Averagers that can be born on any thread, meet plain hivemind's, and change nothing but what they are asked to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.optim import grad_averager, power_sgd_averager, state_averager
from hivemind.utils import get_dht_time
from in_memory.real_time import RealTimeDHT
from tiny import LOOPBACK, samples

from hivenb.engine.averaging.averager import Averager, complain_unless_ended
from hivenb.engine.averaging.gradient_averager import GradientAverager, PowerSGDGradientAverager, own_factory
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.averaging.torch_optimizer_state import initialize_optimizer_state
from hivenb.engine.matchmaking.matchmaking import Attendance, ExpectedPeers
from hivenb.engine.network.dht import DHT

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum and decay": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD with Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "AMSGrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1, weight_decay=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1, weight_decay=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=0.1, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5, weight_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1, weight_decay=0.1),
}
STEPS = 12


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    x, y = samples(16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class TestInitialState:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_training_after_it_is_the_same_to_the_bit(self, name: str) -> None:
        reference, model = small_model(), small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        initialize_optimizer_state(optimizer)
        for expected, got in zip(
            train(reference, OPTIMIZERS[name](reference.parameters())), train(model, optimizer), strict=True
        ):
            assert torch.equal(expected, got)

    def test_one_rare_one_trains_nearly_as_without_it(self) -> None:
        """torch dampens the gradient that it adds to a momentum, but not the one that it makes the first one of."""
        dampened = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
        reference, model = small_model(), small_model()
        initialized = dampened(model.parameters())
        initialize_optimizer_state(initialized)
        pairs = list(zip(train(reference, dampened(reference.parameters())), train(model, initialized), strict=True))
        assert all(torch.allclose(expected, got, atol=0.1) for expected, got in pairs)
        assert not all(torch.equal(expected, got) for expected, got in pairs), "exact by now: move it to OPTIMIZERS"

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_all_tensors_are_there_and_nothing_else_has_changed(self, name: str) -> None:
        model = small_model()
        before = copy.deepcopy(model.state_dict())
        optimizer = OPTIMIZERS[name](model.parameters())
        groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
        grads = [torch.ones_like(p) if i else None for i, p in enumerate(model.parameters())]
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        initialize_optimizer_state(optimizer)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert all(bool((grad == 1).all()) for grad in grads if grad is not None)
        assert optimizer.state_dict()["param_groups"] == groups
        trained = OPTIMIZERS[name]((other := small_model()).parameters())
        train(other, trained)
        assert tensors_of(optimizer) == tensors_of(trained), "averaging needs the same tensors from the start"

    def test_state_that_is_there_is_kept(self) -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)
        kept = copy.deepcopy(optimizer.state_dict())
        initialize_optimizer_state(optimizer)
        assert str(optimizer.state_dict()) == str(kept)

    def test_parameters_are_as_they_were_even_if_the_step_fails(self) -> None:
        class Broken(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                raise RuntimeError("broken")

        model = small_model()
        before = copy.deepcopy(model.state_dict())
        optimizer = Broken(model.parameters(), lr=0.1, weight_decay=0.1)
        with pytest.raises(RuntimeError, match="broken"):
            initialize_optimizer_state(optimizer)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert optimizer.param_groups[0]["weight_decay"] == 0.1


def tensors_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value.shape for name, value in state.items() if torch.is_tensor(value)}
        for state in optimizer.state.values()
    ]


class TestFactories:
    def test_none_is_the_default(self) -> None:
        assert own_factory(None) is GradientAverager

    def test_a_class_of_hivemind_is_settled(self) -> None:
        for upstream in (grad_averager.GradientAverager, power_sgd_averager.PowerSGDGradientAverager):
            made = own_factory(upstream)
            assert issubclass(made, upstream)
            assert issubclass(made, Averager)
            assert made.__name__ == upstream.__name__

    def test_a_class_of_the_users_own_too(self) -> None:
        class Own(grad_averager.GradientAverager):
            pass

        made = own_factory(Own)
        assert issubclass(made, Own)
        assert made._get_handle_name(None, "rpc_x") == GradientAverager._get_handle_name(None, "rpc_x")

    def test_a_class_of_the_users_own_is_given_nothing_that_hivemind_does_not_know(self) -> None:
        class Own(grad_averager.GradientAverager):
            def __init__(self, parameters: Any, *, dht: Any, prefix: str, averaged_grads: Any = (), start: bool):
                super().__init__(parameters, dht=dht, prefix=prefix, averaged_grads=averaged_grads, start=start)

        dht = SimpleNamespace(client_mode=False)
        settings = {"dht": dht, "prefix": "run", "start": False, "robust_aggregation": "centered_clipping"}
        made = own_factory(Own)([torch.nn.Parameter(torch.zeros(3))], **settings)
        assert made.robust_aggregation == "centered_clipping"

    def test_one_of_ours_stays_as_it_is(self) -> None:
        assert own_factory(PowerSGDGradientAverager) is PowerSGDGradientAverager

    def test_a_partial_keeps_its_arguments_however_deep(self) -> None:
        inner = partial(power_sgd_averager.PowerSGDGradientAverager, averager_rank=4)
        made = own_factory(partial(inner, min_compression_ratio=0.1))
        assert made.keywords == {"averager_rank": 4, "min_compression_ratio": 0.1}
        innermost = made.func.func if isinstance(made.func, partial) else made.func
        assert issubclass(innermost, Averager)

    @pytest.mark.parametrize("bad", [lambda **kwargs: None, int, "GradientAverager", partial(print)])
    def test_anything_else_is_refused(self, bad: Any) -> None:
        with pytest.raises(TypeError, match=r"subclass of hivemind\.optim\.grad_averager\.GradientAverager"):
            own_factory(bad)


@pytest.mark.parametrize(
    ("ours", "upstream"),
    [
        (GradientAverager, grad_averager.GradientAverager),
        (PowerSGDGradientAverager, power_sgd_averager.PowerSGDGradientAverager),
        (TrainingStateAverager, state_averager.TrainingStateAverager),
        (own_factory(grad_averager.GradientAverager), grad_averager.GradientAverager),
    ],
)
@pytest.mark.parametrize("namespace", [None, "run_grad_averager"])
def test_the_names_of_the_rpcs_are_upstreams(ours: Any, upstream: Any, namespace: str | None) -> None:
    """Else a peer of plain hivemind could not meet one of ours."""
    for method in ("rpc_join_group", "rpc_aggregate_part", "rpc_download_state"):
        assert ours._get_handle_name(namespace, method) == upstream._get_handle_name(namespace, method)


def test_each_calls_by_the_name_of_its_own_class_whichever_was_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain averagers may be used in the same program, and others of ours: as when a run changes to PowerSGD."""
    called: list[str] = []

    async def call(peer: Any, name: str, *args: Any) -> None:
        called.append(name)

    for kind in (DecentralizedAverager, GradientAverager):
        monkeypatch.setattr(kind, "_rpc_handlers", None)
        monkeypatch.setattr(kind, "_stub_type", None)
        kind._collect_rpc_handlers()
    p2p: Any = SimpleNamespace(iterate_protobuf_handler=call)
    for kind in (PowerSGDGradientAverager, TrainingStateAverager, GradientAverager):
        peer: Any = None
        asyncio.run(kind.get_stub(p2p, peer, namespace="run").rpc_join_group(iter(())))
        assert called[-1] == kind._get_handle_name("run", "rpc_join_group")


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_born_on_any_thread_without_touching_the_interrupt_button(dht: DHT, run_id: str, on_main_thread: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    born: list[bool] = []

    def live() -> None:
        averager = GradientAverager([torch.nn.Parameter(torch.zeros(3))], dht=dht, prefix=run_id, start=True)
        born.append(averager.is_alive())
        averager.shutdown()
        born.append(averager.is_alive())

    if on_main_thread:
        live()
    else:
        thread = threading.Thread(target=live)
        thread.start()
        thread.join(60)
    assert born == [True, False]
    assert signal.getsignal(signal.SIGINT) is before


class Pair:
    """Two averagers of one value each, on DHTs of their own."""

    def __init__(self, first: type, second: type, dht: DHT, prefix: str):
        self.other_dht = DHT(start=True, initial_peers=[str(a) for a in dht.get_visible_maddrs()], **LOOPBACK)
        self.parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        handlers = signal.getsignal(signal.SIGINT)
        self.averagers = [
            kind([parameter], dht=own, prefix=prefix, min_matchmaking_time=30.0, request_timeout=1.0, start=True)
            for kind, parameter, own in zip((first, second), self.parameters, (dht, self.other_dht), strict=True)
        ]
        signal.signal(signal.SIGINT, handlers)  # which plain hivemind has set to be ignored

    def average(self, *values: float) -> list[list[float]]:
        """Gradients after a round that each enters with a gradient of this value and one sample."""
        for averager, parameter, value in zip(self.averagers, self.parameters, values, strict=True):
            parameter.grad = torch.full_like(parameter, value)
            averager.accumulate_grads_(batch_size=1)
        controls = [averager.step(wait=False, timeout=60) for averager in self.averagers]
        for control in controls:
            assert len(control.result(60)) == 2
        found = []
        for averager in self.averagers:
            with averager.get_tensors() as tensors:
                found.append(tensors[0].tolist())
        return found

    def close(self) -> None:
        for averager in self.averagers:
            averager.shutdown()
        self.other_dht.shutdown()


@pytest.mark.parametrize("other", [GradientAverager, grad_averager.GradientAverager], ids=["ours", "plain"])
def test_two_meet_long_before_the_matchmaking_time_is_over(dht: DHT, run_id: str, other: type) -> None:
    pair = Pair(GradientAverager, other, dht, run_id)
    try:
        for averager in pair.averagers:
            if isinstance(averager, Averager):
                others = (one.peer_id.to_bytes() for one in pair.averagers if one is not averager)
                averager.expect_peers(ExpectedPeers(frozenset(Attendance(other, 0, 0) for other in others)))
        started = time.monotonic()
        assert pair.average(1.0, 3.0) == [[2.0] * 3] * 2
        if other is GradientAverager:
            assert time.monotonic() - started < 30, "they waited out matchmaking_time for nobody"
    finally:
        pair.close()


def end_while_it(meets_or_averages: str) -> None:
    """Two that have met and wait for a third one, or, if that is all, average: one of them, while the other does not.

    They end then.
    """

    def wait_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    dhts = [DHT(start=True, **LOOPBACK)]
    dhts += [DHT(start=True, initial_peers=list(map(str, dhts[0].get_visible_maddrs())), **LOOPBACK)]
    averagers = [
        GradientAverager(
            [torch.nn.Parameter(torch.zeros(3))], dht=own, prefix="run", min_matchmaking_time=60.0, start=True
        )
        for own in dhts
    ]
    third = [Attendance(b"a third one", 0, 0)] if meets_or_averages == "met" else []
    searches: list[Any] = []
    for averager, other in zip(averagers, reversed(averagers), strict=True):
        peers = [Attendance(other.peer_id.to_bytes(), 0, 0), *third]
        averager.expect_peers(ExpectedPeers(frozenset(peers)))
        searches.append(averager.schedule_step(gather=0, timeout=120.0))
        if not searches[1:]:
            wait_until(lambda: averagers[0].is_alone(0))
    if third:
        wait_until(lambda: not any(averager.is_alone(0) for averager in averagers))
    else:
        wait_until(lambda: all(search.stage is AveragingStage.AWAITING_TRIGGER for search in searches))
        searches[0].weight = 1.0
        searches[0].allow_allreduce()
        wait_until(lambda: searches[0].stage is AveragingStage.RUNNING_ALLREDUCE)
    for one in (*averagers, *dhts):
        one.shutdown()
    assert all(search.cancelled() for search in searches)


@pytest.mark.process
@pytest.mark.parametrize("while_it", ["met", "averages"])
def test_one_that_ends_does_so_at_once_whatever_it_is_doing(while_it: str) -> None:
    ended = forked.run(end_while_it, while_it, seconds=120.0)
    assert ended.code == 0, ended.err
    assert "by force" not in ended.err
    # hivemind says of a round that breaks off where it was
    assert ended.err.count("Traceback") == (1 if while_it == "averages" else 0), ended.err


def test_a_request_that_ends_is_no_error_and_all_else_is(caplog: pytest.LogCaptureFixture) -> None:
    async def read_to_the_end() -> None:
        raise asyncio.IncompleteReadError(b"", 8)

    async def cancel_a_request() -> None:
        begun = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun.set()
            try:
                await reader.read()
            finally:
                writer.close()

        asyncio.get_running_loop().set_exception_handler(complain_unless_ended)
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await begun.wait()
        requests = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await asyncio.wait({asyncio.create_task(read_to_the_end())})
        gc.collect()  # asyncio complains of the task when nobody can ask it any more
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        writer.close()
        server.close()

    asyncio.run(cancel_a_request())
    complaints = [record.exc_info for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert [kind for kind, *_ in complaints] == [ZeroDivisionError]


class TestAlone:
    @pytest.fixture
    def averager(self, memory_dht: RealTimeDHT, run_id: str) -> Any:
        made = GradientAverager(
            [torch.nn.Parameter(torch.zeros(3))],
            dht=memory_dht,
            prefix=run_id,
            min_matchmaking_time=60.0,
            start=True,
        )
        yield made
        made.shutdown()

    def test_retiring_ends_the_search_for_a_group(
        self, averager: GradientAverager, eventually: Callable[..., None]
    ) -> None:
        control = averager.schedule_step(timeout=120.0, scheduled_time=get_dht_time() + 60)
        eventually(lambda: control.stage is AveragingStage.LOOKING_FOR_GROUP)
        retiring = threading.Thread(target=averager.retire)
        retiring.start()
        retiring.join(20)
        with pytest.raises(concurrent.futures.CancelledError):
            control.result(20)
        assert control.cancelled()

    def test_after_retiring_no_round_begins(self, averager: GradientAverager) -> None:
        averager.retire()
        assert averager.schedule_step(timeout=120.0, scheduled_time=get_dht_time() + 60).cancelled()
        averager.retire()


def test_each_of_ours_has_our_base_behind_upstreams() -> None:
    for ours in (GradientAverager, PowerSGDGradientAverager, TrainingStateAverager):
        order = ours.__mro__
        upstream = next(base for base in order if base.__module__.startswith("hivemind.optim"))
        assert order.index(upstream) < order.index(Averager) < order.index(DecentralizedAverager)
    assert Averager.run is not DecentralizedAverager.run


def test_one_that_was_never_started_can_be_shut_down(dht: DHT) -> None:
    GradientAverager([torch.nn.Parameter(torch.zeros(3))], dht=dht, prefix="run", start=False).shutdown()


@pytest.mark.process
def test_two_that_were_asked_end_beside_each_other_and_shutting_down_again_is_quick(
    dht: DHT, third_dht: DHT, make_averager: Callable[..., GradientAverager], eventually: Callable[..., None]
) -> None:
    averagers = [make_averager(one) for one in (dht, third_dht)]
    for averager in averagers:
        averager.ask_to_end()
    eventually(lambda: not any(averager.is_alive() for averager in averagers))
    assert [averager.ended for averager in averagers] == [None, None]
    for averager in (*averagers, *averagers):
        averager.shutdown()


@pytest.mark.process
def test_an_interrupt_before_one_was_asked_lets_it_be_asked_again(
    dht: DHT, make_averager: Callable[..., GradientAverager], monkeypatch: pytest.MonkeyPatch
) -> None:
    averager = make_averager(dht)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(averager, "_known_rounds", interrupt)
        with pytest.raises(KeyboardInterrupt):
            averager.shutdown()
    assert averager.is_alive()
    averager.shutdown()
    assert averager.exitcode == 0
