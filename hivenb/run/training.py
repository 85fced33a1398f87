"""TrainingRun: a Trainer in a background thread, and one state machine around it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning

from hivenb._interrupts import interrupts_blocked
from hivenb._signatures import OwnSignature, keywords_of, shown_with, unchanged, with_keywords
from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.errors import OptionsError, TrainingError
from hivenb.figures.advice import Advice, advise
from hivenb.figures.history import History
from hivenb.options.options import Options
from hivenb.peers.followed_run import Followers
from hivenb.run.checkpoints import RunFolder
from hivenb.run.concurrent_runs import before, claim_place, give_way, make_room, one_starts
from hivenb.run.fit import Fit, check_arguments, in_invited_run, prepare_fit, trainer_keywords
from hivenb.run.kept_history import KeptHistory, folder_of
from hivenb.run.live_options import RunOptions
from hivenb.run.model_copy import model_of
from hivenb.run.model_snapshot import take_snapshot
from hivenb.run.module_modes import KeptModes
from hivenb.run.monitor import is_of_memory, let_go_of_tensors
from hivenb.run.pause_and_stop import Gate, Stage
from hivenb.run.recorder import Recorder
from hivenb.run.script import script_of
from hivenb.run.status import RunState, RunStatus, status_of, who_trains_elsewhere
from hivenb.run.swarm_rollback import RollingBack
from hivenb.run.training_length import Beginning, Length, length_of, require_way_to_go
from hivenb.run.wait_output import Goal, wait_with_line, whole_number
from hivenb.swarm.agreement.host import Hosting
from hivenb.swarm.agreement.other_runs import OtherRuns
from hivenb.swarm.members import Member, MemberList
from hivenb.swarm.swarm import Swarm

if TYPE_CHECKING:
    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.peers.local_peer import LocalPeer
    from hivenb.strategy.strategy import HivemindStrategy


logger = logging.getLogger(__name__)


class TrainingRun:
    """Trains a model with the peers of a swarm, in a background thread, through a real ``lightning.Trainer``.

    Nothing happens before :meth:`start`. All methods may be called from any thread. The Trainer trains until it is
    stopped (``max_epochs=-1``), on one device, writes no checkpoints and shows no progress bar, unless
    ``trainer_kwargs`` say so. ``history`` is what was recorded, a :class:`hivenb.History`; ``members`` tells who is and
    was here, as the list of peers does; ``followers`` are the local peers, which train with the options of the run.
    Series of the history:

    - ``loss``, and whatever the module logs, under its name
    - ``peers``, and ``group_size``, those who met in a round
    - ``samples_per_second`` of this peer, ``swarm_samples_per_second`` of all
    - ``stalled_seconds`` for which training stood still in a swarm epoch; ``waiting_seconds``, those of a round that
      failed
    - ``bytes_sent``, ``bytes_received`` by this peer since the beginning
    - ``memory`` of this process in main memory, ``gpu_memory`` of its tensors, in bytes
    - ``skipped_batches``, whose gradients were not finite, and ``skipped_in_a_row``

    :param model: the LightningModule
    :param data: what ``Trainer.fit`` trains on: a DataLoader, a LightningDataModule, a CombinedLoader, lists and dicts
      of loaders in any nesting, or any iterable of batches; or a tuple of two, ``(training, validation)``. A list of
      two loaders is two to train on together; ``None`` is for a model that has a ``train_dataloader``
    :param swarm: the open swarm to train in
    :param options: the switches of collaborative training
    :param keep_history: keep the history in a file, so that the next run of this name shows it as what was before it,
      also in another kernel: below the user's state directory, apart for each working directory and each class of
      model, or in a folder that is named here or by ``HIVENB_HISTORY``. ``False``, or ``HIVENB_HISTORY=off``, keeps no
      file
    :param resume: whether to go on with what the last run of this name in this swarm has learned, whose place it takes;
      where there is nothing, a mark in the history and the log say so. A run that nobody holds any more is gone.
      Without it, a model that was made anew is a new run, with a name of its own in the DHT; but in a swarm that was
      joined by an invite the run is that of the others, and this peer takes over their state
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``, over :data:`hivenb.run.fit.TRAINER_DEFAULTS`
    :raises TrainingError: if ``trainer_kwargs`` holds a strategy, which is what the options stand for; or the model or
      the swarm is something else
    :raises OptionsError: if ``options`` is something else than :class:`hivenb.Options`
    """

    _may_host = True
    _has_own_end = True
    _new_trainer: Callable[..., lightning.Trainer] = lightning.Trainer
    __signature__ = OwnSignature(lambda: with_keywords(TrainingRun.__init__, trainer_keywords(), is_method=True))

    def __init__(
        self,
        model: Any,
        data: Any,
        *,
        swarm: Swarm,
        options: Options,
        resume: bool = False,
        keep_history: bool | str | Path = True,
        **trainer_kwargs: Any,
    ):
        check_arguments(model, swarm, options, trainer_kwargs)
        experiment, options = options.run_id, in_invited_run(options, swarm)
        self.model, self.data, self.swarm, self.trainer_kwargs = model, data, swarm, trainer_kwargs
        self.history, self.member_list = History(), MemberList()
        #: those who train with the options of this run, from when it begins: its local peers
        self.followers = Followers(partial(self.history.mark, "peer"), experiment)
        self._resumes = resume
        kept_as = options.run_id  # the name that a person has written finds the histories of all its models
        if not swarm.is_joined:
            options = options.replace(run_id=swarm.run_names.name_for(experiment, model, goes_on=resume))
        self._stage = Stage()
        self._fit: Fit | None = None
        self._name = options.run_id
        self._options = RunOptions(options, self._stage, self.history, self.followers)
        self._rolling_back = RollingBack(self._stage, self.history)
        self._exception: BaseException | None = None
        self._recorder = Recorder(self.history)
        self._modes = KeptModes(partial(self.history.mark, "run"))
        self._thread: threading.Thread | None = None
        self._others: OtherRuns | None = None
        self._started_at, self._origin, self._keeps_local_peers = -math.inf, "new run", False
        self._folder = RunFolder()
        #: from where its pace is reckoned; ``None`` before it trains, and before it goes on with a checkpoint
        self._beginning: Beginning | None = None
        folder = folder_of(kept_as, keep_history)
        self._kept_history = KeptHistory(self.history, folder, kept_as, type(model_of(model)).__qualname__)
        if (earlier := self._kept_history.earlier()) is not None:
            self.history.begin_after(earlier)
        former = before(self) if resume else None
        #: when a run was started that this one is to resume, and what it keeps, whoever else holds it: until it trains
        self._to_resume = None if former is None else (former.started_at, former.kept_folder)
        swarm.runs.adopt(self)

    # -- what a person does -------------------------------------------------------------------------------------

    def start(self, checkpoint: str | Path | None = None) -> None:
        """Start to train, or go on from where :meth:`stop` or an error left it. Returns at once.

        It goes on with what the model holds by now: weights that somebody has put in, unfrozen layers, or a new head,
        for which the optimizer begins anew while it keeps its state for all else; also with learning rates and the like
        that ``configure_optimizers`` has changed. If other peers train the run meanwhile, their weights are taken over
        in place of what was changed here, and a warning says so.

        In the middle of a pass through the data, it goes on with as many batches as were left; the loader begins anew.
        A run of the same name that trains in this swarm already is stopped first, which both histories and the log
        say, and local peers of that name leave that follow another run, even one that has ended; as many follow this
        one. Runs of different names train side by side.

        :param checkpoint: a file that a Trainer has written, to go on from, with its weights; as all pickles, it can
          run code
        :raises TrainingError: if the data has no batches, another run trains this model, the checkpoint is not there,
          or the run has trained as long as it was to
        :raises SwarmError: if the swarm is closed
        :raises Exception: what Lightning says if it cannot make a Trainer of the keyword arguments
        """
        with one_starts, self._stage.changed:
            self._recorder.epoch = self._folder.begin_at(checkpoint, self._recorder.epoch, self._state.is_active)
            if self._state.is_active:
                if self._state is RunState.PAUSED:
                    self.resume()
                elif self._state is RunState.STOPPING:
                    raise TrainingError("the run is stopping; wait for it with run.wait() and start it again")
                return
            try:
                self._begin(checkpoint)
            except BaseException:
                if not self._state.is_active:
                    self._recorder.epoch = self._folder.take_back(was_refused=True)
                raise

    def _begin(self, checkpoint: str | Path | None) -> None:
        self._find_name()
        gate = Gate(self._stage, self._modes, self._began, self._step_aside, partial(self.history.mark, "run"))
        folder = str(self._folder.path)
        modes, new_trainer = self._modes, self._new_trainer
        fit = prepare_fit(self, folder, self._recorder, gate, modes, self._on_epoch, self._look, new_trainer)
        if self._fit is not None and checkpoint is None and self._has_own_end:
            require_way_to_go(fit.trainer, self._fit.trainer)
        self._rolling_back.begin(fit.strategy)
        older, former = claim_place(self), before(self)
        self._started_at, self._keeps_local_peers = time.monotonic(), False
        self.swarm.run_names.take(self.experiment, self.options.run_id, self.model)
        self.swarm.runs.adopt(self)
        self._fit, self._exception, self._origin = fit, None, "new run"
        if checkpoint is not None:
            self._beginning = None
        self._options.begin(fit.strategy)
        thread = BackgroundThread(target=self._train, args=(fit, older, former), name="hivenb-trainer")
        with interrupts_blocked():  # in between, a run would be starting for ever
            self._stage.enter(RunState.STARTING)
            try:
                thread.start()
            except RuntimeError as e:
                self._exception = TrainingError(f"training could not begin: {e}. End what else runs here")
                self._stage.enter(RunState.FAILED)
                raise self._exception from e
        self._thread = thread

    def stop(self, wait: bool = True, keep_local_peers: bool = False) -> None:
        """End training at the next batch. The model keeps what it has learned; :meth:`start` goes on from there.

        Its local peers end as well, and as many come back with :meth:`start`; so they do where the run ends by itself.

        :param wait: return only when the run has ended and its processes are gone
        :param keep_local_peers: let the local peers train on without it, until it starts again or they are removed
        """
        with self._stage.changed:
            if self._state.is_active:
                self._keeps_local_peers = keep_local_peers
                self._stage.enter(RunState.STOPPING)
                if self._fit is not None:
                    self._fit.end()
            if not wait or self._is_trainer_thread():
                return
            self._stage.wait_until(lambda: not self._state.is_active)

    def pause(self) -> None:
        """Hold training at the next batch, without leaving the swarm for good. Others no longer wait for this peer.

        They train on meanwhile, its local peers too; :meth:`resume` goes on with what they have learned.

        :raises TrainingError: if the run is not training
        """
        with self._stage.changed:
            if self._state not in (RunState.STARTING, RunState.TRAINING, RunState.PAUSED):
                raise TrainingError(f"the run is {self._state.value}; only one that trains can be paused")
            self._stage.close_gate()

    def resume(self) -> None:
        """Go on after :meth:`pause`, with the weights that the model has by now. If other peers train it, too, theirs
        are taken over in place of what was changed here, and a line says so.

        :raises TrainingError: if the run is not active, or the model has parameters that its optimizer does not have
        """
        with self._stage.changed:
            if not self._state.is_active:
                raise TrainingError(f"the run is {self._state.value}; start it with run.start()")
            if self._state is RunState.PAUSED and self._fit is not None and self._fit.gate.paused is not None:
                self._fit.gate.paused.require_same_structure()
            self._stage.open_gate()

    def wait(self, epochs: int | None = None, steps: int | None = None, timeout: float | None = None) -> bool:
        """Wait until the run has gone so much further from now, or has ended.

        An interrupt (KeyboardInterrupt) ends the waiting at once; training goes on in the background. In a notebook and
        in a terminal, a line tells how far it is.

        :param epochs: that many further swarm epochs, of those in which the run trains: who joins at the
          fiftieth has seen none
        :param steps: that many further batches of this peer
        :param timeout: at most this many seconds
        :returns: whether that point was reached; False after the timeout, or if the run ended before
        :raises TrainingError: if the run was not started, or ``epochs`` or ``steps`` is no whole number
        :raises Exception: whatever ended the run, as it was raised in the background thread
        """
        if self._state is RunState.READY:
            raise TrainingError("the run was not started; call run.start() first")
        epochs, steps = whole_number("epochs", epochs), whole_number("steps", steps)
        goal = Goal(epochs, steps, self._recorder.epochs, self._recorder.steps)
        reached = wait_with_line(goal, self._stage, self._recorder, lambda: self.status, timeout)
        if self._exception is not None:
            raise self._exception
        return reached

    def wait_for(self, state: RunState, timeout: float | None = None) -> bool:
        """Wait until the run is in a state, or has ended.

        :param timeout: at most this many seconds
        :returns: whether it is in that state
        :raises Exception: whatever ended the run
        """
        with self._stage.changed:
            state = RunState(state)  # its value is equal to it
            self._stage.wait_until(lambda: self._state is state or not self._state.is_active, timeout)
            if self._exception is not None:
                raise self._exception
            return self._state is state

    @shown_with(lambda: unchanged(keywords_of(Options)))
    def apply(self, options: Options | None = None, *, wait: bool = True, **changes: Any) -> Options:
        """Change options, also while the run trains: it goes on with them at its next batch.

        Parameters, optimizer state, schedules, the swarm epoch and what was accumulated for it are kept, and so are
        the DHT and the local peers, which follow. What all peers have to agree on changes at all of them at the same
        swarm epoch, a little later, and only the run's host can change it: the peer that has taken part longest.

        :param options: the new options as a whole; without them, ``changes`` to those in force or on their way
        :param wait: return only when the options are in force. While a validation runs, that is after it
        :param changes: new values of single options, by name
        :returns: the new options
        :raises OptionsError: if the new options are wrong or cannot be changed while the run trains; the old ones stay
        :raises Exception: whatever went wrong with the new options; the old ones are in force again
        """
        if options is not None and not isinstance(options, Options):
            raise OptionsError(
                f"options={options!r} is no hivenb.Options. Single options are changed by their names, such as "
                "run.apply(target_batch_size=512); of a dict of them, such as the changes of an advice, it is "
                "run.apply(**changes)"
            )
        if options is not None and options.run_id == self.experiment:
            options = options.replace(run_id=self.options.run_id)  # which stands for its name in the DHT
        return self._options.apply(options, changes, wait and not self._is_trainer_thread())

    def roll_back(self, wait: bool = True) -> int:
        """Return to the last good state: parameters, optimizer state and buffers, as they were kept in main memory.

        For a loss that explodes all the same. The swarm epoch and the learning rate schedule go on from where they
        are, a little ahead if other peers take part: all return together, and only the run's host can let them. A run
        that has ended returns when it starts again. ``Options(auto_roll_back=True)`` does it by itself.

        :param wait: return only when training goes on from there
        :returns: the swarm epoch that the state is of
        :raises TrainingError: if there is no good state yet, none is kept, or another peer is the host
        """
        return self._rolling_back.ask(self.options, wait and not self._is_trainer_thread())

    def stop_following_host(self) -> str:
        """Follow the present host no more, and train with this peer's own options until the next host decides.

        What it has decided is not passed on to those who come later. The other peers go on to follow it, unless they
        stop following it as well.

        :returns: id of the peer that was the host
        :raises OptionsError: if this peer is the host, or there is none
        """
        hosting = self._options.hosting
        if hosting is None:
            raise OptionsError("the run does not train, and follows nobody")
        return hosting.stop_following_host()

    def snapshot(self, device: Any = "cpu", *, timeout: float = 60.0) -> Any:
        """A copy of the model to look at and predict with, with the weights of one moment; at any time, also in a cell
        while the run trains.

        It is taken between two batches, after a validation that is under way, and training waits for no more than the
        copying. Of a model that is ahead of its optimizer, while gradients are averaged in the background, it has what
        the optimizer has made last. It is in eval mode, its parameters need no gradients, and it knows no Trainer.
        ``run.model`` itself is what is trained: while that goes on, ``run.model.eval()`` in a cell has no effect.

        :param device: of the copy, such as ``"cpu"`` or ``"cuda"``
        :param timeout: at most this many seconds until such a moment comes
        :returns: a LightningModule of the same class
        :raises TrainingError: if the model cannot be copied, there is no such device, or no such moment came in time
        """
        return take_snapshot(
            self.model,
            self._stage,
            device,
            timeout,
            is_training=self._is_trainer_thread(),
            values_behind=self._values_behind,
        )

    def take_name(self) -> None:
        """Have a name in the DHT from now on that is its own, and end what trains another model under that.

        Called before a local peer joins; :meth:`start` does the same.
        """
        with one_starts, self._stage.changed:
            if self._state.is_active:
                return
            self._find_name()
            self.swarm.run_names.take(self.experiment, self.options.run_id, self.model)
        make_room(self)

    # -- what a person sees -------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The options in force."""
        return self._options.in_force

    @property
    def pending_options(self) -> Options | None:
        """Options that were asked for and are not in force yet."""
        return self._options.pending

    @property
    def pending_epoch(self) -> int | None:
        """The swarm epoch at which the pending options on which all peers agree come into force, if any do."""
        return self._options.pending_epoch

    @property
    def not_host_reason(self) -> str | None:
        """Why what all peers have to agree on cannot be changed here at the moment; ``None`` if it can."""
        return self._options.not_host_reason

    @property
    def options_error(self) -> Exception | None:
        """Why the options that were asked for last could not be put in force, if they could not."""
        return self._options.error

    @property
    def strategy(self) -> HivemindStrategy | None:
        """The strategy of the present or last start."""
        return None if self._fit is None else self._fit.strategy

    @property
    def trainer(self) -> lightning.Trainer | None:
        """The Trainer of the present or last start."""
        return None if self._fit is None else self._fit.trainer

    @property
    def length(self) -> Length:
        """How long it has trained, and how far it is on the way to its end. Cheap."""
        return length_of(self.trainer, self._stage.trained_seconds, self._beginning or Beginning(), self.is_active)

    @property
    def is_active(self) -> bool:
        """Whether it is at work, or about to be."""
        return self._stage.state.is_active

    def peers(self) -> tuple[PeerInfo, ...]:
        """The peers of the run, as last seen while it was active."""
        return () if self._fit is None or not self.is_active else self._fit.monitor.peers

    @property
    def experiment(self) -> str:
        """What a person calls it, and the runs of other models before it whose place it takes: ``Options(run_id=...)``.

        The name in the DHT, by which peers meet, is ``run.options.run_id``: that of the experiment, with a number
        behind it when another model has trained under that already.
        """
        return self.followers.experiment

    @property
    def origin(self) -> str:
        """What the present or last start has begun with: ``"new run"``, with the weights of its model; ``"goes on from
        swarm epoch 12"``, or ``"joined at swarm epoch 12"``, with the state of the other peers; ``"new run: there was
        nothing to resume"`` with ``resume=True`` where no run of its name has left anything. Empty before the first
        start."""
        return self._origin if self._state is not RunState.READY else ""

    @property
    def kept_folder(self) -> RunFolder:
        """Where it keeps what another start needs."""
        return self._folder

    @property
    def started_at(self) -> float:
        """When it was started last, by ``time.monotonic()``; endlessly long ago if it was not."""
        return self._started_at

    @property
    def snapshot_epoch(self) -> int | None:
        """The swarm epoch of the last snapshot, to which :meth:`roll_back` returns; ``None`` while there is none."""
        return self._rolling_back.kept.epoch

    @property
    def exception(self) -> BaseException | None:
        """What ended the run, if it was an error."""
        return self._exception

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What the figures of the run suggest to change; ``run.apply(**advice.changes)`` does it."""
        options = self.options  # before the history, where a change is marked
        return advise(self.history.snapshot(), options)

    def to_code(self) -> str:
        """The plain Lightning script that does what the run does: with its options, its Trainer's arguments, its data.

        :returns: Python that runs as it stands in a cell of this notebook, and in a script that has the names in it;
          what has no text of its own, such as a callback, is a comment that asks for it
        """
        return script_of(self, is_active=self.is_active)

    @property
    def members(self) -> tuple[Member, ...]:
        """Who is and was here, as the list of peers shows it: who is here first, then who has put in most."""
        return self.member_list.members

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What hivemind, Lightning and hivenb have logged in the background, newest last."""
        return self.swarm.logs.tail()

    @property
    def local_peers(self) -> tuple[LocalPeer, ...]:
        """Its peers on this machine that were added and not removed, whether they still run or not."""
        return tuple(peer for peer in self.swarm.local_peers if peer in self.followers)

    @property
    def status(self) -> RunStatus:
        """The run at this moment. Cheap: asks neither the swarm nor the device."""
        with self._stage.changed:
            state, error = self._state, self._exception
        optimizer = self._optimizer if state.is_active else None
        status = status_of(
            state,
            error,
            recorder=self._recorder,
            target_batch_size=self.options.target_batch_size,
            progress=None if optimizer is None else optimizer.tracker.global_progress,
            peers=self.peers(),
            loss=self.history.snapshot().last("loss"),
        )
        elsewhere = {} if self._others is None or not state.is_active else dict(self._others.peers)
        return replace(status, excluded_peers=self.member_list.excluded_peers, origin=self.origin, elsewhere=elsewhere)

    def __repr__(self) -> str:
        return f"TrainingRun({type(self.model).__name__}, {self._state.value}, run_id={self.options.run_id!r})"

    # -- the background thread ----------------------------------------------------------------------------------

    def _train(self, fit: Fit, older: Sequence[TrainingRun], former: TrainingRun | None) -> None:
        # what goes wrong surfaces at wait() and in the panel, and keeps nothing after it from being done
        with self.swarm.logs.this_thread():
            failure = first_failure(partial(self._fit_through, fit, older, former))
            left = first_failure(
                partial(self._keep, fit, failure is not None),
                fit.monitor.close,
                self._options.leave,
                self._rolling_back.leave,
                self._end_local_peers,
            )
        with self._stage.changed:
            # options that came too late are those of the next start
            too_late = first_failure(self._stage.do_tasks, self.followers.end)
            self._exception = failure = failure or left or too_late
            if is_of_memory(failure):  # this holds it, and the next start needs it
                let_go_of_tensors(failure)
            ended = RunState.STOPPED if self._state is RunState.STOPPING else RunState.FINISHED
            ended = RunState.FAILED if failure is not None else ended
            self.history.mark("run", ended.value if failure is None else f"failed: {type(failure).__name__}")
            if failure is not None:  # for who does not wait for it, and looks later what has become of it
                what = f"{type(failure).__name__}: {failure}"
                logger.error(f"the run {self.options.run_id!r} has failed: {what}", exc_info=failure)
            self._kept_history.end()
            self._stage.enter(ended)

    def _fit_through(self, fit: Fit, older: Sequence[TrainingRun], former: TrainingRun | None) -> None:
        run_id = self.options.run_id
        self._kept_history.begin()
        give_way(older, self)
        if older and not self._recorder.steps and (earlier := self._kept_history.earlier()) is not None:
            self.history.begin_after(earlier)  # theirs, too, who trained when this run was made
        if self._folder.checkpoint is None:
            self._go_on_from(former)
        fit.strategy.on_joined = self._joined
        fit.monitor.start()
        self._others = OtherRuns(self.swarm.dht, run_id)
        hosting = Hosting(self.swarm.dht, partial(self.swarm.peers, run_id), run_id, self._may_host)
        self._options.join(hosting)
        self._rolling_back.join(hosting)
        fit.strategy.left = self._folder.left_in(model_of(self.model))
        fit(self.model, self._folder.checkpoint, lambda: self._state is RunState.STOPPING)

    def _keep(self, fit: Fit, has_failed: bool) -> None:
        """Keep what another start needs of a fit that is over."""
        if fit.gate.has_begun:
            self._folder.keep_state(fit.trainer, fit.gate.progress)
            self._folder.note_model(model_of(self.model), fit.gate.edited)
        elif has_failed:
            self._recorder.epoch = self._folder.take_back()

    def _end_local_peers(self) -> None:
        if not self._keeps_local_peers:
            self.swarm.local.leave_with(self)

    def _on_epoch(self, report: Any) -> None:
        self._recorder.on_epoch(report)
        if self._fit is not None:
            self._fit.monitor.on_epoch()
        self._options.on_epoch()
        self._stage.notify()

    def _look(self, peers: Sequence[PeerInfo]) -> None:
        self._options.look(peers)
        self._rolling_back.look()
        if self._others is not None and self._may_host:
            ours = [peer.peer_id for peer in self.swarm.local_peers]
            if self._others.look([one for one in ours if one is not None]) and self._others.peers:
                logger.info(who_trains_elsewhere(self._others.peers, self.options.run_id))

    def _began(self) -> None:
        if self._beginning is None:
            self._beginning = Beginning.at(self.trainer, self._stage.trained_seconds)
        self.history.mark("run", "started" if self._folder.checkpoint is None else "resumed", breaks_trend=True)
        if self._folder.checkpoint is not None:
            self._origin = f"goes on from swarm epoch {self._recorder.epoch:,}"
        elif self._name != self.experiment and not self.swarm.is_joined:
            self.history.mark("run", f"new run {self._name}", breaks_trend=True)
        if self._resumes and self._folder.checkpoint is None:
            self._origin = "new run: there was nothing to resume"
            with_what = "with the weights of its model, unless other peers have a state of the run"
            self.history.mark("run", f"nothing to resume: begins {with_what}")
            logger.info(
                f"the run {self._name!r} has nothing to resume, as no run of that name is known here any more that has "
                f"trained: it begins {with_what}. run.start(checkpoint) goes on from a file"
            )
        self._to_resume = None
        self.followers.tell(self.options)
        self.swarm.local.come_back_with(self)

    def _joined(self, epoch: int) -> None:
        """The state of the others was taken over before the first batch."""
        self._recorder.epoch = epoch
        self._origin = f"joined at swarm epoch {epoch:,}"
        self.history.mark("run", f"{self._origin}, with the state of the others", breaks_trend=True)

    def _go_on_from(self, former: TrainingRun | None) -> None:
        """Go on with what an earlier run of this process has learned under the same name, if that is wanted."""
        began_at, folder = self._to_resume or (-math.inf, None)
        if former is not None and former.started_at >= began_at:
            is_asked_for = self._resumes or (self.swarm.is_joined and former.model is not self.model)
            folder = former.kept_folder if is_asked_for else None
        if folder is None or folder.checkpoint is None:
            return
        if (difference := folder.difference(self.model)) is None:
            self._recorder.epoch = self._folder.begin_at(folder.checkpoint, self._recorder.epoch, is_active=False)
            self._folder.go_on_from(folder)
        elif self._resumes:
            raise TrainingError(
                f"the run {self._name!r} cannot be resumed: {difference}. Build the same model, or make a new run, "
                "without resume=True"
            )
        else:
            text = "begins anew: the run has trained a model of another shape"
            self.history.mark("run", text, breaks_trend=True)

    def _find_name(self) -> None:
        """Have the name in the DHT under which this model trains; to be called while it does not."""
        names, now = self.swarm.run_names, self.options.run_id
        if now != self._name:  # it was given another one by hand
            self.swarm.local.rename(self, now)
        self._name = now if self.swarm.is_joined else names.name_for(self.experiment, self.model, goes_on=self._resumes)
        self._options.rename(self._name)

    def _step_aside(self) -> None:
        if (optimizer := self._optimizer) is not None:
            optimizer.step_aside()

    def _values_behind(self) -> Any:
        return {} if self._optimizer is None else self._optimizer.values_behind()

    @property
    def _optimizer(self) -> Any:
        return None if self._fit is None else self._fit.optimizer

    @property
    def _state(self) -> RunState:
        return self._stage.state

    def _is_trainer_thread(self) -> bool:
        return threading.current_thread() is self._thread


def first_failure(*steps: Callable[[], object]) -> BaseException | None:
    """Do one thing after the other, whatever comes of those before; gives what went wrong first."""
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as e:
            failure = failure or e
    return failure
