"""Whose state a newcomer takes over: real averagers that serve it, of ours and of plain hivemind's."""

from __future__ import annotations

import asyncio
import math
import multiprocessing as mp
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.optim import state_averager as upstream
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from in_memory.real_time import RealTimeSwarm
from tiny import LOOPBACK, TinyModel

from hivenb.engine.averaging import state_download
from hivenb.engine.averaging.state_averager import TrainingStateAverager
from hivenb.engine.averaging.state_download import Download, SharesState, Wanted, ranked_sources
from hivenb.engine.network.dht import DHT
from hivenb.errors import UnbelievedStateError

EPOCH = 7
ADAM = partial(torch.optim.Adam, lr=0.1)


def entries(**values: Any) -> list[tuple[Any, Any]]:
    return [(key.encode(), ValueWithExpiration(value, math.inf)) for key, value in values.items()]


def test_no_priority_counts_for_more_than_the_newest_epoch() -> None:
    first = {ranked_sources(entries(liar=1e9, honest=7.0, behind=3.0), newest=7)[0] for _ in range(100)}
    assert first == {b"liar", b"honest"}
    assert ranked_sources(entries(liar=1e9, honest=7.0, behind=3), newest=7)[-1] == b"behind"


def test_what_is_no_priority_is_passed_over() -> None:
    bad = entries(a=None, b="x", c=True, d=math.nan, e=[1], f=math.inf)
    junk: list[tuple[Any, Any]] = [
        ("text", ValueWithExpiration(1.0, 1.0)),
        (b"", ValueWithExpiration(1.0, 1.0)),
        (b"x", 7),
    ]
    assert ranked_sources([*bad, *junk, *entries(good=1)], 9) == [b"good"]


class TestRefused:
    """By what it holds, before anybody else is asked."""

    def why(self, tensors: list[torch.Tensor], metadata: Any, own: torch.Tensor | None = None) -> str | None:
        own_state = [torch.zeros(3) if own is None else own]
        averager = SimpleNamespace(newest_epoch=lambda expected: EPOCH, main_parameters=own_state)
        for name in ("_newest", "_where_not_finite", "_why_contradicted"):
            setattr(averager, name, partial(getattr(SharesState, name), averager))
        averager._to_be_finite = partial(TrainingStateAverager._to_be_finite, averager)
        return SharesState._why_refused(averager, Download(b"source", metadata, tensors))  # type: ignore[arg-type]

    def test_what_is_whole_is_taken(self) -> None:
        good = {"epoch": EPOCH, "optimizer_metadata": [{"type": "value", "value": 0.1}]}
        assert self.why([torch.ones(3), torch.ones(2, dtype=torch.int64)], good) is None
        assert self.why([torch.ones(3)], {"group_key": "0b1"}) is None, "of an averager of gradients"
        assert self.why([torch.ones(3)], {"epoch": EPOCH + 2}) is None, "reports come late"

    @pytest.mark.parametrize(
        ("tensors", "metadata", "word"),
        [
            ([torch.tensor([1.0, math.nan, 1.0])], {"epoch": EPOCH}, "nan or inf in tensor 1 of 1"),
            ([torch.ones(3), torch.tensor([math.inf])], {"epoch": EPOCH}, "nan or inf in tensor 2 of 2"),
            ([torch.ones(3)], {"epoch": EPOCH + 3}, "claims to be of epoch 10, and the others are at epoch 7"),
            ([torch.ones(3)], {"epoch": 10**400}, "its epoch is 1000"),
            ([torch.ones(3)], {"epoch": 7.5}, "its epoch is 7.5"),
            ([torch.ones(3)], {"epoch": True}, "its epoch is True"),
            (
                [torch.ones(3)],
                {"epoch": EPOCH, "optimizer_metadata": [{"type": "value", "value": math.nan}]},
                "among the optimizer's settings",
            ),
        ],
    )
    def test_what_is_not_is_refused(self, tensors: list[torch.Tensor], metadata: Any, word: str) -> None:
        reason = self.why(tensors, metadata)
        assert reason is not None
        assert word in reason

    def test_buffers_behind_the_state_are_looked_at_by_whoever_applies_them(self) -> None:
        mask = torch.tensor([-math.inf])
        metadata = {"epoch": EPOCH, "tails": [["module_buffers", "fingerprint", 1]]}
        assert self.why([torch.ones(3), mask], metadata) is None

    @pytest.mark.parametrize(
        "tails",
        [
            [["module_buffers", "x", 1], ["outer_optimizer", None, 1]],
            [["outer_optimizer", None, 1], ["module_buffers", "x", 1], ["outer_optimizer", None, 1]],
            [["module_buffers", "x", 1], ["module_buffers", "x", 1]],
        ],
    )
    def test_what_else_is_behind_it_is_looked_at_wherever_it_stands(self, tails: list[Any]) -> None:
        tensors = [torch.ones(1) for _ in tails[:-1]]
        reason = self.why([torch.ones(3), *tensors, torch.tensor([math.nan])], {"epoch": EPOCH, "tails": tails})
        assert reason is not None
        assert "nan or inf" in reason

    def test_one_who_takes_all_looks_at_all(self) -> None:
        metadata = {"tails": [["module_buffers", "x", 1]]}
        averager = SimpleNamespace(main_parameters=())
        averager._to_be_finite = partial(SharesState._to_be_finite, averager)
        loaded = Download(b"source", metadata, [torch.tensor([math.nan])])
        assert SharesState._where_not_finite(averager, loaded) is not None  # type: ignore[arg-type]

    def test_a_mask_is_one_here_too_and_never_nan(self) -> None:
        mask = torch.tensor([-math.inf, 0.0])
        assert self.why([mask + 1.0], {"epoch": EPOCH}, own=mask) is None
        for bad in (-mask, torch.tensor([0.0, -math.inf]), torch.tensor([math.nan, 0.0])):
            assert "nan or inf" in str(self.why([bad], {"epoch": EPOCH}, own=mask))
        ruined = torch.full((3,), math.nan)
        assert "nan or inf" in str(self.why([ruined], {"epoch": EPOCH}, own=ruined))


