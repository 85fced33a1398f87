"""Measures how soon peers come to a loss: synchronously, by gradients that come late, and with compensation for that.

Peers in processes of their own train the digits or the text from the same start, each with an order of its own, over
the loopback interface or lines of the simulated internet (``tests/network``; needs root, and says so). Each epoch has
``--epoch`` seconds of computing: a batch is computed in earnest, and waits until its share of them is over, so that two
cores do for four peers. Looking at the loss takes no time of the training: whenever the optimizer has made a step, or
an average has come, the parameters are copied, and they are judged when training is over. What is judged is what the
optimizer has made, never a step of the peer's own that is taken back later. All are told to make as many updates, and
wait for the last one: samples and updates at the end are the same.

With ``--round-share``, computing takes as long as is needed for a round to take that share of it, which some epochs of
synchronous training tell first.

    python tests/benchmarks/time_to_loss.py --json time_to_loss.json         # digits, 2 peers, two lines, one seed
    python tests/benchmarks/time_to_loss.py --task text --peers 4 --line 300ms --mode synchronous compensated --seed 0 1
    python tests/benchmarks/time_to_loss.py --line 100ms --round-share 0.2 0.6 0.9
    python tests/benchmarks/time_to_loss.py --rows a.json b.json             # the table of what was measured before
    python tests/benchmarks/time_to_loss.py --outer --updates 30             # an outer optimizer, over 10 Mbit/s
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outer_line
import torch
from bench_peer import PATIENCE, QUIET, Work, begin
from lightning import Callback, LightningModule, Trainer
from overlap import DELAYS
from places import Line, places, why_not
from swarm_bench import Peer, machine, parser, say, starting, table, write_json

from hivenb import HivemindStrategy, compression, tasks
from hivenb.engine.optimizer.scheduled_rounds import EpochReport

#: Of each host, by how long it takes there and back between two, which are two lines apart, and by their rate.
LINES: dict[str, Line | None] = {
    "loopback": None,
    "20ms": Line(delay=0.005, jitter=0.001, up=100e6, down=100e6),
    "100ms": Line(delay=0.025, jitter=0.002, up=50e6, down=50e6),
    "300ms": Line(delay=0.075, jitter=0.004, up=10e6, down=10e6),
    "1Mbit": Line(delay=0.025, jitter=0.002, up=1e6, down=1e6),
}

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "step": {**DELAYS, "delay_grad_averaging": False},
    "delayed": {**DELAYS, "delay_compensation": False},
    "compensated": {**DELAYS, "delay_compensation": True},
}


@dataclass(frozen=True)
class Subject:
    """What is learned: some 30,000 parameters each.

    :param make: one of :mod:`hivenb.tasks`
    :param sizes: its arguments
    :param target: samples of all peers in an epoch
    :param batch: samples in one
    :param goal: a loss, to which it is told how long it takes
    """

    make: Callable[..., tasks.Task]
    sizes: dict[str, Any]
    target: int
    batch: int
    goal: float

    def task(self, seed: int, **sizes: Any) -> tasks.Task:
        return self.make(**{**self.sizes, **sizes}, batch_size=self.batch, seed=seed)


SUBJECTS = {
    "digits": Subject(tasks.digits, {"hidden": 16, "blocks": 1, "learning_rate": 3e-3}, 1024, 32, 0.3),
    "text": Subject(tasks.text, {"width": 32, "layers": 2, "learning_rate": 5e-3}, 512, 16, 3.0),
}

#: Batches of the validation data that are looked at, and the states of a run: its newest after each batch.
LOOKED_AT = 16

#: Seconds of computing in the epochs that tell how long a round takes, and how many there are; the first do not count.
TRIAL, TRIALS, FIRST = 1.0, 8, 3


@dataclass(frozen=True)
class Case:
    """A swarm that learns.

    :param epoch: seconds of computing in an epoch
    :param updates: of the swarm
    :param round_share: of the computing, that a round was to take; ``None`` where the epoch was given
    :param learning_rate: ``None`` for that of the subject
    """

    task: str
    peers: int
    line: str
    mode: str
    seed: int
    epoch: float
    updates: int
    round_share: float | None = None
    learning_rate: float | None = None

    @property
    def rate(self) -> dict[str, float]:
        """The argument that tells a task at which rate to learn; none where it is the subject's own."""
        return {} if self.learning_rate is None else {"learning_rate": self.learning_rate}

    @property
    def pace(self) -> float:
        """Seconds of a batch."""
        subject = SUBJECTS[self.task]
        return self.epoch * self.peers * subject.batch / subject.target


