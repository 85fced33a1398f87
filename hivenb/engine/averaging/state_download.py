"""The state that peers download: how often one may have it, who is asked for another one, and why that is believed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind tells a stream by typing's own class

import numpy as np
import torch
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_logger
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.streaming import combine_from_streaming

from hivenb.engine.averaging.averager import Averager
from hivenb.engine.averaging.finite import are_finite
from hivenb.engine.network.streams import CLOSED_WITHIN, STATE_LEFT_OPEN, is_end_of_state, left_open, with_end
from hivenb.engine.network.untrusted_values import BoundedSerializer, finite, raw, sequence, whole
from hivenb.errors import UnbelievedStateError

# -- state witness ---------------------------------------------------------------------------------------------------
#
# Whether two peers tell the same state: by numbers at random places, which whoever asks has drawn.
#
# The states of honest peers are hardly ever equal bit by bit: an average is added to what each has as a difference,
# codecs round, and with steps in the background, or local updates, peers are a step apart. Between two states of one
# epoch the distance is a small part of their norm all the same; a state that is made up is far from all others.


#: Numbers of a state that are compared, and of each of its tensors at least and at most.
SAMPLE, LEAST_OF_TENSOR, MOST_OF_TENSOR = 2**16, 4, 256

#: Distance of two states of one epoch at most, as a part of the larger norm. With each epoch between them, what is left
#: to the whole of it becomes as much smaller: states that have nothing to do with each other are as far apart as that.
TOLERANCE = 0.5

#: Epochs by which the states that are compared may differ.
MOST_EPOCHS_APART = 2

#: Tensors of a state at most.
MAX_TENSORS = 100_000

_SEED_BYTES = 16


@dataclass(frozen=True)
class Question:
    """What a peer wants to know of another one's state.

    :param seed: of the random places
    :param count: tensors that are looked at, from the first one on: the parameters
    """

    seed: bytes
    count: int

    def pack(self) -> bytes:
        """As it travels."""
        return bytes(BoundedSerializer.dumps([self.seed, self.count]))

    @classmethod
    def parse(cls, packed: bytes) -> Question:
        """A question as it came.

        :raises ValueError: if it is none
        """
        seed, count = sequence(BoundedSerializer.loads(packed), 2, least=2)
        return cls(raw(seed, _SEED_BYTES, least=_SEED_BYTES), whole(count, 1, MAX_TENSORS))


@dataclass(frozen=True, eq=False)
class Statement:
    """What a peer tells of its state.

    :param epoch: of the state
    :param sizes: numbers in each tensor
    :param values: those at the random places, tensor by tensor, as 64-bit floats
    """

    epoch: int
    sizes: tuple[int, ...]
    values: np.ndarray

    def pack(self) -> bytes:
        """As it travels."""
        return bytes(BoundedSerializer.dumps([self.epoch, list(self.sizes), self.values.astype("<f4").tobytes()]))

    @classmethod
    def parse(cls, packed: bytes) -> Statement:
        """A statement as it came.

        :raises ValueError: if it is none
        """
        epoch, sizes, values = sequence(BoundedSerializer.loads(packed), 3, least=3)
        counted = tuple(whole(size) for size in sequence(sizes, MAX_TENSORS))
        expected = sum(places_in(size, len(counted)) for size in counted)
        numbers = np.frombuffer(raw(values, 4 * expected, least=4 * expected), "<f4").astype(np.float64)
        return cls(whole(epoch), counted, numbers)

    def contradicts(self, other: Statement) -> bool | None:
        """Whether two states cannot both be of one swarm; ``None`` if they cannot be compared.

        :param other: the answer to the same question
        """
        apart = abs(self.epoch - other.epoch)
        if self.sizes != other.sizes or apart > MOST_EPOCHS_APART:
            return None
        is_finite, is_theirs = np.isfinite(self.values), np.isfinite(other.values)
        if (is_finite & ~is_theirs).any():
            return None  # whose own state is broken is no witness
        both = is_finite & is_theirs
        if not np.array_equal(self.values[~both], other.values[~both]):
            return True  # a mask is the same at all peers
        own, theirs = self.values[both], other.values[both]
        scale = max(float(np.linalg.norm(own)), float(np.linalg.norm(theirs)))
        return float(np.linalg.norm(own - theirs)) > (1 - TOLERANCE ** (1 + apart)) * scale


def places_in(size: int, tensors: int) -> int:
    """How many numbers of a tensor are looked at.

    :param size: numbers in the tensor
    :param tensors: in the state
    """
    return min(size, MOST_OF_TENSOR, max(LEAST_OF_TENSOR, SAMPLE // tensors))


@torch.no_grad()
def make_statement(question: Question, epoch: Any, tensors: Sequence[torch.Tensor]) -> Statement:
    """Answer a question about a state.

    :param question: of another peer
    :param epoch: of the state
    :param tensors: of the state; there may be more than are asked for
    :raises ValueError: if the state is of no epoch, or there are fewer
    """
    asked = list(tensors[: question.count])
    if len(asked) < question.count:
        raise ValueError(f"there are {len(asked)} tensors, and not {question.count}")
    generator = np.random.default_rng(list(question.seed))
    found = []
    for tensor in asked:
        flat = tensor.detach().reshape(-1)
        places = generator.integers(0, max(1, flat.numel()), places_in(flat.numel(), len(asked)))
        picked = flat[torch.from_numpy(places)]
        found.append((picked.abs() if picked.is_complex() else picked).to(torch.float64).cpu().numpy())
    values = np.concatenate(found).astype(np.float32).astype(np.float64)
    return Statement(whole(epoch), tuple(tensor.numel() for tensor in asked), values)


def verdict(agreeing: int, contradicting: int) -> bool | None:
    """Whether to believe a state, by how many others tell the same and another one; ``None`` if it is a tie.

    :param agreeing: peers that tell the same, without the one that sent it
    :param contradicting: peers that tell another
    """
    if not contradicting or agreeing + 1 > contradicting:
        return True
    return None if agreeing + 1 == contradicting else False


# -- asking witnesses ------------------------------------------------------------------------------------------------
#
# Others are asked for a word about a state while it is on its way from the peer that serves it.


logger = get_logger(__name__)

#: Peers that are asked for a word about the state of another, at most.
MOST_WITNESSES = 3

#: Seconds that a witness is given.
WITNESS_WITHIN = 10.0

#: Seconds between two questions of one peer about this one's state.
ASKED_AGAIN_AFTER = 0.3


@dataclass(frozen=True)
class Testimony:
    """What a peer has told of its own state.

    :param peer: its id
    :param question: that it was asked, and nobody else: who serves a state that fits it has to know it
    :param answer: as it came
    """

    peer: bytes
    question: Question
    answer: bytes

    def contradicts(self, epoch: Any, tensors: Sequence[torch.Tensor]) -> bool | None:
        """Whether another state cannot be of the same swarm; ``None`` if that cannot be told.

        :param epoch: of that state
        :param tensors: of it, no fewer than were asked for
        """
        try:
            statement = Statement.parse(self.answer)
        except (ValueError, TypeError) as e:
            logger.debug(f"What {PeerID(self.peer)} tells of its state cannot be read: {e!r}")
            return None
        return make_statement(self.question, epoch, tensors).contradicts(statement)


# -- download pace ---------------------------------------------------------------------------------------------------
#
# How often another peer may download the state: as often as one that joins has to, and not in a loop.


#: Seconds for each download, in the long run.
PERIOD = 1.0

#: Downloads that a peer may make at once before that; one that joins may need several until it is at the newest epoch.
AT_ONCE = 8

#: Peers that are remembered.
MOST_REMEMBERED = 1024


class DownloadPace:
    """Lets each peer wait for its turn. It is not refused, as one that joins would then end. On one event loop.

    :param clock: tells the time, in seconds
    :param sleep: waits for so many
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ):
        self._clock, self._sleep = clock, sleep
        self._paid_until: dict[PeerID, float] = {}
        self._at_work: dict[PeerID, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def turn(self, peer: PeerID) -> AsyncIterator[None]:
        """Wait until a peer may download; one of its downloads at a time."""
        lock = self._at_work.setdefault(peer, asyncio.Lock())
        try:
            async with lock:
                await self._sleep(max(0.0, self._pay(peer) - AT_ONCE * PERIOD))
                yield
        finally:
            if not lock.locked():
                self._at_work.pop(peer, None)

    def _pay(self, peer: PeerID) -> float:
        """Seconds by which a peer's downloads are ahead of the time, with this one."""
        now = self._clock()
        if len(self._paid_until) >= MOST_REMEMBERED:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        self._paid_until[peer] = max(self._paid_until.get(peer, now), now) + PERIOD
        return self._paid_until[peer] - now


# -- state download --------------------------------------------------------------------------------------------------


#: Peers that are asked for their states in one download, at most.
MOST_SOURCES = 8

#: Seconds within which the averager's process says that the time for a download is up.
ANSWERS_WITHIN = 5.0

#: Epochs by which a state may be ahead of what the others report: reports come late.
EPOCHS_AHEAD = 2

#: Bytes by which a state may be larger than this peer's own would be as 64-bit numbers.
SLACK = 2**24


@dataclass(frozen=True)
class Wanted:
    """What to download.

    :param newest: the newest epoch that a peer can be at; a higher priority counts no more
    :param refused: ids of peers whose states are not to be had
    :param most_bytes: of a state
    :param compared: tensors of it about which others are asked, too
    :param timeout: seconds that it may take; with it, the next message is waited for only as long as any chunk
    """

    newest: float
    refused: frozenset[bytes]
    most_bytes: float
    compared: int
    timeout: float | None


@dataclass(frozen=True)
class Download:
    """A state as a peer has sent it.

    :param source: id of that peer
    :param metadata: what it has sent with its tensors
    :param tensors: of the state
    :param testimonies: what others told of their own states meanwhile
    """

    source: bytes
    metadata: Any
    tensors: Sequence[torch.Tensor]
    testimonies: tuple[Testimony, ...] = ()

    @property
    def epoch(self) -> Any:
        """As the peer has sent it; ``None`` if it has not."""
        return self.metadata.get("epoch") if isinstance(self.metadata, dict) else None


class SharesState(Averager):
    """Base to put *behind* a class of hivemind's averagers: a state is taken over only if it can be believed.

    It tells newcomers of its state, too, and asks others for theirs.
    """

    #: the parameters, which stand before all else in a state; none of an averager of gradients
    main_parameters: Sequence[torch.Tensor] = ()

    #: gives the newest epoch of the other peers, as they report it, and waits a while for one that is expected;
    #: ``None`` if it is not known
    newest_epoch: Callable[[int], int] | None = None

    #: whose state did not come in time; others are asked first
    _too_slow: frozenset[PeerID] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any):
        # in the averager's process: when each peer was asked for a word, and has asked for one
        self._last_asked: dict[PeerID, float] = {}
        self._asked_at: dict[bytes, float] = {}
        self._downloads = DownloadPace()
        super().__init__(*args, **kwargs)

    def numbers_in_state(self) -> float:
        """Numbers in this peer's own state, of which that of another one has about as many; infinity if not known."""
        return math.inf

    # -- in the process that trains -----------------------------------------------------------------------------

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        # Replaces hivemind/averaging/averager.py:load_state_from_peers, which takes whatever the peer sends that claims
        # the highest priority
        if not wait:
            return super().load_state_from_peers(wait=wait, timeout=timeout)
        refused: dict[bytes, str] = {}
        for _ in range(MOST_SOURCES):
            most_bytes = 16 * self.numbers_in_state() + SLACK
            compared = len(self.main_parameters)
            loaded = self._ask_process(Wanted(self._newest() + 1, frozenset(refused), most_bytes, compared, timeout))
            if loaded is None:
                break
            reason = self._why_refused(loaded)
            if reason is None:
                return self._accept(loaded)
            refused[loaded.source] = reason
            logger.warning(f"The state of peer {PeerID(loaded.source)} was not taken over: {reason}")
        if refused:
            told = "; ".join(f"{reason} (peer {PeerID(peer)})" for peer, reason in refused.items())
            raise UnbelievedStateError(f"no peer sends a state that can be believed: {told}")
        return None

    def _accept(self, loaded: Download) -> tuple[Any, Sequence[torch.Tensor]]:
        """What hivemind's class, which knows of no extensions, is to take over of a state."""
        return loaded.metadata, loaded.tensors

    def _why_refused(self, loaded: Download) -> str | None:
        """Why a state is not to be taken over, in words; ``None`` if it is."""
        if (where := self._where_not_finite(loaded)) is not None:
            return f"it holds nan or inf {where}"
        if loaded.epoch is None:
            return None  # an averager of gradients
        try:
            epoch = whole(loaded.epoch)
        except ValueError:
            return f"its epoch is {str(loaded.epoch)[:40]}"
        if epoch > (newest := self._newest(epoch)) + EPOCHS_AHEAD:
            return f"it claims to be of epoch {epoch}, and the others are at epoch {newest:.0f}"
        return self._why_contradicted(loaded)

    def _where_not_finite(self, loaded: Download) -> str | None:
        tensors = self._to_be_finite(loaded)
        own = [*self.main_parameters, *(None for _ in tensors)]
        for number, (tensor, mine) in enumerate(zip(tensors, own, strict=False), start=1):
            has_numbers = tensor.is_floating_point() or tensor.is_complex()
            if has_numbers and not are_finite([tensor]) and not _is_mask(tensor, mine):
                return f"in tensor {number} of {len(tensors)}"
        values = loaded.metadata.get("optimizer_metadata") if isinstance(loaded.metadata, dict) else None
        numbers = [one.get("value") for one in values if isinstance(one, dict)] if isinstance(values, list) else []
        return None if all(map(_is_no_bad_number, numbers)) else "among the optimizer's settings"

    def _to_be_finite(self, loaded: Download) -> Sequence[torch.Tensor]:
        """The tensors of a state in which nan and inf are no good, those of the parameters first."""
        return loaded.tensors

    def _why_contradicted(self, loaded: Download) -> str | None:
        if len(loaded.tensors) < len(self.main_parameters):
            return None  # whoever applies it says so
        said = {one.peer: one.contradicts(loaded.epoch, loaded.tensors) for one in loaded.testimonies}
        against = [peer for peer, contradicts in said.items() if contradicts]
        is_believed = verdict(sum(contradicts is False for contradicts in said.values()), len(against))
        if is_believed or (is_believed is None and self._has_invited(loaded.source, against)):
            for peer in against:
                logger.warning(f"Peer {PeerID(peer)} tells another state than the others, and is not believed")
            return None
        others = ", ".join(str(PeerID(peer)) for peer in against)
        return f"{others} {'tells' if len(against) == 1 else 'tell'} another one, and no more peers tell this one"

    def _has_invited(self, source: bytes, against: Sequence[bytes]) -> bool:
        """Whether that peer has led this one into the swarm, and none of the others."""
        ids = (str(one).rpartition("/p2p/")[2] for one in self.dht.initial_peers or ())
        inviting = {PeerID.from_base58(one).to_bytes() for one in ids if one}
        return source in inviting and not inviting.intersection(against)

    def _newest(self, expected: int = 0) -> float:
        return math.inf if self.newest_epoch is None else self.newest_epoch(expected)

    def _ask_process(self, wanted: Wanted) -> Download | None:
        answer: MPFuture[Download | None] = MPFuture()
        self._outer_pipe.send(("_download_state", [wanted], {"answer": answer}))
        try:
            return answer.result(None if wanted.timeout is None else wanted.timeout + ANSWERS_WITHIN)
        except (TimeoutError, concurrent.futures.TimeoutError):
            return None

    # -- in the averager's own process --------------------------------------------------------------------------

    async def _download_state(self, wanted: Wanted, answer: Any) -> None:
        loaded = None
        try:
            # with its time, it ends here as well: another one would share the line with it
            loaded = await asyncio.wait_for(self._download_from_any(wanted), wanted.timeout)
        except asyncio.TimeoutError:
            logger.info(f"No state was downloaded within {wanted.timeout:.0f} s")
        finally:
            answer.set_result(loaded)

    async def _download_from_any(self, wanted: Wanted) -> Download | None:
        sharing = await self._sharing_peers(wanted)
        sources = [peer for peer in sharing if peer.to_bytes() not in wanted.refused]
        for peer in sorted(sources, key=self._too_slow.__contains__)[:MOST_SOURCES]:
            try:
                return await self._download_from(peer, wanted, [one for one in sharing if one != peer])
            except asyncio.CancelledError:  # the time is up
                self._too_slow |= {peer}
                raise
            except Exception as e:  # the next one may have it
                logger.info(f"Could not download the state of peer {peer}: {e!r}")
        return None

    async def _sharing_peers(self, wanted: Wanted) -> list[PeerID]:
        """Whom to ask, those first that are furthest ahead."""
        key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
        found = await self.dht.get(key, latest=True, return_future=True)
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        return [PeerID(peer) for peer in ranked_sources(entries, wanted.newest) if peer != self.peer_id.to_bytes()]

    async def _download_from(self, peer: PeerID, wanted: Wanted, others: Sequence[PeerID]) -> Download:
        logger.info(f"Downloading the state of peer {peer}")
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        chunk_timeout = self.request_timeout if self.next_chunk_timeout is None else self.next_chunk_timeout
        metadata, size = None, 0
        tensors: list[torch.Tensor] = []
        parts: list[Any] = []
        hearing: asyncio.Task[tuple[Testimony, ...]] | None = None
        try:
            async for message in aiter_with_timeout(stream, timeout=None if wanted.timeout is None else chunk_timeout):
                if hearing is None and wanted.compared:  # the peer sends what it has now, and epochs may be short
                    hearing = asyncio.create_task(self._hear_witnesses(others, wanted.compared))
                size += message.ByteSize()
                if size > wanted.most_bytes:
                    raise ValueError(f"it is larger than {wanted.most_bytes:.0f} bytes")
                if message.metadata:
                    metadata = self.serializer.loads(message.metadata)
                if message.tensor_part.dtype and parts:  # the beginning of the next tensor
                    tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                    parts = []
                parts.append(message.tensor_part)
            if parts:
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
            if not metadata:
                raise ValueError("it sent none")
            return Download(peer.to_bytes(), metadata, tensors, () if hearing is None else await hearing)
        finally:
            if hearing is not None:
                hearing.cancel()

    # -- witnesses, in the averager's own process ----------------------------------------------------------------

    async def _hear_witnesses(self, peers: Sequence[PeerID], count: int) -> tuple[Testimony, ...]:
        """What they tell of their states, if they do in time.

        :param count: tensors of a state that they are asked about
        """
        heard = await asyncio.gather(*(self._hear_witness(peer, count) for peer in peers[:MOST_WITNESSES]))
        return tuple(one for one in heard if one is not None)

    async def _hear_witness(self, peer: PeerID, count: int) -> Testimony | None:
        await asyncio.sleep(self._last_asked.get(peer, -math.inf) + 2 * ASKED_AGAIN_AFTER - time.monotonic())
        self._last_asked[peer] = time.monotonic()
        question = Question(os.urandom(16), count)
        request = averaging_pb2.DownloadData(metadata=question.pack())
        try:
            stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
            told = await stub.rpc_tell_state(request, timeout=WITNESS_WITHIN)
        except Exception as e:  # one of plain hivemind, or gone
            logger.debug(f"{peer} tells nothing of its state: {e!r}")
            return None
        return Testimony(peer.to_bytes(), question, bytes(told.metadata))

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        seconds = CLOSED_WITHIN if self._matchmaking.is_of_ours(context.remote_id) else STATE_LEFT_OPEN
        state = with_end(self._state_in_turn(request, context))
        async for message in left_open(state, seconds, is_end_of_state):
            yield message

    async def _state_in_turn(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async with self._downloads.turn(context.remote_id):
            async for message in super().rpc_download_state(request, context):
                yield message

    async def rpc_tell_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """Answer a newcomer that wants to know whether another peer sends it the swarm's state."""
        question = Question.parse(raw(request.metadata, 64))
        self._refuse_if_asked_again(context.remote_id.to_bytes())
        if not self.allow_state_sharing:
            raise ValueError("this peer does not share its state")
        packed, tensors, _ = await self._get_current_state_from_host_process()
        epoch = self.serializer.loads(packed).get("epoch")
        telling = asyncio.get_running_loop().run_in_executor(None, make_statement, question, epoch, tensors)
        return averaging_pb2.DownloadData(metadata=(await telling).pack())

    def _refuse_if_asked_again(self, peer: bytes) -> None:
        now = time.monotonic()
        self._asked_at = {one: at for one, at in self._asked_at.items() if now - at < ASKED_AGAIN_AFTER}
        if peer in self._asked_at:
            raise ValueError("this peer was asked just now")
        self._asked_at[peer] = now


def ranked_sources(entries: Iterable[tuple[Any, Any]], newest: float) -> list[bytes]:
    """Ids of peers that share their states, those first that are furthest ahead, and at random among equals.

    :param entries: what stands where they say so: anybody may write there
    :param newest: epoch beyond which nobody can be
    """
    found: list[tuple[float, bytes, bytes]] = []
    for peer, entry in entries:
        try:
            priority = finite(entry.value if isinstance(entry, ValueWithExpiration) else None, -math.inf, math.inf)
            found.append((-min(priority, newest), os.urandom(8), raw(peer, 64, least=1)))
        except ValueError:
            continue
    return [peer for _, _, peer in sorted(found)]


def _is_mask(tensor: torch.Tensor, mine: torch.Tensor | None) -> bool:
    """Whether a tensor is infinite only where this peer's own is, in the same way."""
    if mine is None or mine.shape != tensor.shape:
        return False
    return bool((tensor.isfinite() | (tensor == mine.detach().cpu())).all())


def _is_no_bad_number(value: Any) -> bool:
    return not isinstance(value, (int, float)) or math.isfinite(value)
