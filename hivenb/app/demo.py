"""Training from a terminal: the demo with peers on this machine, and joining a swarm from another one."""

from __future__ import annotations

import contextlib
import json
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hivenb.app.loading import loading
from hivenb.errors import TrainingError
from hivenb.system.process_tree import descendants, left_running
from hivenb.view.terminal import Terminal

if TYPE_CHECKING:
    from hivenb.run.status import RunStatus
    from hivenb.run.training import TrainingRun
    from hivenb.swarm.swarm import Swarm
    from hivenb.tasks import Task

#: What the swarm is called in this process. The run has the default name: by whatever invite somebody joins, of a
#: demonstration, a notebook or a relay, they take part in its run, or are told that they train another model.
_SWARM = "hivenb"

#: Seconds that a peer waits for others when a group forms, and for a round of averaging. Peers on one machine or in
#: one house need far less; a round that still goes wrong is over that much sooner than by default.
MATCHMAKING_TIME, AVERAGING_TIMEOUT = 3.0, 10.0

#: What is imported before a swarm is opened, as all that it needs itself.
_NEEDED = ("hivenb.run.training", "hivenb.swarm.swarm", "hivenb.view.charts.drawing", "hivenb.view.text")

_REFRESH_SECONDS = 0.25
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class DemoSettings:
    """What ``hivenb demo`` was asked for.

    :param task: a name in ``hivenb.tasks.TASKS``
    :param peers: further peers on this machine
    :param epochs: swarm epochs, which are steps of the optimizer, to train for
    :param accelerator: as the Trainer takes it
    :param public: let other machines join
    :param json: where to write the figures; ``None`` for nowhere
    :param png: where to write the picture
    """

    task: str
    peers: int
    epochs: int
    accelerator: str
    public: bool
    json: Path | None
    png: Path


def run_demo(settings: DemoSettings, terminal: Terminal) -> None:
    """Train a task with peers on this machine, show how it goes, and leave a picture and the figures behind.

    :raises HivenbError: if something cannot be started, or training fails
    :raises KeyboardInterrupt: when interrupted, after everything has been ended
    """
    terminal.say(f"hivenb {versions()['hivenb']}: {settings.task}, {_epochs(settings.epochs)}")
    clock = _Clock()
    task = _load(settings.task, terminal, settings.peers)
    from hivenb.swarm.swarm import Swarm

    clock.lap("imports")
    terminal.show("opening a swarm ...")
    with _closing(Swarm(_SWARM, public=settings.public), terminal) as swarm:
        run = _make_run(task, swarm, settings.accelerator)
        terminal.say(_how_to_join(swarm.invite, settings))
        if settings.peers:
            terminal.show(f"starting {_peers(settings.peers)} on this machine ...")
            swarm.add_local_peers(settings.peers, run)
        clock.lap("start")
        _start(run, settings.accelerator)
        last = _watch(run, terminal, until_epoch=settings.epochs)
        clock.lap("training")
        members, children = run.members, descendants()
        run.stop()
        failed = [str(peer.number) for peer in swarm.local_peers if peer.state == "failed"]
    clock.lap("closing")
    accuracy = _validate(run, task, settings.accelerator)
    settings.png.write_bytes(_picture(run))
    _report(run, members, terminal)
    figures = {
        "task": task.name,
        **_figures(run, last),
        "accuracy": accuracy,
        "children_left": len(left_running(children, _GRACE_SECONDS)),
        "wall_seconds": round(_seconds_since_start(), 2),
        "phases": clock.lap("results"),
        "versions": versions(),
    }
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n")
    terminal.say(_last_words(figures, settings, failed))


def run_join(
    invite: str,
    task_name: str,
    epochs: int | None,
    accelerator: str,
    client: bool,
    name: str | None,
    terminal: Terminal,
) -> None:
    """Join the run that an invite leads to and train with it, until interrupted or for a number of its epochs.

    :param invite: what ``hivenb demo`` printed, or ``Swarm.invite`` gave
    :param task_name: the task that the swarm trains
    :param epochs: epochs to take part in; ``None`` for as many as there will be
    :param accelerator: as the Trainer takes it
    :param client: only connect to others, whether they reach this peer or not
    :param name: what the others see beside the peer's id
    :param terminal: where to show how it goes
    :raises InviteError: if the invite cannot be read
    :raises NotInvitedError: if the swarm is private, and only addresses were given
    :raises SwarmError: if nobody answers, or the others train another model
    :raises HivenbError: if training fails
    """
    from hivenb.swarm.invite import read_invite

    read_invite(invite)  # before anything takes its time
    task = _load(task_name, terminal)
    from hivenb.swarm.swarm import Swarm

    terminal.show("joining the swarm ...")
    swarm = Swarm.join(invite, _SWARM, client_mode=client or None, public_name=name)
    with _closing(swarm, terminal):
        run = _make_run(task, swarm, accelerator)
        terminal.say(f"joined the swarm; training {task_name} in the run {run.options.run_id!r}")
        terminal.say("Ctrl-C leaves it, and the others train on")
        _start(run, accelerator)
        with contextlib.suppress(KeyboardInterrupt):
            _watch(run, terminal, for_epochs=epochs)
        members = run.members
        terminal.show("leaving the swarm ...")
    _report(run, members, terminal)


# -- the parts ----------------------------------------------------------------------------------------------------


