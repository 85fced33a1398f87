"""Measures what it costs to let in only those who have a credential: the same swarm, private and open, in turns.

Each turn trains a swarm of peers that know a secret and one that is open, in changing order; its ratio is that of their
samples per second. Also what a single request between two peers takes, in microseconds.

    python tests/benchmarks/guard.py --turns 5 --json guard.json
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench_peer import Work
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.proto import averaging_pb2
from swarm_bench import course, machine, parser, say, table, write_json

from hivenb.engine.network.access.tokens import Secret, membership_of
from hivenb.engine.network.daemon import TiedP2P

STEP = 0.05


@dataclass(frozen=True)
class Turn:
    """Samples per second, and seconds of CPU time of all processes for each second.

    :param ratio: of the rates, with a secret over without one
    """

    open_rate: float
    private_rate: float
    open_cpu: float
    private_cpu: float
    ratio: float


class Echo(ServicerBase):
    async def rpc_echo(self, request: averaging_pb2.DownloadData, context: P2PContext) -> averaging_pb2.DownloadData:
        return request


def measure(number: int, peers: int, epoch: float, epochs: int) -> Turn:
    """A turn: which of both comes first changes from one to the next."""
    found = {}
    for is_private in sorted((False, True), reverse=bool(number % 2)):
        say(f"turn {number + 1}: {peers} peers, {'with a secret' if is_private else 'open'} ...")
        strategy = {"secret": Secret.random()} if is_private else {}
        work = Work(target=peers * round(epoch / STEP) * Work.batch, step=STEP, strategy=strategy)
        found[is_private] = course([work] * peers, epochs, patience=epoch + 35)
    rates = {is_private: one.figures.rate for is_private, one in found.items()}
    ratio = rates[True] / rates[False]
    say(f"turn {number + 1}: {ratio:.4f} times the rate with a secret")
    return Turn(rates[False], rates[True], found[False].cpu, found[True].cpu, ratio)


def microseconds(secret: Secret | None, calls: int) -> float:
    """The median time of a request of 1,000 bytes and its answer, through the daemons of two peers."""

    async def call() -> float:
        serving = await TiedP2P.create()
        serving.admit_only(membership_of(secret))
        calling = await TiedP2P.create(initial_peers=await serving.get_visible_maddrs())
        calling.admit_only(membership_of(secret))
        try:
            await Echo().add_p2p_handlers(serving)
            stub, request, took = Echo.get_stub(calling, serving.peer_id), averaging_pb2.DownloadData(), []
            request.metadata = b"x" * 1000
            for _ in range(calls):
                began = time.perf_counter()
                await stub.rpc_echo(request)
                took.append(time.perf_counter() - began)
        finally:
            await calling.shutdown()
            await serving.shutdown()
        return 1e6 * statistics.median(took)

    return asyncio.run(call())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, default=2)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--epoch", type=float, default=1.0, help="seconds of computing in an epoch")
    options.add_argument("--epochs", type=int, default=20, help="that count, after the start")
    options.add_argument("--calls", type=int, default=2000, help="requests of which the time is taken")
    given = options.parse_args(arguments)
    if given.quick:
        given.turns, given.epoch, given.epochs, given.calls = 1, 0.5, 3, 50
    print(machine())
    turns = [measure(number, given.peers, given.epoch, given.epochs) for number in range(given.turns)]
    heads = ["open, samples/s", "private, samples/s", "open, CPU s/s", "private, CPU s/s", "ratio"]
    lines = [
        [f"{rate:.1f}" for rate in (one.open_rate, one.private_rate)]
        + [f"{cpu:.2f}" for cpu in (one.open_cpu, one.private_cpu)]
        + [f"{one.ratio:.4f}"]
        for one in turns
    ]
    print(table(heads, lines))
    ratio = statistics.median(one.ratio for one in turns)
    print(f"with a secret, peers train at {ratio:.4f} times the rate of open ones (median of {len(turns)} turns)")
    request = {
        name: microseconds(secret, given.calls) for name, secret in (("open", None), ("private", Secret.random()))
    }
    print("a request, microseconds: " + ", ".join(f"{name} {took:.0f}" for name, took in request.items()))
    write_json(given.json, turns, ratio=ratio, request=request)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