@dataclass(frozen=True)
class Look:
    """At what the optimizer has made.

    :param seconds: of training until a batch ended after which the model has that
    :param epoch: of the swarm at that moment
    :param loss: of validation
    :param accuracy: of validation, a share
    """

    seconds: float
    epoch: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Told:
    """What one peer tells at its end.

    :param looks: none but by the first one
    :param reports: of each epoch
    :param rounds: seconds from the last gradient of an epoch until the model has the step with its average
    :param steps: that its optimizer has made; an epoch whose round was missed has none
    """

    looks: list[Look]
    reports: list[EpochReport]
    rounds: list[float]
    steps: int


@dataclass(frozen=True)
class Row:
    """What a swarm has come to.

    :param looks: at the first peer
    :param samples: of all peers
    :param stalled: share of the time for which the first peer stood still
    :param round_seconds: from an epoch's last gradient until the model has the step with its average, the median
    :param steps: that the first peer's optimizer has made
    :param group_size: mean
    :param failed: rounds
    :param load: of the machine, when the row began
    """

    case: Case
    looks: list[Look]
    samples: int
    stalled: float
    round_seconds: float
    steps: int
    group_size: float
    failed: int
    load: float

    @property
    def last(self) -> Look:
        return self.looks[-1]

    def seconds_to(self, loss: float) -> float | None:
        """When the validation was as good for the first time; ``None`` if it never was."""
        return next((look.seconds for look in self.looks if look.loss <= loss), None)


# -- a peer -----------------------------------------------------------------------------------------------------------


class Follows(Callback):
    """Waits for the others, lets each batch take its time, and keeps what the optimizer makes until training ends.

    :param line_up: tells that this peer sees all others, and returns when all do: whoever began before would have ended
      a short epoch, alone, by the time that the last one begins
    """

    def __init__(self, strategy: HivemindStrategy, case: Case, line_up: Callable[[], object]):
        self._strategy, self._case, self._line_up = strategy, case, line_up
        self._began, self._batch_began, self._computed = 0.0, 0.0, 0.0
        self._epoch, self._ended = 0, list[float]()
        self._waits_for_step = not MODES[case.mode].get("delay_optimizer_step", False)
        self.steps = 0
        self.kept: list[tuple[float, int, list[torch.Tensor]]] = []
        self.reports: list[EpochReport] = []
        self.rounds: list[float] = []
        strategy.on_epoch = self.reports.append

    def on_train_batch_start(self, trainer: Trainer, model: LightningModule, batch: Any, batch_idx: int) -> None:
        end = time.monotonic() + PATIENCE
        while not self._began and self._strategy.num_peers < self._case.peers:
            if time.monotonic() > end:
                raise TimeoutError(f"saw {self._strategy.num_peers} of {self._case.peers} peers within {PATIENCE} s")
            time.sleep(0.02)
        if not self._began:
            self._line_up()
            self._began = time.monotonic()
            self._keep(model)
        self._batch_began = time.monotonic()

    def on_after_backward(self, trainer: Trainer, model: LightningModule) -> None:
        time.sleep(max(0.0, self._case.pace - (time.monotonic() - self._batch_began)))
        self._computed = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, model: Any, *args: Any) -> None:
        epoch, optimizer = self._strategy.hivemind_epoch, self._strategy.optimizers[0]
        before = list(self._ended)
        if epoch > self._epoch:
            self._epoch = epoch
            self._ended.append(self._computed)
        if epoch >= self._case.updates:
            optimizer.finish_delayed_updates()  # the last step comes late, too
            trainer.should_stop = True
        if self._keep(model) and (steps := steps_of(optimizer)) > self.steps:
            self.steps = steps
            # one of the background comes after its epoch has ended, unless it is waited for, as the last one is
            if (ended := self._ended if self._waits_for_step else before) and not trainer.should_stop:
                self.rounds.append(time.monotonic() - ended[-1])

    def _keep(self, model: LightningModule) -> bool:
        """Copy what the optimizer has made, if it is new."""
        behind = self._strategy.optimizers[0].values_behind()
        values = [behind.get(one, one).detach().clone() for one in model.parameters()]
        if self.kept and all(map(torch.equal, values, self.kept[-1][2])):
            return False
        self.kept.append((time.monotonic() - self._began, self._strategy.hivemind_epoch, values))
        return True


def steps_of(optimizer: Any) -> int:
    """How many the optimizer has made, in the background or not: as AdamW counts them."""
    states = optimizer.state_averager.optimizer.state.values()
    return max((int(state["step"]) for state in states), default=0)


@torch.no_grad()
def looks_of(kept: Sequence[tuple[float, int, list[torch.Tensor]]], task: tasks.Task) -> list[Look]:
    model: Any = task.model.eval()
    batches = [batch for batch, _ in zip(task.validation or (), range(LOOKED_AT), strict=False)]
    found = []
    for seconds, epoch, values in kept:
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
        judged = [model.predict_and_target(batch) for batch in batches]
        scores, targets = (torch.cat(ones) for ones in zip(*judged, strict=True))
        loss = torch.nn.functional.cross_entropy(scores, targets)
        right = (scores.argmax(dim=1) == targets).float().mean()
        found.append(Look(seconds, epoch, float(loss), float(right)))
    return found


