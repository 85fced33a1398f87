"""Samples the swarm while a run trains: peers, speed, traffic and memory, into the history."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from hivenb.engine.process.interrupts import BackgroundThread
from hivenb.engine.progress.peer_reports import Look, PeerInfo
from hivenb.errors import SwarmError
from hivenb.figures.history import History
from hivenb.figures.measured_traffic import Traffic
from hivenb.swarm.agreement.public_names import PublicNames
from hivenb.swarm.members import MemberList, Presence
from hivenb.swarm.peer_id import short_id
from hivenb.system.process_tree import own_descendants

if TYPE_CHECKING:
    from hivenb.engine.progress.tracker import ProgressTracker
    from hivenb.swarm.swarm import Swarm

#: Seconds between two samples.
INTERVAL = 1.0

#: Seconds that the DHT is given to answer before the history says that it does not, and between two times that it does.
ANSWER_TIMEOUT = 10.0


class Monitor:
    """A thread that notes once a second how the swarm is, so that nobody else has to wait for the DHT.

    Who is there, it knows from the run's tracker. Only until that has looked first, it reads the DHT itself.

    It records the series ``peers``, ``samples_per_second`` and ``swarm_samples_per_second``; ``memory`` and, with
    CUDA, ``gpu_memory``, in bytes; ``bytes_sent`` and ``bytes_received``, which are totals since the run was first
    started: :func:`hivenb.figures.measured_traffic.per_epoch` makes of them what an epoch has cost, its ``per_second``
    how much flows. Where traffic cannot be measured these two are left out.

    :param swarm: the swarm to watch
    :param run_id: the run to watch in it
    :param history: where to write
    :param member_list: where to keep who takes part; one of its own unless given
    :param target_batch_size: gives the samples that make an epoch, as of now
    :param samples: gives those that this peer has trained on so far
    :param epoch: gives the swarm epoch that this peer is at
    """

    def __init__(
        self,
        swarm: Swarm,
        run_id: str,
        history: History,
        member_list: MemberList | None = None,
        target_batch_size: Callable[[], int] = lambda: 1,
        samples: Callable[[], int] = lambda: 0,
        epoch: Callable[[], int] = lambda: 0,
    ):
        self._swarm, self._run_id, self._history = swarm, run_id, history
        self._member_list = MemberList() if member_list is None else member_list
        self._target_batch_size, self._samples, self._epoch = target_batch_size, samples, epoch
        self._names: PublicNames | None = None
        #: called after each sample with the peers that are here; on this thread, which may wait for the DHT
        self.on_look: Callable[[Sequence[PeerInfo]], None] | None = None
        #: gives the peers for which no round waits, by their ids, with the reasons
        self.excluded_peers: Callable[[], Mapping[str, str]] = dict
        #: gives the run's tracker; ``None`` while there is none
        self.tracker: Callable[[], ProgressTracker | None] = lambda: None
        #: what has ended this thread before its time, an error of hivenb's own
        self.error: Exception | None = None
        #: called then, on this thread
        self.on_error: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._troubled_at, self._told_of_clock = -math.inf, False
        self._peers: tuple[PeerInfo, ...] = ()
        self._traffic: Traffic | None = None
        self._sent_before = self._received_before = 0.0
        self._counting = threading.Lock()
        self._thread = BackgroundThread(target=self._watch, name="hivenb-monitor")

    @property
    def peers(self) -> tuple[PeerInfo, ...]:
        """Peers that are here, as last seen at most a few seconds ago; none that has gone."""
        return self._peers

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def on_epoch(self) -> None:
        """Note what has been sent and received until now, when a swarm epoch has ended at this peer."""
        with contextlib.suppress(SwarmError):  # training will find out for itself
            self._count_traffic()

    def close(self) -> None:
        """Watch no longer. Returns when the last sample is written."""
        self._ended.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        self._member_list.stop_watching()

    def _watch(self) -> None:
        try:
            self._watch_until_closed()
        except Exception as e:  # surfaces as the end of the run: nobody would follow the host any more
            self.error = e
            self.on_error()

    def _watch_until_closed(self) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            try:
                self._sample()
                if self.on_look is not None:
                    self.on_look(self._peers)
            except SwarmError as e:
                self._mark_trouble(e)
            except (OSError, TypeError):  # the latter from a pipe that is closed while it is written to
                if self._swarm.is_open:
                    raise
                return  # the DHT was closed under our hands: the run is being torn down
            self._ended.wait(max(0.0, INTERVAL - (time.monotonic() - started)))

    def _mark_trouble(self, trouble: SwarmError) -> None:
        if time.monotonic() - self._troubled_at >= ANSWER_TIMEOUT:
            self._history.mark("run", f"the swarm cannot be read: {trouble}")
            self._troubled_at = time.monotonic()

    def _newest_look(self) -> Look:
        """The tracker's, or one of this thread's own while there is no other.

        :raises SwarmError: if the DHT has ended, or does not answer
        """
        tracker = self.tracker()
        if tracker is None or tracker.look is None or not self._swarm.is_open:  # it then says why
            return Look(time.monotonic(), self._swarm.peers(self._run_id))
        if (seconds := tracker.unanswered_for) > ANSWER_TIMEOUT:
            raise SwarmError(f"the DHT has not answered for {seconds:.0f} s; is its process overloaded or gone?")
        return tracker.look

    def _sample(self) -> None:
        look = self._newest_look()
        if (trouble := self._swarm.dht.clock_trouble) is not None and not self._told_of_clock:
            self._history.mark("run", trouble)
        self._told_of_clock = trouble is not None
        names, routes = self._look_for_names(), self._swarm.dht.routes
        self._swarm.local.end_banned(self._swarm.banned)
        self._member_list.update(look, self._target_batch_size(), names, self.excluded_peers(), routes)
        peers = self._member_list.present
        if self._peers:  # those of the first look were there already
            self._mark_changes(_others(self._peers), _others(peers))
        self._peers = peers
        if not peers:
            return  # the run has not announced itself yet
        epoch = max((p.epoch for p in peers), default=0)
        own = next((p for p in peers if p.is_self), None)
        figures = {
            "peers": len(peers),
            "swarm_samples_per_second": sum(p.samples_per_second for p in peers),
            "memory": resident_bytes(),
        }
        if own is not None:
            figures["samples_per_second"] = own.samples_per_second
        if (allocated := gpu_bytes()) is not None:
            figures["gpu_memory"] = allocated
        for name, value in figures.items():
            self._history.record(name, value, epoch=epoch, samples=self._samples())
        self._count_traffic()

    def _look_for_names(self) -> dict[str, str]:
        if self._names is None:
            self._names = PublicNames(self._swarm.dht, self._run_id, self._swarm.public_name or "")
        return self._names.look()

    def _count_traffic(self) -> None:
        with self._counting:
            if self._traffic is None or self._traffic.dht_pid != self._swarm.dht.pid:  # it was started anew
                last = self._history.snapshot().last
                self._sent_before, self._received_before = last("bytes_sent") or 0.0, last("bytes_received") or 0.0
                self._traffic = Traffic(self._swarm.dht.pid)
            if (exchanged := self._traffic.read()) is not None:
                totals = (self._sent_before + exchanged.sent, self._received_before + exchanged.received)
                for name, total in zip(("bytes_sent", "bytes_received"), totals, strict=True):
                    self._history.record(name, total, epoch=self._epoch(), samples=self._samples())

    def _mark_changes(self, before: set[str], after: set[str]) -> None:
        gone = {member.peer.peer_id for member in self._member_list.members if member.presence is Presence.GONE}
        for peer_id in sorted(after - before):
            self._history.mark("peer", f"peer {short_id(peer_id)} joined")
        for peer_id in sorted(before - after):
            how = " without a goodbye" if peer_id in gone else ""
            self._history.mark("peer", f"peer {short_id(peer_id)} left{how}")


def _others(peers: tuple[PeerInfo, ...]) -> set[str]:
    return {peer.peer_id for peer in peers if not peer.is_self}


def resident_bytes() -> int:
    """Bytes of main memory that this process uses now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int | None:
    """Bytes of GPU memory that tensors of this process occupy now; ``None`` if it has not used CUDA."""
    torch = sys.modules.get("torch")  # who has not imported it has not used it
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))


