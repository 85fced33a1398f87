"""Measures a round of averaging against moving its bytes over loopback TCP, and through hivemind's own daemons.

Each peer is a process, the group has met, and the time counts from the moment when all are told to average until the
last one holds the average. Then as many processes hand as many bytes as each peer has to send to their neighbours,
all at once: over sockets, and in the streams through ``p2pd`` in which hivemind averages, of whose messages half are
answers. A row says what a million parameters take: the same in all rows of a codec if time is linear in them.

    python tests/benchmarks/allreduce.py --json allreduce.json
    python tests/benchmarks/allreduce.py --full          # 100 million parameters, too
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_peer import PATIENCE, Weights, Work, begin
from hivemind.averaging.control import AveragingStage
from hivemind.p2p import P2P, PeerID
from hivemind.proto.averaging_pb2 import AveragingData
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils import get_dht_time
from hivemind.utils.asyncio import switch_to_uvloop
from swarm_bench import Peer, Target, cpu_seconds, machine, parser, say, starting, table, write_json

from hivenb import compression
from hivenb.engine.averaging.gradient_averager import GradientAverager
from hivenb.engine.network.dht import DHT

CODECS = [name for name in compression.CODECS if compression.missing_package(name) is None]
SIZES, HUGE = [1_000_000, 10_000_000], 100_000_000
#: Peers of a model of that size which the memory of a small machine still holds.
MOST_OF_HUGE = 4
CHUNK = 2**20
#: Bytes in a message of hivemind's averaging: ``DEFAULT_PART_SIZE_BYTES`` of ``hivemind/averaging/partition.py``.
PART = 2**19
#: The value that peers average to is 1; a codec may be off by so much.
TOLERANCE = 0.05


def averaging(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Average when told to; the orders are the values to average, and ``go`` when all have met."""
    begin(folder, work.place)
    dht = DHT(initial_peers=list(initial_peers) or None, start=True, **work.network)
    connection.send(("addresses", [str(address) for address in dht.get_visible_maddrs()]))
    parameters = list(Weights(work.parameters, 0).parameters())
    averager = GradientAverager(
        parameters,
        dht=dht,
        prefix="allreduce",
        compression=compression.codec(work.strategy["codec"]),
        target_group_size=count,
        min_matchmaking_time=30.0,
        request_timeout=3.0,
        start=True,
    )
    connection.send(("ready", None))
    number = 0
    while (value := connection.recv()) != "stop":
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        averager.accumulate_grads_(batch_size=work.batch)
        # the number lets the others know it for a peer of ours, to whom streams are left open until it closes them
        control = averager.schedule_step(scheduled_time=get_dht_time(), gather=number, timeout=PATIENCE)
        while control.stage is not AveragingStage.AWAITING_TRIGGER and not control.done():
            time.sleep(0.002)
        connection.send((f"met {number}", None))
        connection.recv()
        began = time.perf_counter()
        averager.step(control=control, wait=False)
        group = control.result(PATIENCE)
        took = time.perf_counter() - began
        with averager.get_tensors() as tensors:
            error = max(float((tensor - 1).abs().max()) for tensor in tensors)
        connection.send((f"round {number}", (took, len(group), error)))
        number += 1
    averager.shutdown()
    dht.shutdown()
    connection.send(("left", None))


