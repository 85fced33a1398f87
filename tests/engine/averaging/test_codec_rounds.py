"""Real rounds and downloads with each codec: what peers hold afterwards, never what a round reports.

With hivemind's own 8-bit codecs and numpy 2.4, a round reports success while the peers keep what they had. So each
test compares numbers, with a bound that follows from the codec and that is far below what the peers differed by.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.compression.adaptive import AdaptiveCompressionBase
from hivemind.optim import power_sgd_averager
from in_memory.real_time import RealTimeDHT

from hivenb import compression as codecs
from hivenb.engine.averaging.gradient_averager import (
    GradientAverager,
    PowerSGDGradientAverager,
    orthonormalize_,
    own_factory,
)
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.network.dht import DHT

#: 300,000 numbers are two parts of 512 KiB and a smaller one, the matrix is one and a smaller one.
SHAPES = [(300_000,), (300, 500), (3,), (1000,)]
CONSTANT = 3
STATISTICS = ("exp_avg", "exp_avg_sq")
#: Samples of the two peers, by which they count in the average.
WEIGHTS = (1, 3)
FLOAT32 = 2.0**-20


def per_tensor() -> codecs.PerTensorCompression:
    """By the keys that hivemind gives: an index, and in rounds of the state an index and a statistic's name."""
    by_index: dict[Any, Any] = {
        0: codecs.Uniform8BitQuantization(),
        1: codecs.Quantile8BitQuantization(),
        2: codecs.Float16Compression(),
        3: codecs.NoCompression(),
    }
    # a download counts the optimizer's tensors from 0 again: three of Adam's for each of ours
    by_index |= {index: codecs.ScaledFloat16Compression() for index in range(len(SHAPES), 3 * len(SHAPES))}
    by_statistic = {(index, name): by_index[index] for index in range(len(SHAPES)) for name in STATISTICS}
    return codecs.PerTensorCompression({**by_index, **by_statistic})


def role_adaptive() -> codecs.RoleAdaptiveCompression:
    return codecs.RoleAdaptiveCompression(
        gradient=codecs.Uniform8BitQuantization(),
        parameter=codecs.Float16Compression(),
        optimizer=codecs.Quantile8BitQuantization(),
    )


CODECS: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: codecs.codec(name)) for name in codecs.CODECS},
    "role_adaptive": role_adaptive,
    "per_tensor": per_tensor,
}
NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
EACH_CODEC = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_BITSANDBYTES if name == "blockwise8bit" else ()) for name in CODECS]
)


def promised(codec: Any, values: torch.Tensor, key: Any, role: TensorRole) -> torch.Tensor:
    """How far each of these values may be off once it was encoded and decoded.

    Parts of a tensor are encoded by themselves: their deviation and ranks are a little different from the tensor's.
    """
    while isinstance(codec, AdaptiveCompressionBase):
        codec = codec.choose_compression(CompressionInfo.from_tensor(values, key=key, role=role))
    size, rounding = values.abs(), values.abs().max() * FLOAT32
    eight_bits = isinstance(codec, (codecs.Uniform8BitQuantization, codecs.Quantile8BitQuantization))
    if type(codec) is codecs.NoCompression or (eight_bits and values.numel() < 344):  # smaller than its table
        return torch.zeros_like(values) + rounding
    if isinstance(codec, codecs.ScaledFloat16Compression):
        # an 11-bit significand of the distance from the mean, which is less than the range
        return torch.zeros_like(values) + (values.max() - values.min()) * 2.0**-11 + rounding
    if isinstance(codec, codecs.Float16Compression):
        return size * 2.0**-11 + 2.0**-25 + rounding  # half a unit of an 11-bit significand, half the smallest number
    if isinstance(codec, codecs.Uniform8BitQuantization):
        # 256 buckets over six deviations, decoded as the mean of what is in them; the outer ones are open
        distance, deviation = (values - values.mean()).abs(), 1.05 * values.std()
        overshoot = (distance.max() - 3 * deviation).clamp_min(0)
        return 6 * deviation / 256 + overshoot * (distance > 2.8 * deviation) + rounding
    if isinstance(codec, codecs.Quantile8BitQuantization):
        # no further than the widest bucket of a 256th of the values is wide
        edges = values.flatten().sort().values[torch.linspace(0, values.numel() - 1, 257).long()]
        return torch.zeros_like(values) + 1.5 * edges.diff().max() + rounding
    assert isinstance(codec, codecs.BlockwiseQuantization)
    # half the widest gap in its table of 256 values, which is 1/64 of the block's largest one, and some
    return torch.zeros_like(values) + 0.01 * size.max() + rounding