class _Clock:
    """Takes the time of one part of the work after the other, the start of the interpreter included."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = 0.0

    def lap(self, name: str) -> dict[str, float]:
        now = _seconds_since_start()
        self.laps[name] = round(now - self._last, 2)
        self._last = now
        return self.laps


def _seconds_since_start() -> float:
    """How long this process has existed, the start of the interpreter included."""
    started = psutil.Process().create_time() - psutil.boot_time()  # by a clock that nobody sets
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _load(name: str, terminal: Terminal, peers: int = 0) -> Task:
    """Import all that is needed, while the process that peers are forked from, if there will be any, does the same."""
    with loading():
        terminal.show("loading PyTorch, Lightning and hivemind ...")
        if peers:
            from hivenb.peers.fork_server import start_server

            start_server()
        import torch

        torch.set_num_threads(1)  # peers share the cores, and models this small gain nothing from more
        for module in _NEEDED:
            import_module(module)
        from hivenb.tasks import TASKS

        return TASKS[name]()


def _make_run(task: Task, swarm: Swarm, accelerator: str) -> TrainingRun:
    from hivenb.options.options import Options
    from hivenb.run.training import TrainingRun

    options = Options(
        target_batch_size=task.target_batch_size,
        matchmaking_time=MATCHMAKING_TIME,
        averaging_timeout=AVERAGING_TIMEOUT,
    )
    data = task.train if task.validation is None else (task.train, task.validation)
    return TrainingRun(task.model, data, swarm=swarm, options=options, keep_history=False, accelerator=accelerator)


def _start(run: TrainingRun, accelerator: str) -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        run.start()
    except MisconfigurationException as e:
        raise TrainingError(f"the Trainer cannot be set up with --accelerator {accelerator}: {e}") from e


def _watch(
    run: TrainingRun, terminal: Terminal, until_epoch: int | None = None, for_epochs: int | None = None
) -> RunStatus:
    """Show how the run goes until it has reached an epoch, or has gone through a number of them."""
    from hivenb.run.status import RunState

    while True:
        status = run.status
        terminal.show(_fitting(status, terminal.width))
        is_there = until_epoch is not None and status.epoch >= until_epoch
        is_enough = for_epochs is not None and status.trained_epochs >= for_epochs
        if is_there or is_enough or not status.state.is_active:
            return status
        run.wait_for(RunState.FINISHED, timeout=_REFRESH_SECONDS)  # run.wait() would say so in a line each time


def _fitting(status: RunStatus, width: int | None) -> str:
    """The longest form of the status line that fits."""
    from hivenb.view.text import status_line

    line = status_line(status)
    return line if width is None or len(line) <= width else status_line(status, bar_width=8)


@contextlib.contextmanager
def _closing(swarm: Swarm, terminal: Terminal) -> Iterator[Swarm]:
    """Close the swarm at the end, whatever happens; a second Ctrl-C does not cut short what the first one began."""
    try:
        yield swarm
    except KeyboardInterrupt:
        terminal.say("interrupted: ending the run and leaving the swarm ...")
        raise
    finally:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            swarm.close()
        finally:
            signal.signal(signal.SIGINT, previous)


def _validate(run: TrainingRun, task: Task, accelerator: str) -> float | None:
    """How good the final model is by the task's own metric; None if it has none."""
    if task.metric is None or task.validation is None:
        return None
    import lightning

    from hivenb.run.fit import TRAINER_DEFAULTS

    with run.swarm.logs.this_thread():
        trainer = lightning.Trainer(**{**TRAINER_DEFAULTS, "accelerator": accelerator})
        figures = trainer.validate(run.model, task.validation, verbose=False)[0]
    for name, value in figures.items():
        run.history.record(name, value, epoch=run.status.epoch)
    return round(figures[task.metric], 4)


def _picture(run: TrainingRun) -> bytes:
    from hivenb.view.charts.drawing import ChartImage

    return ChartImage().png(run.history.snapshot())


def _report(run: TrainingRun, members: Any, terminal: Terminal) -> None:
    from hivenb.view.text import figure_lines, peer_lines

    lines = figure_lines(run.history.snapshot())
    if members:
        lines += ["", *peer_lines(members)]
    terminal.say("\n".join(["", *lines, ""]))


def _figures(run: TrainingRun, last: RunStatus) -> dict[str, Any]:
    series = run.history.snapshot().series
    loss = [float(value) for value in series["loss"].values] if "loss" in series else []
    return {
        "peers_max": int(series["peers"].highs.max()) if "peers" in series else 1,
        "epochs": last.epoch,
        "loss_first": round(loss[0], 4) if loss else None,
        "loss_last": round(loss[-1], 4) if loss else None,
    }


def _how_to_join(invite: str, settings: DemoSettings) -> str:
    where = "another machine or terminal" if settings.public else "another terminal"
    return f"to join from {where}:\n  hivenb join {invite} --task {settings.task}"


def _last_words(figures: dict[str, Any], settings: DemoSettings, failed: list[str]) -> str:
    left = figures["children_left"]
    lines = [f"{_epochs(figures['epochs'])} with up to {_peers(figures['peers_max'])}"]
    if figures["accuracy"] is not None:
        lines[0] += f", final accuracy {100 * figures['accuracy']:.1f} %"
    lines[0] += f"; {figures['wall_seconds']:.0f} s in all"
    if failed:
        lines.append(f"peers on this machine that failed: {', '.join(failed)}")
    lines.append("all peers have ended" if not left else f"{left} processes have NOT ended")
    lines.append(f"picture: {settings.png}" + (f"   figures: {settings.json}" if settings.json else ""))
    return "\n".join(lines)


def _epochs(count: int) -> str:
    return f"{count} swarm epoch{'s' * (count != 1)}"


def _peers(count: int) -> str:
    return f"{count} peer{'s' * (count != 1)}"


def versions() -> dict[str, str]:
    """Versions of Python and of all that a training result depends on."""
    own, *others = ("hivenb", "hivemind", "lightning", "torch")
    return {own: _version(own), "python": platform.python_version(), **{name: _version(name) for name in others}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # it is found all the same, as in a checkout