def moving(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Send so many bytes to one neighbour, and receive as many from the other, when told to."""
    begin(folder, work.place)
    listener = socket.create_server((work.address, 0))
    connection.send(("address", listener.getsockname()))
    far = socket.create_connection(connection.recv())
    near, _ = listener.accept()
    chunk, into = bytes(CHUNK), bytearray(CHUNK)
    connection.send(("ready", None))
    number = 0
    while (size := connection.recv()) != "stop":

        def send(left: int = size) -> None:
            while left > 0:
                far.sendall(chunk[: min(left, CHUNK)])
                left -= CHUNK

        began = time.perf_counter()
        sender = threading.Thread(target=send)
        sender.start()
        left = size
        while left > 0:
            left -= near.recv_into(into, min(left, CHUNK))
        sender.join()
        connection.send((f"moved {number}", time.perf_counter() - began))
        number += 1
    connection.send(("left", None))


def streaming(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Stream half of so many bytes to one neighbour's daemon and get them back, answering the other one likewise."""
    begin(folder)
    switch_to_uvloop().run_until_complete(_stream(connection, initial_peers))


async def _stream(connection: Any, initial_peers: Sequence[str]) -> None:
    async def echo(messages: AsyncIterator[AveragingData], context: Any) -> AsyncIterator[AveragingData]:
        async for message in messages:
            yield message

    async def parts(size: int) -> AsyncIterator[AveragingData]:
        for start in range(0, size, PART):
            yield AveragingData(tensor_part=Tensor(buffer=bytes(min(PART, size - start))))

    p2p = await P2P.create(initial_peers=list(initial_peers), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    await p2p.add_protobuf_handler("echo", echo, AveragingData, stream_input=True, stream_output=True)
    connection.send(("addresses", [str(address) for address in await p2p.get_visible_maddrs()]))
    connection.send(("id", p2p.peer_id.to_base58()))
    receive = asyncio.get_running_loop().run_in_executor
    neighbour = PeerID.from_base58(await receive(None, connection.recv))
    connection.send(("ready", None))
    number = 0
    while (size := await receive(None, connection.recv)) != "stop":
        began = time.perf_counter()
        answers = await p2p.iterate_protobuf_handler(neighbour, "echo", parts(size // 2), AveragingData)
        async for _ in answers:
            pass
        connection.send((f"moved {number}", time.perf_counter() - began))
        number += 1
    await p2p.shutdown()


@dataclass(frozen=True)
class Row:
    """Rounds of one group.

    :param megabytes: that each peer sends
    :param rounds: seconds of each round, of the slowest peer
    :param tcp: seconds of each time that those bytes were moved, likewise
    :param daemons: likewise, through hivemind's daemons
    :param cpu: seconds of CPU time of a round, of all peers together
    :param error: of the average of numbers around 1, the largest
    """

    peers: int
    parameters: int
    codec: str
    megabytes: float
    rounds: list[float]
    tcp: list[float]
    daemons: list[float]
    cpu: float
    error: float


def measure(count: int, parameters: int, codec: str, repeat: int) -> Row:
    work = Work(1, parameters=parameters, strategy={"codec": codec})
    # in hivemind's butterfly each peer sends a share of its tensors to each other one, and gets the average back
    size = round(2 * (count - 1) / count * parameters * compression.CODECS[codec].bytes_per_parameter)
    with starting() as start:
        peers = [start(work, target=averaging, count=count)]
        peers += [start(work, peers, averaging, count) for _ in range(count - 1)]
        rounds, used, error = average(peers, repeat)
    tcp, daemons = (move([Work(1)] * count, size, repeat, *means) for means in ((moving, "address"), (streaming, "id")))
    return Row(count, parameters, codec, size / 1e6, rounds, tcp, daemons, used, error)


def average(peers: Sequence[Peer], repeat: int) -> tuple[list[float], float, float]:
    """Let peers average so many times, and once before.

    :returns: seconds of each round, of the slowest peer; seconds of CPU time of a round, of all; the largest error
    :raises RuntimeError: if a group was not complete, or its average is off by too much
    """
    count = len(peers)
    _all_say(peers, "ready")
    rounds, used, error = [], 0.0, 0.0
    for number in range(repeat + 1):
        for index, peer in enumerate(peers):
            peer.tell(2 * index / (count - 1))  # from 0 to 2, 1 on average
        _all_say(peers, f"met {number}")
        before = cpu_seconds(peers)
        for peer in peers:
            peer.tell("go")
        outcomes = _all_say(peers, f"round {number}")
        if any(group != count for _, group, _ in outcomes):
            raise RuntimeError(f"Groups of {[group for _, group, _ in outcomes]} instead of {count}")
        error = max(*(off for _, _, off in outcomes), error)
        if error > TOLERANCE:
            raise RuntimeError(f"Peers hold averages that are off by {error}")
        if number > 0:  # the first one warms up
            used += cpu_seconds(peers) - before
            rounds.append(max(took for took, _, _ in outcomes))
    return rounds, used / repeat, error


def move(works: Sequence[Work], size: int, repeat: int, means: Target, name: str) -> list[float]:
    """Seconds until as many processes have each sent that many bytes to the next one, all at once.

    :param works: says where each of them is
    :param means: what they run
    :param name: what they call that by which the others reach them
    """
    with starting() as start:
        peers: list[Peer] = []
        for work in works:
            peers.append(start(work, peers if means is streaming else (), target=means))
        names = _all_say(peers, name)
        for peer, of_next in zip(peers, [*names[1:], names[0]], strict=True):
            peer.tell(of_next)
        _all_say(peers, "ready")
        seconds = []
        for number in range(repeat + 1):
            for peer in peers:
                peer.tell(size)
            seconds.append(max(_all_say(peers, f"moved {number}")))
    return seconds[1:]


def _all_say(peers: Sequence[Peer], kind: str) -> list[Any]:
    return [peer.wait_for(kind) for peer in peers]


def cases(counts: Sequence[int], sizes: Sequence[int], codecs: Sequence[str]) -> list[tuple[int, int, str]]:
    """All sizes with all numbers of peers, but codecs other than the first one with the fewest peers only."""
    found = [(count, size, codecs[0]) for count in counts for size in sizes if size < HUGE or count <= MOST_OF_HUGE]
    return [*found, *((min(counts), size, codec) for codec in codecs[1:] for size in sizes)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--parameters", type=int, nargs="+", default=SIZES)
    options.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS, metavar="NAME")
    options.add_argument("--repeat", type=int, default=5, help="rounds of which the median counts")
    options.add_argument(
        "--full", action="store_true", help=f"also {HUGE:,} parameters, with {MOST_OF_HUGE} peers at most"
    )
    given = options.parse_args(arguments)
    if given.full:
        given.parameters = [*given.parameters, HUGE]
    if given.quick:
        given.peers, given.parameters, given.codecs, given.repeat = [2], [100_000], ["none", "float16"], 2
    print(machine())
    rows = []
    for count, parameters, codec in cases(given.peers, given.parameters, given.codecs):
        say(f"{count} peers, {parameters:,} parameters, {codec} ...")
        rows.append(measure(count, parameters, codec, given.repeat))
    heads = [
        "peers",
        "parameters",
        "codec",
        "MB sent by each",
        "round, s",
        "TCP, s",
        "times",
        "daemons, s",
        "times",
        "s for a million",
        "CPU, s",
    ]
    cells = [
        [
            row.peers,
            row.parameters,
            row.codec,
            f"{row.megabytes:.1f}",
            f"{(took := statistics.median(row.rounds)):.3f}",
            f"{(moved := statistics.median(row.tcp)):.4f}",
            f"{took / moved:.1f}",
            f"{(streamed := statistics.median(row.daemons)):.3f}",
            f"{took / streamed:.1f}",
            f"{1e6 * took / row.parameters:.4f}",
            f"{row.cpu:.2f}",
        ]
        for row in rows
    ]
    print(table(heads, cells))
    write_json(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
