"""What each codec, and PowerSGD, costs and keeps: bytes per parameter, error of the average, speed; beside the theory.

    python tests/benchmarks/codecs.py [--parameters N] [--repeat N] [--json FILE] [--only NAME ...]

Two peers on this machine, each with a DHT and an averager in processes of their own, average one square matrix. The
one connection between them passes through a relay that counts what it forwards: all that a network would carry
above TCP, matchmaking and encryption included, and nothing that stays within a peer.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hivemind.compression import CompressionInfo, SizeAdaptiveCompression, deserialize_torch_tensor
from hivemind.utils.math import orthogonalize_

from hivenb import compression
from hivenb.engine.averaging.gradient_averager import GradientAverager, PowerSGDGradientAverager
from hivenb.engine.exchange import codecs
from hivenb.engine.network.dht import DHT

RANKS = (4, 32)
NAMES = (*compression.CODECS, *(f"power_sgd_{rank}" for rank in RANKS))
#: Numbers in a part, in which an averager encodes a tensor.
PART = 2**17
#: Rank of each peer's matrix of few components, so that the average of two has at most the smaller of RANKS.
FEW = min(RANKS) // 2
LOCAL: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}


@dataclass(frozen=True)
class Row:
    """One line of the table. Bytes are those that each of the two peers sends, for each parameter of the matrix.

    :param theory: bytes by the format's arithmetic
    :param serialized: bytes of the messages that hold the tensors
    :param wire: bytes counted between the peers during a round
    :param error: of the average of independent normal numbers, relative to its norm
    :param error_few: the same for the product of thin matrices, which has few components
    :param encode: MB of float32 per second
    :param decode: likewise
    """

    name: str
    theory: float
    serialized: float
    wire: float
    error: float
    error_few: float
    encode: float
    decode: float


class Relay:
    """Forwards TCP connections to a port of this machine and counts the bytes, both ways together."""

    def __init__(self, port: int):
        self._port = port
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def count(self) -> int:
        with self._lock:
            return self._count

    def close(self) -> None:
        for opened in (self._listener, *self._sockets):
            opened.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                target.sendall(data)
                with self._lock:
                    self._count += len(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # an end was closed
            return


class TwoPeers:
    """Two DHTs whose only connection is through a relay."""

    def __init__(self) -> None:
        first = DHT(start=True, **LOCAL)
        address, port, peer_id = str(first.get_visible_maddrs()[0]), "/tcp/", "/p2p/"
        head, _, tail = address.partition(port)
        number, _, identity = tail.partition(peer_id)
        self.relay = Relay(int(number))
        second = DHT(start=True, initial_peers=[f"{head}{port}{self.relay.port}{peer_id}{identity}"], **LOCAL)
        self._dhts = [first, second]
        self._runs = 0

    def __enter__(self) -> TwoPeers:
        return self

    def __exit__(self, *_: object) -> None:
        for dht in reversed(self._dhts):
            dht.shutdown()
        self.relay.close()

    def rounds(
        self, make: Callable[..., Any], gradients: Sequence[torch.Tensor], repeat: int
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Average these gradients, one of each peer, again and again.

        :returns: what both hold after the first round, and the bytes that passed in each one
        """
        self._runs += 1
        parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        averagers: list[Any] = []
        held: list[torch.Tensor] = []
        passed = []
        try:
            for parameter, dht in zip(parameters, self._dhts, strict=True):
                kwargs = {"target_group_size": 2, "min_matchmaking_time": 30.0, "request_timeout": 3.0}
                averagers.append(make([parameter], dht=dht, prefix=f"run-{self._runs}", start=True, **kwargs))
            for _ in range(repeat):
                for averager, parameter, gradient in zip(averagers, parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                    averager.accumulate_grads_(batch_size=1)
                before = self.relay.count
                controls = [averager.step(wait=False, timeout=120) for averager in averagers]
                if any(len(control.result(120)) != 2 for control in controls):
                    raise RuntimeError("The two peers did not meet")
                passed.append(self.relay.count - before)
                for averager in averagers:
                    averager.notify_used_averaged_gradients()
                    if len(held) < 2:
                        with averager.get_tensors() as tensors:
                            held.append(tensors[0].clone())
        finally:
            for averager in averagers:
                averager.shutdown()
        return held, passed


class Codec:
    """A named codec, as the averager uses it: part by part."""

    def __init__(self, name: str):
        self.make: Any = lambda *args, **kwargs: GradientAverager(*args, compression=self._codec, **kwargs)
        self._codec = compression.codec(name)

    def theory(self, shape: tuple[int, int]) -> float:
        size, used = math.prod(shape), self._codec
        if isinstance(used, SizeAdaptiveCompression):
            used = used.greater_equal if size >= used.threshold else used.less
        # for each part, and for each number; an 8-bit one comes with its table of 256 numbers and a count of them
        for_a_part, for_a_number = {
            "NoCompression": (0, 4.0),
            "Float16Compression": (0, 2.0),
            "ScaledFloat16Compression": (8, 2.0),  # mean and deviation
            "Uniform8BitQuantization": (8 + 4 * 256, 1.0),
            "Quantile8BitQuantization": (8 + 4 * 256, 1.0),
            "BlockwiseQuantization": (16 + 4 * 256, 1.0 + 4 / 4096),  # and a scale for each block
        }[type(used).__name__]
        return for_a_number + for_a_part * math.ceil(size / PART) / size

    def encode(self, tensor: torch.Tensor) -> list[Any]:
        info = CompressionInfo.from_tensor(tensor, key=0)
        return [self._codec.compress(part, info) for part in tensor.view(-1).split(PART)]

    def decode(self, messages: list[Any]) -> None:
        for message in messages:
            deserialize_torch_tensor(message)


class PowerSGD:
    """A matrix as the product of two thin ones, which are what is averaged."""

    def __init__(self, rank: int):
        self._rank = rank
        self.make: Any = lambda *args, **kwargs: PowerSGDGradientAverager(
            *args, averager_rank=rank, min_compression_ratio=0.0, **kwargs
        )

    def theory(self, shape: tuple[int, int]) -> float:
        return 4 * self._rank * sum(shape) / math.prod(shape)

    def encode(self, tensor: torch.Tensor) -> list[Any]:
        columns = tensor @ torch.rand(tensor.shape[1], self._rank)
        orthogonalize_(columns)
        plain = compression.NoCompression()
        factors = (columns, tensor.t() @ columns)
        return [plain.compress(factor, CompressionInfo.from_tensor(factor, key=0)) for factor in factors]

    def decode(self, messages: list[Any]) -> None:
        columns, rows = map(deserialize_torch_tensor, messages)
        torch.matmul(columns, rows.t())


def matrices(side: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each of two peers a matrix of independent normal numbers, and one of few components."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [normal(side, side) for _ in range(2)], [normal(side, FEW) @ normal(FEW, side) for _ in range(2)]


def relative_error(held: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> float:
    """Of the peer that is further from the exact average."""
    exact = (gradients[0].double() + gradients[1].double()) / 2
    return max(float((tensor.double() - exact).norm() / exact.norm()) for tensor in held)


def megabytes_per_second(tensor: torch.Tensor, work: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return tensor.numel() * 4 / 1e6 / statistics.median(seconds[1:])  # the first one warms up


def measure(name: str, peers: TwoPeers, side: int, repeat: int) -> Row:
    codec: Any = PowerSGD(int(name.rpartition("_")[2])) if name.startswith("power_sgd") else Codec(name)
    random, few = matrices(side)
    held, passed = peers.rounds(codec.make, random, repeat)
    held_few, _ = peers.rounds(codec.make, few, 1)
    messages = codec.encode(random[0])
    serialized = sum(len(message.SerializeToString()) for message in messages)
    wire = statistics.median(passed) / 2
    if wire < 0.9 * serialized:
        raise RuntimeError(f"Only {wire:.0f} of at least {serialized} bytes have passed through the relay")
    return Row(
        name,
        theory=codec.theory((side, side)),
        serialized=serialized / side**2,
        wire=wire / side**2,
        error=relative_error(held, random),
        error_few=relative_error(held_few, few),
        encode=megabytes_per_second(random[0], lambda: codec.encode(random[0]), repeat),
        decode=megabytes_per_second(random[0], lambda: codec.decode(messages), repeat),
    )


def run(names: Sequence[str], parameters: int, repeat: int) -> tuple[list[Row], float]:
    """The table, and the bytes that a peer sends in a round besides the tensors, to meet and to agree."""
    torch.set_num_threads(1)
    torch.manual_seed(1)  # PowerSGD begins with random columns, and hardly ever misses a component by them
    side = math.isqrt(parameters)
    with TwoPeers() as peers:
        _, passed = peers.rounds(GradientAverager, [torch.zeros(1), torch.ones(1)], repeat)
        return [measure(name, peers, side, repeat) for name in names], statistics.median(passed) / 2


def table(rows: Sequence[Row], besides: float) -> str:
    """The rows as text; ratios are to the four bytes of a float32."""
    head = (
        f"{'codec':16}{'theory':>9}{'message':>9}{'wire':>9}{'wire/theory':>13}{'less':>8}"
        f"{'error':>10}{'few comp.':>11}{'encode':>10}{'decode':>10}"
    )
    units = f"{'':16}{'bytes per parameter':>27}{'':13}{'times':>8}{'relative':>21}{'MB/s of float32':>20}"
    lines = [head, units, "-" * len(head)]
    for row in rows:
        lines.append(
            f"{row.name:16}{row.theory:9.4f}{row.serialized:9.4f}{row.wire:9.4f}{row.wire / row.theory:13.3f}"
            f"{4 / row.wire:8.2f}{row.error:10.1e}{row.error_few:11.1e}{row.encode:10.0f}{row.decode:10.0f}"
        )
    lines.append(f"In each round, a peer sends {besides / 1000:.1f} kB besides; they are in the column 'wire'.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    available = [n for n in NAMES if n not in compression.CODECS or compression.missing_package(n) is None]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=2**22, help="numbers in the matrix, rounded to a square")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of which the median counts")
    parser.add_argument("--json", type=Path, help="a file to write the rows to")
    parser.add_argument("--only", nargs="+", choices=available, default=available, metavar="NAME")
    options = parser.parse_args(arguments)
    codecs.install()  # as in each averager's process, which decodes what is measured here
    rows, besides = run(options.only, options.parameters, options.repeat)
    print(f"{math.isqrt(options.parameters) ** 2:,} parameters, median of {options.repeat}, one thread")
    print(table(rows, besides))
    for name in [name for name in NAMES if name not in available]:
        print(f"{name}: needs {compression.CODECS[name].package}, which is not installed")
    if options.json:
        content = {"besides": besides, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
