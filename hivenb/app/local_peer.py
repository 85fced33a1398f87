"""The inside of a local peer: a process forked from a server that has imported all this before.

A program of its own; :mod:`hivenb.peers.fork_server` starts it by its name.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection

import cloudpickle
import hivemind.utils.asyncio
import torch
from hivemind.utils import MPFuture

from hivenb.engine.process.child import redirect_output, settle_as_child
from hivenb.engine.process.freed_memory import give_back_regularly
from hivenb.options.options import Options
from hivenb.peers.fork_server import unpack
from hivenb.peers.peer_recipe import PeerRecipe
from hivenb.run.endless_trainer import trainer_without_end
from hivenb.run.fit import Fit
from hivenb.run.status import RunState
from hivenb.run.training import TrainingRun
from hivenb.swarm.swarm import Swarm
from hivenb.system.logs import collect_logs

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether the run has ended by itself; orders are obeyed at once.
_ORDER_INTERVAL = 1.0


class _Follower(TrainingRun):
    """A run that takes its options and its end from the one in another process that added it, and is never the host."""

    _may_host = False
    _has_own_end = False
    _new_trainer = staticmethod(trainer_without_end)
    _is_leaving = False

    def train_with(self, options: Options) -> None:
        """Train, or train on, with these options."""
        is_renamed = options.run_id != self.options.run_id  # while that run had stopped
        if is_renamed:
            self.stop()
        self._options.follow(_trains_in_full(options))
        if is_renamed:
            self.start()
        self.resume()

    def leave(self) -> None:
        """End, and go on no more: nothing is kept for another start."""
        self._is_leaving = True
        self.stop()

    def _keep(self, fit: Fit, has_failed: bool) -> None:
        if not self._is_leaving:
            super()._keep(fit, has_failed)


def _trains_in_full(options: Options) -> Options:
    """The same for a peer that trains and can be reached, whatever else the run itself has become for the others."""
    return options.replace(client_mode=None, auxiliary=False)


def main(
    packed_recipe: bytes, main_module: dict[str, str], connection: Connection, parent_pid: int, log_path: str
) -> None:
    """Train until told to leave, until the run has ended, or until the parent is gone.

    :param packed_recipe: what :func:`hivenb.peers.peer_recipe.make_recipe` gave
    :param main_module: what :func:`hivenb.peers.fork_server.main_module` gave there
    """
    settle_as_child(parent_pid)
    give_back_regularly()
    os.setsid()
    _forget_the_server()
    _write_to(log_path)
    tempfile.tempdir = os.path.dirname(log_path)  # a killed peer cannot tidy up; its parent does, here
    torch.set_num_threads(1)  # peers of one machine share its cores
    try:
        recipe: PeerRecipe = unpack(packed_recipe, main_module)
        torch.manual_seed(recipe.seed)
        trainer_kwargs = recipe.for_trainer()
        with Swarm.join(recipe.initial_peers) as swarm:
            run = _Follower(
                recipe.model,
                (recipe.data, None),
                swarm=swarm,
                options=_trains_in_full(recipe.options),
                keep_history=False,
                **trainer_kwargs,
            )
            try:
                run.start()
                run.pause()  # until the run in the notebook starts; everything is set up by then
                run.wait_for(RunState.PAUSED)
                connection.send(("ready", swarm.peer_id))
                _obey(connection, run)
            finally:
                # as large as the model and its optimizer; this process ends without finalizers, its siblings train on
                for folder in (run.kept_folder.path, trainer_kwargs["default_root_dir"]):
                    shutil.rmtree(folder, ignore_errors=True)
    except Exception as e:
        logger.exception("this peer failed")
        with contextlib.suppress(OSError):
            connection.send(("failed", f"{type(e).__name__}: {e}"))
        sys.exit(1)


def _obey(connection: Connection, run: _Follower) -> None:
    """Train when told to, and return when told to leave or when the run has ended.

    :raises Exception: what ended the run
    """
    while run.status.state.is_active:
        if connection.poll(_ORDER_INTERVAL):
            order, options = connection.recv()
            if order == "train":
                run.train_with(cloudpickle.loads(options))
            elif order == "leave":
                run.leave()
    run.wait()


def _write_to(log_path: str) -> None:
    """Let all that this process and its children print or log go to a file, not into a cell of the notebook."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    redirect_output(descriptor)
    os.close(descriptor)
    collect_logs().echo = sys.stderr


def _forget_the_server() -> None:
    """Drop what this process shares with its siblings by way of fork: locks and the start method."""
    mp.set_start_method("fork", force=True)
    # a sibling killed while it holds one of these would stop all others for good
    MPFuture.reset_backend()
    hivemind.utils.asyncio._AsyncContextWrapper.EXECUTOR_LOCK = mp.Lock()