def learning(connection: Any, initial_peers: Sequence[str], work: Work, count: int, folder: str) -> None:
    """Train for so many updates, wait for the others, and tell.

    :param work: with the case as ``case`` among the strategy's arguments
    :param count: the number of this peer, from which the order of its batches follows
    """
    begin(folder, work.place)
    warnings.simplefilter("ignore")  # of each peer the same, on options that are to be compared
    options = dict(work.strategy)
    case: Case = options.pop("case")
    subject, half = SUBJECTS[case.task], compression.codec("float16")
    strategy = HivemindStrategy(
        target_batch_size=subject.target,
        initial_peers=list(initial_peers) or None,
        averaging_timeout=PATIENCE,
        grad_compression=half,
        state_averaging_compression=half,
        **work.network,
        **options,
    )
    connection.send(("addresses", [str(address) for address in strategy.dht.get_visible_maddrs()]))
    task = subject.task(case.seed, **case.rate)
    task.train.generator.manual_seed(100 * case.seed + count)

    def line_up() -> None:
        connection.send(("lined up", None))
        connection.recv()

    follows = Follows(strategy, case, line_up)
    # the order of the data stays as it was made here, so that it is the same in each mode
    trainer = Trainer(strategy=strategy, max_epochs=-1, callbacks=[follows], use_distributed_sampler=False, **QUIET)
    trainer.fit(task.model, task.train)
    connection.send(("trained", None))
    looks = looks_of(follows.kept, subject.task(case.seed)) if count == 1 else []
    connection.send(("told", Told(looks, follows.reports, follows.rounds, follows.steps)))


# -- a swarm ----------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Row:
    load = os.getloadavg()[0]
    line = LINES[case.line]
    found: Any = nullcontext((None, [None] * case.peers)) if line is None else places([line] * case.peers)
    work = Work(1, strategy={"case": case, **MODES[case.mode]})
    with found as (_, hosts), starting() as start:
        peers: list[Peer] = []
        for number, place in enumerate(hosts, start=1):
            peers.append(start(work.at(place), peers, learning, number))
            peers[-1].wait_for("addresses")
        for peer in peers:
            peer.wait_for("lined up")
        for peer in peers:
            peer.tell("begin")
        patience = PATIENCE + case.updates * (case.epoch + 15)
        for peer in peers:
            peer.wait_until(lambda peer=peer: "told" in peer.said, "its end", patience)
        told: list[Told] = [peer.said["told"] for peer in peers]
    first = told[0]
    reports = [one for each in told for one in each.reports]
    for number, each in enumerate(told, start=1):
        for one in each.reports:
            if one.failed is not None:
                say(f"    peer {number}, before epoch {one.epoch}: {one.failed}")
    rounds = [one for one in reports if one.epoch > 1]  # with gradients in the background, each tells of the one before
    return Row(
        case,
        first.looks,
        samples=sum(one.samples for one in reports),
        stalled=sum(one.seconds for one in first.reports) / first.looks[-1].seconds,
        round_seconds=statistics.median(first.rounds[1:]),  # the first peers have only just met
        steps=first.steps,
        group_size=statistics.mean(one.group_size for one in rounds),
        failed=sum(one.failed is not None for one in reports),
        load=load,
    )


def round_of(task: str, peers: int, line: str) -> float:
    """Seconds that the end of an epoch takes, synchronously: gradients, step and parameters, one after the other."""
    row = measure(Case(task, peers, line, "synchronous", 0, TRIAL, TRIALS))
    return row.round_seconds


# -- all of it --------------------------------------------------------------------------------------------------------