# -- memory use ------------------------------------------------------------------------------------------------------
#
# How much memory a training takes, on its own: a process itself keeps what it once had.


#: Seconds between two searches for processes that have been started meanwhile.
_SEARCH_INTERVAL = 3.0


class MemoryUse:
    """The most memory that this process, and what it starts, have taken since this was made.

    What was there before does not count, nor do peers on this machine. To begin with, what nobody needs any longer is
    given back to the system, so that one training after the other is measured from the same ground. In main memory, a
    peak between two looks is not seen; that of GPUs is counted by torch, so nobody else may reset it meanwhile.
    """

    def __init__(self) -> None:
        _give_back()
        cuda = _cuda_in_use()
        for device in [] if cuda is None else range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)
        self._allocated = 0 if cuda is None else _total(cuda.memory_allocated)
        self._resident = resident_bytes()
        self._others = own_descendants()
        self._ours: frozenset[psutil.Process] = frozenset()
        self._searched_at = float("-inf")
        #: bytes of main memory at the look that saw the most
        self.peak = 0

    @property
    def gpu_peak(self) -> int | None:
        """Bytes that tensors of this process have taken on GPUs at once; ``None`` if it uses none."""
        cuda = _cuda_in_use()
        return None if cuda is None else _total(cuda.max_memory_allocated) - self._allocated

    def look(self) -> None:
        """Take a sample; takes some milliseconds."""
        if time.monotonic() >= self._searched_at + _SEARCH_INTERVAL:
            self._ours = own_descendants() - self._others
            self._searched_at = time.monotonic()
        here = resident_bytes() - self._resident
        self.peak = max(self.peak, here + sum(map(_unshared_bytes, self._ours)))


def let_go_of_tensors(error: BaseException | None) -> None:
    """Let an error, and those that it came of, hold nothing that its frames have computed, on a GPU above all.

    Where it was raised stays known; what was in the variables there does not.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_of_memory(error: BaseException | None) -> bool:
    """Whether memory has run out, on a device or here."""
    # torch's is in several places, one in each of its versions
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _unshared_bytes(process: psutil.Process) -> int:
    """What would be free if that process ended; 0 if it has."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def _give_back() -> None:
    gc.collect()
    if (cuda := _cuda_in_use()) is not None:
        cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def _cuda_in_use() -> Any:
    torch = sys.modules.get("torch")  # who has not imported it has not used it
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _total(figure: Any) -> int:
    return sum(figure(device) for device in range(_cuda_in_use().device_count()))
