"""Measures what an outer optimizer saves and costs: the text task with as many samples, synchronous and by DiLoCo.

Two peers each, from the same start. The loss is that of the whole validation text, bytes are what this peer has sent.

    python tests/benchmarks/outer_optimizer.py --samples 204800 --json outer_optimizer.json
    python tests/benchmarks/outer_optimizer.py --samples 204800 --pieces 4  # and with the model in pieces, in turn
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning import Trainer
from swarm_bench import machine, parser, say, table, write_json

import hivenb
from hivenb.options import Options
from hivenb.tasks import Task, text

#: Samples of an update of the swarm, synchronous, as the task is trained elsewhere.
SYNCHRONOUS = 512

#: Seconds in which the line's peak is looked for: two exchanges are further apart.
WINDOW = 5.0

#: Seconds that a training may take.
PATIENCE = 3600.0

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@dataclass(frozen=True)
class Outcome:
    """What a training has come to.

    :param loss: of the validation text, nats per character
    :param sent: megabytes by one peer
    :param peak: megabytes by one peer in a while of :data:`WINDOW`, at most
    :param seconds: that it took
    """

    name: str
    samples: int
    loss: float
    sent: float
    peak: float
    seconds: float


def train(name: str, task: Task, samples: int, options: Options) -> Outcome:
    say(f"{name}: {samples:,} samples, {options.target_batch_size:,} for an update ...")
    model = copy.deepcopy(task.model)
    with hivenb.Swarm(f"benchmark-{name}") as swarm:
        run = hivenb.TrainingRun(model, task.train, swarm=swarm, options=options, accelerator="cpu")
        swarm.add_local_peers(1, run)
        run.start()
        began = time.monotonic()
        if not run.wait(epochs=samples // options.target_batch_size, timeout=PATIENCE):
            raise RuntimeError(f"{name}: {run.status} after {PATIENCE:.0f} s")
        seconds = time.monotonic() - began
        run.stop()
        snapshot = run.history.snapshot()
    sent = snapshot.series["bytes_sent"]
    (figures,) = Trainer(accelerator="cpu", **QUIET).validate(model, task.validation, verbose=False)
    return Outcome(name, samples, figures["val_loss"], sent.values[-1] / 1e6, _peak(sent) / 1e6, seconds)


def _peak(total: Any) -> float:
    """The most by which a total grows in a while."""
    before = np.interp(total.times - WINDOW, total.times, total.values)
    return float((total.values - before).max())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=204800, help="of all peers, in each training")
    options.add_argument("--updates", type=int, default=8, help="of the outer optimizer")
    options.add_argument("--pieces", type=int, help="of the model, for a training that sends them in turn")
    given = options.parse_args(arguments)
    if given.quick:
        given.samples, given.updates = 4 * SYNCHRONOUS, 2
    print(machine())
    task = text(width=32, layers=1) if given.quick else text()
    common = {"matchmaking_time": 3.0, "averaging_timeout": 30.0}
    synchronous = Options(target_batch_size=SYNCHRONOUS, run_id="synchronous", **common)
    target = given.samples // given.updates
    diloco = Options(
        target_batch_size=target,
        run_id="diloco",
        use_local_updates=True,
        outer_optimizer="nesterov",
        grad_compression="float16",
        **common,
    )
    found = [train("synchronous", task, given.samples, synchronous), train("diloco", task, given.samples, diloco)]
    if given.pieces:
        name = f"diloco in {given.pieces} pieces"
        # each piece as often as the whole model before
        in_pieces = diloco.replace(outer_fragments=given.pieces, target_batch_size=target // given.pieces)
        found.append(train(name, task, given.samples, in_pieces))
    lines = [
        [one.name, f"{one.samples:,}", f"{one.loss:.4f}", f"{one.sent:.2f}", f"{one.peak:.2f}", f"{one.seconds:.0f}"]
        for one in found
    ]
    print(table(["", "samples", "validation loss", "sent, MB", f"in {WINDOW:.0f} s at most", "seconds"], lines))
    loss, fewer = found[1].loss / found[0].loss, found[0].sent / max(found[1].sent, 1e-9)
    print(f"with the outer optimizer: {loss:.4f} times the loss, {fewer:.0f} times fewer bytes")
    write_json(given.json, found, loss=loss, fewer_bytes=fewer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