def print_rows(rows: Sequence[Row]) -> None:
    """A line for each mode: the means of its seeds."""
    heads = ["", "peers", "line", "epoch, s", "", "round / epoch", "stalled", "seconds to", "times sooner", "loss"]
    cells = []
    for ones in _alike(rows):
        case = ones[0].case
        goal = SUBJECTS[case.task].goal
        times = [row.seconds_to(goal) for row in ones]
        beside = [_synchronous_beside(row, rows) for row in ones]
        pairs = [
            (row, other) for row, other in zip(ones, beside, strict=True) if other and row.seconds_to(goal) is not None
        ]
        sooner = [
            float(other.seconds_to(goal) or float("nan")) / float(row.seconds_to(goal) or float("nan"))
            for row, other in pairs
        ]
        losses = [row.last.loss / other.last.loss for row, other in zip(ones, beside, strict=True) if other]
        cells.append(
            [
                case.task,
                case.peers,
                case.line,
                f"{case.epoch:.2f}",
                case.mode,
                f"{statistics.mean(row.round_seconds for row in ones) / case.epoch:.2f}",
                f"{statistics.mean(row.stalled for row in ones):.2f}",
                f"{goal:g}: " + ", ".join("never" if one is None else f"{one:.0f}" for one in times),
                f"{statistics.mean(sooner):.2f}" if sooner else "",
                f"{statistics.mean(row.last.loss for row in ones):.4f}",
                f"{statistics.mean(losses):.3f}" if losses else "",
                f"{statistics.mean(row.last.accuracy for row in ones):.4f}",
                f"{statistics.mean(row.samples for row in ones):,.0f}",
                f"{statistics.mean(row.steps for row in ones):.1f} of {case.updates}",
                f"{statistics.mean(row.last.seconds for row in ones):.0f}",
                f"{statistics.mean(row.group_size for row in ones):.2f}",
                sum(row.failed for row in ones),
                ", ".join(str(row.case.seed) for row in ones),
                f"{max(row.load for row in ones):.1f}",
            ]
        )
    heads += ["of synchronous", "accuracy", "samples", "steps", "seconds", "group", "failed", "seeds", "load"]
    print(table(heads, cells))


def _alike(rows: Sequence[Row]) -> Iterator[list[Row]]:
    def key(row: Row) -> tuple[Any, ...]:
        case = row.case
        rate = case.learning_rate or 0.0
        return case.task, rate, case.peers, list(LINES).index(case.line), case.epoch, list(MODES).index(case.mode)

    for _, ones in itertools.groupby(sorted(rows, key=key), key):
        yield list(ones)


def _synchronous_beside(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same case, trained synchronously."""
    wanted = {**vars(row.case), "mode": "synchronous"}
    return next((one for one in rows if vars(one.case) == wanted), None)


def read_rows(files: Sequence[Path]) -> list[Row]:
    found = []
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            looks = [Look(**look) for look in row["looks"]]
            found.append(Row(**{**row, "case": Case(**row["case"]), "looks": looks}))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--task", nargs="+", choices=SUBJECTS, default=["digits"])
    options.add_argument("--peers", type=int, nargs="+", default=[2])
    options.add_argument("--line", nargs="+", choices=LINES, default=["loopback", "300ms"])
    options.add_argument("--mode", nargs="+", choices=MODES, default=["synchronous", "delayed", "compensated"])
    options.add_argument("--seed", type=int, nargs="+", default=[0])
    options.add_argument("--epoch", type=float, default=1.2, help="seconds of computing in an epoch")
    options.add_argument("--round-share", type=float, nargs="+", help="of the computing, that a round takes, instead")
    options.add_argument("--learning-rate", type=float, help="instead of the task's own")
    options.add_argument("--updates", type=int, default=30, help="of the swarm")
    options.add_argument("--rows", type=Path, nargs="+", help="measure nothing: show what was written to these files")
    options.add_argument("--outer", action="store_true", help="an outer optimizer, instead")
    given = options.parse_args(arguments)
    print(machine())
    if given.rows:
        print_rows(read_rows(given.rows))
        return 0
    if given.quick:
        given.line, given.mode, given.epoch, given.updates = given.line[:1], given.mode, 0.4, 3
    reason = why_not() if given.outer or set(given.line) != {"loopback"} else None
    if reason:
        print(f"skipped: {reason}")
        write_json(given.json, [], skipped=reason)
        return 0
    if given.outer:
        return outer_line.main(given.json, given.quick, given.updates)
    rows: list[Row] = []
    broken: list[str] = []
    for task, peers, line in itertools.product(given.task, given.peers, given.line):
        lengths: list[tuple[float, float | None]] = [(given.epoch, None)]
        if given.round_share:
            seconds = round_of(task, peers, line)
            say(f"{task}, {peers} peers, {line}: a round takes {seconds:.2f} s")
            lengths = [(seconds / share, share) for share in given.round_share]
        for (epoch, share), seed, mode in itertools.product(lengths, given.seed, given.mode):
            case = Case(task, peers, line, mode, seed, epoch, given.updates, share, given.learning_rate)
            say(f"{case} ...")
            try:
                rows.append(measure(case))
            except RuntimeError as e:  # a peer that stands still, or has ended; the other rows are worth having
                broken.append(f"{case}: {e}")
                say(f"    {e}")
            else:
                row = rows[-1]
                say(f"    {row.last}, a round {row.round_seconds:.2f} s, stalled {row.stalled:.2f}")
            write_json(given.json, rows, broken=broken)  # after each row: a run may be ended in the middle
    print_rows(rows)
    print(*broken, sep="\n", end="\n" if broken else "")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