class Expected:
    """What a round of two makes of one tensor of each.

    In a pair, a part x of which e arrives too much moves the other peer by e times the share of whoever has sent it.
    Otherwise, one peer averages a part, the *reducer*. The other, the *sender*, sends its part x, of which e arrives
    too much, and gets back how far x + e is from the average, of which d arrives too much. The reducer is then off by
    e times the sender's share, the sender by d and by e times the reducer's share, which is more than in a pair. Who
    reduces what is for hivemind to decide, so each value is allowed the worse of both.
    """

    def __init__(self, before: Sequence[torch.Tensor], used: Sequence[Any], key: Any, role: TensorRole):
        self.before = [tensor.double() for tensor in before]
        shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
        self.average = sum(share * tensor for share, tensor in zip(shares, self.before, strict=True))
        out = [promised(codec, tensor, key, role) for codec, tensor in zip(used, self.before, strict=True)]
        back = [
            1.1 * promised(codec, self.average - tensor, key, role)
            for codec, tensor in zip(used, self.before, strict=True)
        ]
        rounding = max(tensor.abs().max() for tensor in self.before) * FLOAT32
        self.allowed = [
            torch.maximum(shares[1 - i] * out[i] + back[i], shares[1 - i] * out[1 - i]) + rounding for i in (0, 1)
        ]
        self.allowed_between = torch.maximum(out[0] + back[0], out[1] + back[1]) + rounding

    def check(self, after: Sequence[torch.Tensor]) -> None:
        spread = (self.before[0] - self.before[1]).abs().min()
        assert max(allowed.max() for allowed in (*self.allowed, self.allowed_between)) < spread / 5
        for tensor, allowed in zip(after, self.allowed, strict=True):
            assert_within(tensor, self.average, allowed)
        assert_within(after[0], after[1].double(), self.allowed_between)

    def is_lossy(self, after: Sequence[torch.Tensor]) -> bool:
        """Whether a codec has left its traces, so that it was really at work."""
        errors = max((tensor.double() - self.average).abs().max() for tensor in after)
        return bool(errors > 4 * self.average.abs().max() * FLOAT32)


def assert_within(tensor: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> None:
    excess = (tensor.double() - expected).abs() / allowed
    assert bool((excess <= 1).all()), f"{float(excess.max()):.3g} times the error that is allowed"


def values_of(peer: int) -> list[torch.Tensor]:
    """Tensors of these shapes, of which each number is at least 6 away from the other peer's."""
    generator = torch.Generator().manual_seed(peer)
    made = [torch.rand(shape, generator=generator) * 2 - 1 + 8 * peer for shape in SHAPES]
    made[CONSTANT].fill_(3 + 8 * peer)
    return made


@pytest.fixture
def dhts(memory_dht: RealTimeDHT, joining_memory_dht: RealTimeDHT) -> list[Any]:
    """Of peers without processes."""
    return [memory_dht, joining_memory_dht]


@pytest.fixture
def real_dhts(dht: DHT, joining_dht: DHT) -> list[DHT]:
    """Of peers whose averagers have processes."""
    return [dht, joining_dht]


@pytest.fixture
def averagers() -> Iterator[list[Any]]:
    """To be filled by the test; they are shut down after it."""
    made: list[Any] = []
    yield made
    for averager in made:
        averager.shutdown()


def meeting(prefix: str) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "target_group_size": 2,
        "min_matchmaking_time": 20.0,
        "request_timeout": 1.0,
        "next_chunk_timeout": 20.0,
        "start": True,
    }


def average_gradients(averagers: list[Any], dhts: list[Any], prefix: str, used: Sequence[Any]) -> list[Any]:
    """The averaged gradients of two peers, with the codec of each."""
    for peer, codec in enumerate(used):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        averager = GradientAverager(parameters, dht=dhts[peer], compression=codec, **meeting(prefix))
        averagers.append(averager)
        for parameter, value in zip(parameters, values_of(peer), strict=True):
            parameter.grad = value
        averager.accumulate_grads_(batch_size=WEIGHTS[peer])
    controls = [averager.step(wait=False, timeout=60) for averager in averagers]
    assert [len(control.result(60)) for control in controls] == [2, 2]
    found = []
    for averager in averagers:
        with averager.get_tensors() as tensors:
            found.append([tensor.clone() for tensor in tensors])
    return found


def check_gradients(found: list[Any], used: Sequence[Any]) -> list[bool]:
    """Check them, and tell for each tensor whether a codec has left its traces."""
    before, lossy = [values_of(peer) for peer in (0, 1)], []
    for index in range(len(SHAPES)):
        expected = Expected([peer[index] for peer in before], used, index, TensorRole.GRADIENT)
        after = [peer[index] for peer in found]
        expected.check(after)
        lossy.append(expected.is_lossy(after))
    return lossy