class Slow(SharesState):
    """An averager in its own process, with two sources of which some never end."""

    def __init__(self, *never_end: PeerID):
        self.never_end = never_end
        self.asked: list[PeerID] = []
        self.at_work = 0

    async def _sharing_peers(self, wanted: Wanted) -> list[PeerID]:
        return list(SOURCES)

    async def _download_from(self, peer: PeerID, wanted: Wanted, others: Any) -> Download:
        self.asked.append(peer)
        self.at_work += 1
        try:
            await asyncio.sleep(60.0 if peer in self.never_end else 0.0)
            return Download(peer.to_bytes(), {"epoch": EPOCH}, [])
        finally:
            self.at_work -= 1


SOURCES = (PeerID(b"first"), PeerID(b"second"))


class TestTime:
    """That a download may take."""

    async def download(self, averager: Slow, refused: frozenset[bytes] = frozenset()) -> Download | None:
        answer: asyncio.Future[Download | None] = asyncio.get_running_loop().create_future()
        await averager._download_state(Wanted(EPOCH, refused, 1e6, 0, 0.05), answer)
        assert averager.at_work == 0, "nobody else shares the line with the next one"
        return answer.result()

    def test_who_takes_too_long_is_given_up_and_asked_after_the_others(self) -> None:
        async def twice(averager: Slow) -> list[Download | None]:
            return [await self.download(averager), await self.download(averager)]

        averager = Slow(SOURCES[0])
        first, second = asyncio.run(twice(averager))
        assert first is None
        assert second is not None
        assert second.source == SOURCES[1].to_bytes()
        assert averager.asked == [SOURCES[0], SOURCES[1]]

    def test_but_it_is_asked_if_there_is_nobody_else(self) -> None:
        async def twice(averager: Slow) -> Download | None:
            await self.download(averager)
            averager.never_end = ()
            return await self.download(averager, frozenset({SOURCES[1].to_bytes()}))

        loaded = asyncio.run(twice(Slow(*SOURCES)))
        assert loaded is not None
        assert loaded.source == SOURCES[0].to_bytes()


Serve = Callable[..., Any]


@pytest.fixture
def dhts(swarm_in_memory: RealTimeSwarm) -> list[Any]:
    """Of peers without processes, of which the first one has led the others into the swarm."""
    first = swarm_in_memory.join()
    return [first, *(swarm_in_memory.join(f"/ip4/127.0.0.1/tcp/1/p2p/{first.peer_id}") for _ in range(3))]


@pytest.fixture(scope="module")
def real_dhts() -> Iterator[list[DHT]]:
    with ExitStack() as opened:
        made: list[DHT] = []
        for _ in range(4):
            addresses = [str(one) for one in made[0].get_visible_maddrs()] if made else None
            made.append(DHT(start=True, initial_peers=addresses, **LOOPBACK))
            opened.callback(made[-1].shutdown)
        yield made


@pytest.fixture
def serve(run_id: str) -> Iterator[Serve]:
    """Starts averagers with the same parameters, or with what is made of them, and shuts them down."""
    made: list[Any] = []

    def start(
        dht: Any,
        forge: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter,
        kind: Any = TrainingStateAverager,
        priority: float = EPOCH,
        **kwargs: Any,
    ) -> Any:
        model = TinyModel()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(forge(parameter))
        averager = kind(dht=dht, optimizer=ADAM, params=list(model.parameters()), prefix=run_id, start=True, **kwargs)
        averager.local_epoch, averager.state_sharing_priority = EPOCH, priority
        made.append(averager)
        return averager

    yield start
    for averager in made:
        averager.shutdown()


