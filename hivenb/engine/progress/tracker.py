"""Progress of the swarm: read without making the training thread wait."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hivemind
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress
from hivemind.optim.progress_tracker import ProgressTracker as _ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time, get_logger

from hivenb.engine.network.dht import know_run
from hivenb.engine.progress.failure_detector import FLOOD, MAX_REFRESH_PERIOD, FailureDetector, Pace
from hivenb.engine.progress.peer_reports import Look, as_infos, parse_reports
from hivenb.errors import ProcessEndedError, SwarmError

# -- answer ----------------------------------------------------------------------------------------------------------
#
# An answer of the DHT, for a loop that goes on without one.


#: In place of an answer that will not come.
UNANSWERED = object()


async def answer_of(future: Any, pause: float) -> Any:
    """What the DHT answers; :data:`UNANSWERED` if it has ended meanwhile, to be started anew or not.

    :param pause: seconds to wait then, before it is asked again
    """
    try:
        return await future
    except ProcessEndedError:
        await asyncio.sleep(pause)
        return UNANSWERED


# -- estimate --------------------------------------------------------------------------------------------------------
#
# When the swarm's present epoch is estimated to be over.


#: Seconds; an estimate beyond this comes from a speed of nothing.
_ENDLESS = 1e6


def seconds_left(progress: GlobalTrainingProgress) -> float | None:
    """Seconds until the swarm's next epoch, as estimated by hivemind's tracker; ``None`` if it cannot be told."""
    eta = progress.eta_next_epoch - get_dht_time()
    return max(0.0, eta) if eta < _ENDLESS else None


# -- peer list -------------------------------------------------------------------------------------------------------
#
# The swarm's list of peers as it was read last: who is on it, and who of them is there.


#: Called with the reports of peers and the ids of those that have gone; gives the ids of those who do not count.
OnLook = Callable[[Sequence[LocalTrainingProgress], frozenset[bytes]], frozenset[bytes]]


class PeerList:
    """What a tracker knows of the others. For the tracker's thread; any may read :attr:`look`.

    :param dht: which asks them whether they are there
    """

    def __init__(self, dht: hivemind.DHT):
        self._own_id = dht.peer_id
        self._detector = FailureDetector(dht)
        self._others: list[LocalTrainingProgress] = []
        self._gone: frozenset[bytes] = frozenset()
        self._uncounted: frozenset[bytes] = frozenset()
        self._keys: dict[bytes, Any] = {}
        #: the newest look at the swarm; ``None`` before the first
        self.look: Look | None = None
        #: seconds there and back on the longest line to another peer; 0 if that is not known. Any thread may read it
        self.round_trip = 0.0
        #: how often each of them reports, and looks. Any thread may read it
        self.pace = Pace()
        #: called each time the swarm was looked at, with the newest reports of the others whom rounds may wait for, and
        #: the ids of those that have gone without a goodbye; says whose reports do not count
        self.on_look: OnLook | None = None

    def take_in(self, record: Any, own_key: bytes, gone_after: float) -> dict[Any, LocalTrainingProgress]:
        """What those peers have reported that are there, and that count, by their public keys.

        :param record: as the DHT gave it
        :param own_key: of this peer
        :param gone_after: seconds without an answer after which a peer has gone, if its line is short
        """
        reports = self._one_of_each(reports_in(record))
        others = [report for key, report in reports.items() if key != own_key]
        # a flood of those that are none, and never answer, is not to slow the others down
        self.pace = Pace(1 + min(len(others), FLOOD + self._detector.answering))
        gone = self._detector.find_gone(others, gone_after, self.pace.silence)
        too_many = self._detector.too_many()
        self.round_trip = self._detector.round_trip
        reports = {key: report for key, report in reports.items() if report.peer_id not in too_many}
        self._others = [report for report in others if report.peer_id not in too_many]
        self._tell_who_is_there(Look(time.monotonic(), as_infos(reports.values(), self._own_id)), gone)
        left = self._gone | self._uncounted
        return {
            key: self._detector.by_own_clock(report) for key, report in reports.items() if report.peer_id not in left
        }

    def _one_of_each(self, reports: dict[Any, LocalTrainingProgress]) -> dict[Any, LocalTrainingProgress]:
        """Of several that name one peer, the one under the key that did so first."""
        self._keys = {peer: key for peer, key in self._keys.items() if key in reports}
        for key, report in reports.items():
            self._keys.setdefault(report.peer_id, key)
        return {key: report for key, report in reports.items() if self._keys[report.peer_id] == key}

    def look_for_the_gone(self, gone_after: float, reading_since: float) -> None:
        """See whether somebody has gone since the last look; a peer that does not answer holds up the next one.

        :param gone_after: as in :meth:`take_in`
        :param reading_since: when the next look has begun, on :func:`time.monotonic`
        """
        if self.look is None:
            return
        unread = max(0.0, reading_since - self.look.taken_at)
        gone = self._detector.find_gone(self._others, gone_after, self.pace.silence, unread)
        if gone != self._gone:
            self._tell_who_is_there(self.look, gone)

    def _tell_who_is_there(self, look: Look, gone: frozenset[bytes]) -> None:
        self._gone = gone
        if self.on_look is not None:
            here = [report for report in self._others if report.peer_id not in gone]
            self._uncounted = self.on_look([one for one in here if not self._detector.in_doubt(one.peer_id)], gone)
        self.look = replace(look, gone=_names(gone), uncounted=_names(self._uncounted))


def _names(peers: frozenset[bytes]) -> frozenset[str]:
    return frozenset(PeerID(peer).to_base58() for peer in peers)


def reports_in(record: Any) -> dict[Any, LocalTrainingProgress]:
    """The reports in what the DHT has found, by their public keys."""
    found = record.value if isinstance(record, ValueWithExpiration) else record
    return parse_reports(found) if isinstance(found, Mapping) else {}


# -- tracker ---------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: Seconds for which a peer's last report counts. A peer that is there renews it after half of that, so one that
#: left without a goodbye is forgotten within this time (hivemind's own default is 60).
METADATA_EXPIRATION = 20.0

#: Seconds between two looks whether something is over that nobody tells the tracker.
_TICK = 0.02

#: Seconds between two looks at least: that others have ended the epoch is to be seen at once (hivemind's own is 0.5).
MIN_REFRESH_PERIOD = 0.1

#: Seconds between two looks while this peer ends an epoch, in case somebody it waits for has gone. A look costs the
#: peers of a run a core for about as long as a round of averaging does, and would slow it down.
ENDING_REFRESH_PERIOD = 0.5

#: Seconds between two looks for others while this peer believes to be alone (hivemind's own default is 3).
DEFAULT_REFRESH_PERIOD = 0.5

#: Seconds without a batch after which a peer takes itself off the list, unless its batches take about as long: it may
#: validate, upload a file or be stuck, and each round of the others would wait for it.
SILENCE = 10.0

#: Seconds without an answer after which a peer has gone whose line is short, unless told otherwise.
GONE_AFTER = 4.0


class ProgressTracker(_ProgressTracker):
    """``hivemind``'s ``ProgressTracker`` whose lock is never held over a read of the DHT, and that can step aside.

    :param on_look: called on the tracker's thread each time the swarm was looked at, with the newest reports of the
      other peers that are there, and the ids of those that have gone without a goodbye; gives the ids of those whose
      reports do not count
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        *args: Any,
        metadata_expiration: float = METADATA_EXPIRATION,
        min_refresh_period: float = MIN_REFRESH_PERIOD,
        default_refresh_period: float = DEFAULT_REFRESH_PERIOD,
        max_refresh_period: float = MAX_REFRESH_PERIOD,
        on_look: OnLook | None = None,
        **kwargs: Any,
    ):
        self._announced, self._aside = threading.Event(), threading.Event()
        #: what was reported last, and whether the next report may be due earlier than it was
        self._reported: LocalTrainingProgress | None = None
        self._hurries = threading.Event()
        self._lock_counting = threading.Lock()
        self._counted_at, self._longest_pause = math.inf, 0.0
        self._batch_size = 0
        #: whether all peers train on only when this one has ended its epoch, too
        self.is_waited_for = False
        #: seconds without an answer after which a peer has gone whose line is short
        self.gone_after = GONE_AFTER
        #: who is on the swarm's list, and who of them is there
        self.list = PeerList(dht)
        self.list.on_look = on_look
        self._asked_at = -math.inf
        #: of all peers together, as of the last look
        self._swarm_samples_per_second = 0.0
        self._failure: Exception | None = None
        super().__init__(
            dht,
            *args,
            metadata_expiration=metadata_expiration,
            min_refresh_period=min_refresh_period,
            default_refresh_period=default_refresh_period,
            max_refresh_period=max_refresh_period,
            **kwargs,
        )
        know_run(dht, self.prefix)

    def set_live(self, *, performance_ema_alpha: float, **settings: Any) -> None:
        """Change settings while it works.

        :param performance_ema_alpha: weight of the newest measurement of this peer's speed
        :param settings: of those in :data:`LIVE_SETTINGS`; the others get their defaults. All else stays as it is
        """
        self.performance_ema.alpha = performance_ema_alpha
        for name, default in LIVE_SETTINGS.items():
            setattr(self, name, settings.get(name, default))

    def announce(self) -> None:
        """Put this peer on the swarm's list before its first samples, and look at once who else is there.

        Peers that start together then share their first epoch, instead of each going through it alone.
        """
        self._announced.set()
        self._report_at_once()
        self.look_at_once()

    def look_at_once(self) -> None:
        """Look who is there, without waiting for it."""
        self.global_progress.next_fetch_time = 0.0
        self.global_state_updated.set()

    def step_aside(self) -> None:
        """Take this peer off the swarm's list, so that no group waits for it, until it reports progress again."""
        self._aside.set()
        self._report_at_once()

    def _report_at_once(self) -> None:
        self._hurries.set()
        self.should_report_progress.set()

    def shutdown(self, timeout: float | None = None) -> None:
        self.shutdown_triggered.set()
        self._report_at_once()
        try:
            super().shutdown(timeout)
        except OSError as e:  # the DHT was closed first
            logger.debug(f"No goodbye to {self.training_progress_key}: {e!r}")

    def report_local_progress(self, local_epoch: int, samples_accumulated: int, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise SwarmError(f"the thread that follows the swarm has ended with {self._failure!r}") from self._failure
        if self._aside.is_set():
            self._aside.clear()
        with self._lock_counting:
            self._batch_size = max(0, samples_accumulated - self.local_progress.samples_accumulated)
            super().report_local_progress(local_epoch, samples_accumulated, *args, **kwargs)
        if self._report_due_after < self.list.pace.report_period:
            self._hurries.set()
        pause = time.monotonic() - self._counted_at  # none before the first
        self._longest_pause = max(0.9 * self._longest_pause, pause)
        self._counted_at = time.monotonic()

    def _get_local_progress(self, local_epoch: int, samples_accumulated: int) -> LocalTrainingProgress:
        # hivemind/optim/progress_tracker.py checks the types of its own numbers: a third of what a step takes
        return LocalTrainingProgress.construct(
            peer_id=self.dht.peer_id.to_bytes(),
            epoch=local_epoch,
            samples_accumulated=samples_accumulated,
            samples_per_second=self.performance_ema.samples_per_second,
            time=get_dht_time(),
            client_mode=self.client_mode,
        )

    @property
    def _is_away(self) -> bool:
        """Whether it has stepped aside, or has counted no batch for long, by its own longest pauses."""
        return self._aside.is_set() or time.monotonic() - self._counted_at > max(SILENCE, 2 * self._longest_pause)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer can end its epoch right away. With others, also when they are estimated to be done."""
        progress = self.global_progress
        if progress.num_peers > 1:
            return super().ready_to_update_epoch or get_dht_time() + self._early_by >= progress.eta_next_epoch
        # nothing to be estimated: an epoch of a peer that is alone has as many samples as it should
        return progress.epoch > self.local_progress.epoch or progress.samples_accumulated >= self.target_batch_size

    @property
    def _early_by(self) -> float:
        """Seconds before the end of an epoch in which this peer begins no further batch, if all others wait for it.

        Half a batch: it ends its epoch at whichever end of a batch is nearest to that of the epoch. hivemind's peers
        begin a last one in any case, for which all wait, and have some samples more than they should in each epoch.
        """
        if not self.is_waited_for:
            return 0.0
        return self._batch_size / self.performance_ema.samples_per_second / 2

    @property
    def on_look(self) -> OnLook | None:
        """Called on the tracker's thread each time the swarm was looked at."""
        return self.list.on_look

    @on_look.setter
    def on_look(self, on_look: OnLook | None) -> None:
        self.list.on_look = on_look

    @property
    def look(self) -> Look | None:
        """The newest look at the swarm, for any thread to read; ``None`` before the first."""
        return self.list.look

    @property
    def unanswered_for(self) -> float:
        """Seconds for which the DHT has not answered; 0 while it is not asked, and after the end."""
        answered_at = -math.inf if self.look is None else self.look.taken_at
        is_asked = self._asked_at > answered_at and not self.shutdown_triggered.is_set()
        return time.monotonic() - self._asked_at if is_asked else 0.0

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        return self._estimate(reports_in(metadata))

    def update_epoch(self, new_epoch: int | None = None) -> int:
        # hivemind/optim/progress_tracker.py:update_epoch knows no end of the epoch before the next look. Over a long
        # line, that may take longer than a short epoch, which this peer would then miss
        is_first = new_epoch is None or new_epoch > self.global_progress.epoch
        reached: int = super().update_epoch(new_epoch)
        if is_first and self.global_progress.num_peers > 1 and self._swarm_samples_per_second:
            self.global_progress.eta_next_epoch = (
                get_dht_time() + self.target_batch_size / self._swarm_samples_per_second
            )
        return reached

    def _estimate(self, reports: dict[Any, LocalTrainingProgress]) -> GlobalTrainingProgress:
        # hivemind would end at the first report that is none. It would count its own samples as it last reported them,
        # and take somebody else for itself, being alone, where it is not on the list yet
        if not self._is_away:
            reports = {**reports, self._local_public_key: self.local_progress}
        self._swarm_samples_per_second = sum(report.samples_per_second for report in reports.values())
        entries = {key: ValueWithExpiration(report.dict(), math.inf) for key, report in reports.items()}
        progress = super()._parse_swarm_progress_data(entries)
        if progress.num_peers <= 1 or seconds_left(progress) is None:
            # hivemind would wait for max_refresh_period: it finds a peer, which is this one, or peers that have just
            # begun and whose speed is not known yet, and whose first epoch is over by then
            progress.next_fetch_time = get_dht_time() + self.default_refresh_period
        soonest = min(self.list.pace.look_period, self.max_refresh_period)
        progress.next_fetch_time = max(progress.next_fetch_time, get_dht_time() + soonest)
        return progress

    def run(self) -> None:
        # Replaces hivemind/optim/progress_tracker.py:run, which never closes its loop: three descriptors for each
        # training, and an error when the loop is collected as garbage after its sockets
        try:
            asyncio.run(self._report_and_fetch())
        finally:
            self.shutdown_complete.set()

    async def _report_and_fetch(self) -> None:
        try:
            await asyncio.gather(self._progress_reporter(), self._progress_fetcher())
        except Exception as e:
            self._failure = e  # surfaces at the next batch: nobody would follow the others any more
        finally:
            self._report_at_once()
            for event in (self.shutdown_triggered, self.global_state_updated):
                event.set()  # threads of the loop wait for them, and the end of this process for those

    async def _progress_reporter(self) -> None:
        # Replaces hivemind/optim/progress_tracker.py:_progress_reporter, which cannot be told to withdraw its report
        # and ends with a traceback when the DHT is closed first.
        loop, stored = asyncio.get_running_loop(), None
        last_report, last_active_epoch, self._reported = -math.inf, -math.inf, self.local_progress
        while not self.shutdown_triggered.is_set():
            pause = last_report + min(self.metadata_expiration, SILENCE) / 2 - time.monotonic()
            await loop.run_in_executor(None, self.should_report_progress.wait, max(0.0, pause))
            self.should_report_progress.clear()
            while not self.shutdown_triggered.is_set():
                pause = last_report + self._report_due_after - time.monotonic()
                if stored is not None and not stored.done():
                    await asyncio.sleep(_TICK)
                elif pause > 0:
                    await loop.run_in_executor(None, self._hurries.wait, pause)
                    self._hurries.clear()
                else:
                    break
            progress, last_report = self.local_progress, time.monotonic()
            if progress.samples_accumulated > 0 or progress.epoch != self._reported.epoch or self._announced.is_set():
                self._announced.clear()
                last_active_epoch = self.global_epoch
            self._reported = progress
            if last_active_epoch < self.global_epoch - 1:
                continue  # an auxiliary peer, or one that has long stopped training
            try:
                stored = self.dht.store(
                    key=self.training_progress_key,
                    subkey=self._local_public_key,
                    value=None if self._is_away else progress.dict(),
                    expiration_time=get_dht_time() + self.metadata_expiration,
                    return_future=True,
                )
            except OSError as e:
                logger.debug(f"No longer reporting {self.training_progress_key}: {e!r}")
                return

    @property
    def _report_due_after(self) -> float:
        """Seconds from the last report to the next one, if nothing happens in between."""
        if self._announced.is_set() or self._aside.is_set():
            return 0.0
        return self.list.pace.report_due_after(self.local_progress, self._reported or self.local_progress)

    def __del__(self) -> None:
        """Nothing: a tracker at work is held by its thread, and hivemind's method fails after a failed constructor."""

    async def _progress_fetcher(self) -> None:
        # Replaces hivemind/optim/progress_tracker.py:_progress_fetcher, which reads the DHT under the lock that the
        # training thread needs at the end of each epoch: 0.2 to 0.8 s of standing still.
        loop = asyncio.get_running_loop()
        shutdown = loop.run_in_executor(None, self.shutdown_triggered.wait)
        while not self.shutdown_triggered.is_set():
            until = self.global_progress.next_fetch_time - get_dht_time()
            # no longer than any look was ever put off: the clock may have been set back meanwhile
            pause = min(max(0.0, until), max(self.max_refresh_period, self.list.pace.look_period))
            if await loop.run_in_executor(None, self.global_state_updated.wait, pause):
                self.global_state_updated.clear()
                continue
            if self.lock_global_progress.locked() and time.monotonic() - self._asked_at < ENDING_REFRESH_PERIOD:
                await asyncio.sleep(_TICK)
                continue
            self._asked_at = time.monotonic()
            try:
                read = self.dht.get(self.training_progress_key, latest=True, return_future=True)
            except OSError as e:  # the DHT was closed first
                logger.debug(f"No longer reading {self.training_progress_key}: {e!r}")
                break
            reading = asyncio.ensure_future(answer_of(read, ENDING_REFRESH_PERIOD))
            while not reading.done() and not shutdown.done():
                self.list.look_for_the_gone(self.gone_after, self._asked_at)
                await asyncio.wait(
                    {reading, shutdown}, timeout=ENDING_REFRESH_PERIOD, return_when=asyncio.FIRST_COMPLETED
                )
            if not reading.done():
                reading.cancel()
                break
            if reading.result() is not UNANSWERED:
                self._take_in(reading.result())

    def _take_in(self, record: Any) -> None:
        reports = self.list.take_in(record, self._local_public_key, self.gone_after)
        if not self.lock_global_progress.acquire(blocking=False):
            return  # this peer is ending its epoch, perhaps waiting for one that has left: keep looking meanwhile
        try:
            # parsed under the locks, against the epoch and the samples that this peer has reached by now
            with self._lock_counting:
                self.global_progress = self._estimate(reports)
            self.fetched_global_progress_this_epoch.set()
        finally:
            self.lock_global_progress.release()


#: What of a tracker can be changed while it works, with the defaults.
LIVE_SETTINGS = {
    parameter.name: parameter.default
    for method in (_ProgressTracker.__init__, ProgressTracker.__init__)
    for parameter in inspect.signature(method).parameters.values()
    if parameter.name.endswith("_period") or parameter.name.startswith(("expected_drift_", "metadata_"))
}