@EACH_CODEC
@pytest.mark.usefixtures("shared_out")
def test_gradients_are_averaged_within_what_the_codec_promises(
    dhts: list[Any], averagers: list[Any], run_id: str, name: str
) -> None:
    check_round(dhts, averagers, run_id, name)


@pytest.mark.usefixtures("shared_out")
def test_so_they_are_by_processes(real_dhts: list[DHT], averagers: list[Any], run_id: str) -> None:
    check_round(real_dhts, averagers, run_id, "per_tensor")


def check_round(dhts: list[Any], averagers: list[Any], run_id: str, name: str) -> None:
    used = [CODECS[name](), CODECS[name]()]
    lossy = check_gradients(average_gradients(averagers, dhts, run_id, used), used)
    assert lossy[:2] == [name != "none"] * 2, "the codec was not at work"
    # in blocks of 4096 it is a product of two numbers, and which of the peers makes it decides how that is rounded
    assert not lossy[CONSTANT] or name == "blockwise8bit"


@pytest.mark.parametrize(
    "names",
    [
        ("none", "uniform8bit"),
        ("quantile8bit", "none"),
        ("float16", "quantile8bit"),
        ("size_adaptive", "scaled_float16"),
        ("role_adaptive", "float16"),
        pytest.param(("blockwise8bit", "none"), marks=NEEDS_BITSANDBYTES),
    ],
    ids=" and ".join,
)
@pytest.mark.parametrize("is_shared_out", [False, True], ids=["all-gather", "shared out"])
def test_peers_with_different_codecs_agree(
    dhts: list[Any],
    averagers: list[Any],
    run_id: str,
    names: tuple[str, str],
    is_shared_out: bool,
    request: pytest.FixtureRequest,
) -> None:
    if is_shared_out:
        request.getfixturevalue("shared_out")
    used = [CODECS[name]() for name in names]
    check_gradients(average_gradients(averagers, dhts, run_id, used), used)


@pytest.mark.parametrize(
    "kind",
    [PowerSGDGradientAverager, own_factory(power_sgd_averager.PowerSGDGradientAverager)],
    ids=["ours", "settled"],
)
def test_power_sgd_is_exact_for_gradients_of_fewer_components_than_its_rank(
    dhts: list[Any], averagers: list[Any], run_id: str, kind: Any
) -> None:
    check_power_sgd(dhts, averagers, run_id, kind)


def test_so_it_is_by_processes_of_a_class_of_the_users_own(
    real_dhts: list[DHT], averagers: list[Any], run_id: str
) -> None:
    check_power_sgd(real_dhts, averagers, run_id, own_factory(power_sgd_averager.PowerSGDGradientAverager))


def check_power_sgd(dhts: list[Any], averagers: list[Any], run_id: str, kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)

    def product(components: int) -> torch.Tensor:
        left, right = (torch.randn(size, generator=generator) for size in ((300, components), (components, 200)))
        return left @ right

    parameters = [torch.nn.Parameter(torch.zeros(300, 200)) for _ in dhts]
    for parameter, dht in zip(parameters, dhts, strict=True):
        averagers.append(kind([parameter], averager_rank=32, dht=dht, **meeting(run_id)))
    for components in (0, 3, 16):  # of each peer; what was zero, or unused, has to come to life
        gradients = [product(components) for _ in dhts]
        for averager, parameter, gradient in zip(averagers, parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
            averager.accumulate_grads_(batch_size=1)
        controls = [averager.step(wait=False, timeout=60) for averager in averagers]
        assert [len(control.result(60)) for control in controls] == [2, 2]
        exact = (gradients[0] + gradients[1]).double() / 2
        for averager in averagers:
            averager.notify_used_averaged_gradients()
            with averager.get_tensors() as tensors:
                assert (tensors[0].double() - exact).norm() <= 1e-3 * exact.norm()


def test_columns_become_orthogonal_whatever_they_were() -> None:
    torch.manual_seed(1)
    basis = torch.randn(500, 3)
    for columns in (torch.zeros(500, 8), basis @ torch.randn(3, 8), torch.randn(500, 8) * 1e-20, torch.ones(500, 8)):
        span = torch.linalg.qr(columns.double() + 0.0).Q if columns.norm() > 0 else None
        orthonormalize_(columns)
        assert torch.allclose(columns.t() @ columns, torch.eye(8), atol=1e-5)
        if span is not None:
            first = span[:, :1]
            assert torch.allclose(columns.double() @ (columns.double().t() @ first), first, atol=1e-4)


class State:
    """The parameters of a peer and Adam's tensors for them, after some steps that leave the parameters alone."""

    def __init__(self, peer: int, steps: int):
        self.parameters = [torch.nn.Parameter(value) for value in values_of(peer)]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.0)
        for _ in range(steps):
            for parameter, value in zip(self.parameters, values_of(peer), strict=True):
                parameter.grad = value
            self.optimizer.step()

    def named(self) -> dict[Any, torch.Tensor]:
        """Copies of all tensors but the counts of steps, by the keys that hivemind gives them in a round."""
        found = {index: parameter.detach().clone() for index, parameter in enumerate(self.parameters)}
        for index, parameter in enumerate(self.parameters):
            found |= {(index, name): self.optimizer.state[parameter][name].clone() for name in STATISTICS}
        return found

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                for tensor in (parameter, *self.optimizer.state[parameter].values()):
                    tensor.fill_(-50)

    def counts(self) -> list[float]:
        return [float(self.optimizer.state[parameter]["step"]) for parameter in self.parameters]