class TestBelieved:
    def newcomer(self, dht: Any, serve: Serve, eventually: Any, run_id: str, sharing: int) -> Any:
        made = serve(dht, lambda parameter: torch.zeros_like(parameter), allow_state_sharing=False)
        made.local_epoch, made.newest_epoch = 0, lambda expected: EPOCH
        eventually(lambda: len(getattr(dht.get(f"{run_id}.all_averagers", latest=True), "value", ())) >= sharing)
        return made

    def has_loaded(self, averager: Any) -> bool:
        own = [parameter.detach() for parameter in averager.main_parameters]
        return all(torch.allclose(a, b) for a, b in zip(own, TinyModel().parameters(), strict=True))

    def test_one_that_is_not_finite_is_left_for_that_of_another(
        self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str
    ) -> None:
        self._leave_for_another(dhts, serve, eventually, run_id, TrainingStateAverager)

    @pytest.mark.process
    def test_one_of_plain_hivemind_that_is_not_finite_is_left_for_that_of_another(
        self, real_dhts: list[DHT], serve: Serve, eventually: Any, run_id: str
    ) -> None:
        self._leave_for_another(real_dhts, serve, eventually, run_id, upstream.TrainingStateAverager)

    def _leave_for_another(self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str, kind: Any) -> None:
        serve(dhts[1], lambda parameter: parameter * math.nan, kind=kind, priority=1e9)
        serve(dhts[2])
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 2)
        newcomer.load_state_from_peers(timeout=30.0)
        assert self.has_loaded(newcomer)
        assert newcomer.local_epoch == EPOCH

    def test_one_that_is_made_up_is_contradicted_by_most(
        self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str
    ) -> None:
        serve(dhts[1], lambda parameter: 10 * torch.randn_like(parameter), priority=1e9)
        serve(dhts[0])
        serve(dhts[2], lambda parameter: parameter + 1e-3)
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 3)
        for _ in range(3):
            newcomer.load_state_from_peers(timeout=30.0)
            own = [parameter.detach() for parameter in newcomer.main_parameters]
            assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(own, TinyModel().parameters(), strict=True))
            newcomer.local_epoch = 0

    def test_of_two_that_contradict_each_other_the_one_that_has_invited_is_believed(
        self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str
    ) -> None:
        serve(dhts[1], lambda parameter: -parameter, priority=1e9)
        serve(dhts[0])
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 2)
        newcomer.load_state_from_peers(timeout=30.0)
        assert self.has_loaded(newcomer)

    @pytest.mark.process
    def test_the_others_are_asked_while_it_is_on_its_way(
        self, real_dhts: list[DHT], serve: Serve, eventually: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After it they may be so many epochs further that nobody can compare."""
        dhts = real_dhts
        was_asked, may_end = mp.Event(), mp.Event()

        serves, makes = SharesState._state_in_turn, state_download.make_statement

        async def slowly(self: Any, *args: Any) -> AsyncIterator[Any]:
            async for message in serves(self, *args):
                yield message
                await asyncio.get_running_loop().run_in_executor(None, may_end.wait, 30.0)

        def telling(*args: Any) -> Any:
            was_asked.set()
            return makes(*args)

        with monkeypatch.context() as of_one:
            of_one.setattr(SharesState, "_state_in_turn", slowly)
            liar = serve(dhts[1], lambda parameter: -parameter, priority=1e9)
        with monkeypatch.context() as of_one:
            of_one.setattr(state_download, "make_statement", telling)
            honest = serve(dhts[0])
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 2)
        newcomer.newest_epoch = lambda expected: 20
        listed = partial(newcomer.dht.get, f"{run_id}.all_averagers", latest=True)
        eventually(lambda: ranked_sources(listed().value.items(), 21)[0] == liar.peer_id.to_bytes())
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(newcomer.load_state_from_peers, timeout=60.0)
            assert was_asked.wait(30.0)
            honest.local_epoch = 20
            may_end.set()
            loading.result(60.0)
        assert self.has_loaded(newcomer)
        assert newcomer.local_epoch == 20

    def test_if_none_can_be_believed_it_says_whom_and_why(
        self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str
    ) -> None:
        liars = [serve(dhts[1], lambda parameter: -parameter), serve(dhts[2])]
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 2)
        with pytest.raises(UnbelievedStateError, match="no peer sends a state that can be believed") as raised:
            newcomer.load_state_from_peers(timeout=30.0)
        assert all(str(liar.peer_id) in str(raised.value) for liar in liars)
        assert not self.has_loaded(newcomer)

    def test_nobody_to_ask_is_no_error(self, dhts: list[Any], serve: Serve, eventually: Any, run_id: str) -> None:
        newcomer = self.newcomer(dhts[3], serve, eventually, run_id, 0)
        assert newcomer.load_state_from_peers(timeout=30.0) is None