def role_of(key: Any) -> TensorRole:
    return TensorRole.OPTIMIZER if isinstance(key, tuple) else TensorRole.PARAMETER


@pytest.mark.parametrize(
    "names",
    [
        *[
            pytest.param((name, name), id=name, marks=NEEDS_BITSANDBYTES if name == "blockwise8bit" else ())
            for name in CODECS
        ],
        pytest.param(("role_adaptive", "none"), id="role_adaptive and none"),
    ],
)
def test_state_is_averaged_and_then_downloaded_within_what_the_codec_promises(
    dhts: list[Any], averagers: list[Any], run_id: str, names: tuple[str, str], eventually: Callable[..., None]
) -> None:
    check_state(dhts, averagers, run_id, names, eventually)


def test_so_it_is_by_processes(
    real_dhts: list[DHT], averagers: list[Any], run_id: str, eventually: Callable[..., None]
) -> None:
    check_state(real_dhts, averagers, run_id, ("role_adaptive", "none"), eventually)


def check_state(
    dhts: list[Any], averagers: list[Any], run_id: str, names: tuple[str, str], eventually: Callable[..., None]
) -> None:
    used = [CODECS[name]() for name in names]
    states = [State(peer=0, steps=3), State(peer=1, steps=2)]
    for state, own, codec in zip(states, dhts, used, strict=True):
        kwargs = {"average_opt_statistics": STATISTICS, "compression": codec, "state_compression": codec}
        averagers.append(TrainingStateAverager(optimizer=state.optimizer, dht=own, **kwargs, **meeting(run_id)))

    before = [state.named() for state in states]
    for averager, weight in zip(averagers, WEIGHTS, strict=True):
        # a state counts for one at most
        options = {"weight": weight / max(WEIGHTS), "timeout": 60.0}
        averager.step(averaging_round=True, delay_averaging=True, averaging_opts=options)
    for averager in averagers:
        averager.step(wait_for_delayed_updates=True)
    after = [state.named() for state in states]
    lossy = False
    for key in before[0]:
        expected = Expected([named[key] for named in before], used, key, role_of(key))
        expected.check([named[key] for named in after])
        lossy |= expected.is_lossy([named[key] for named in after])
    assert lossy == (names[0] != "none"), "the codec was not at work"

    giver, joiner = averagers
    states[1].spoil()
    giver.local_epoch = 7
    eventually(lambda: joiner.load_state_from_peers(timeout=20.0) or joiner.local_epoch == 7)
    assert states[1].counts() == states[0].counts() == [3.0] * len(SHAPES)
    given, loaded = states[0].named(), states[1].named()
    for key, value in given.items():
        download_key = 3 * key[0] + STATISTICS.index(key[1]) if isinstance(key, tuple) else key
        allowed = promised(used[0], value.double(), download_key, role_of(key))
        assert_within(loaded[key], value.double(), allowed)
        assert torch.equal(given[key], after[0][key]), "a download changes its giver"
    assert torch.equal(given[0], loaded[0]) == (names[0] == "none"), "the codec was not at work"


def test_only_one_without_a_codec_sends_gradients_as_they_are(
    memory_dht: RealTimeDHT, make_averager: Callable[..., GradientAverager]
) -> None:
    averager = make_averager(memory_dht, compression=codecs.Float16Compression())
    assert not averager.sends_exactly
    averager.set_live(attributes={}, matchmaking={}, allreduce={"compression": codecs.NoCompression()})
    assert averager.sends_exactly
    ranked = make_averager(memory_dht, kind=PowerSGDGradientAverager, averager_rank=1)
    assert not ranked.sends_exactly
