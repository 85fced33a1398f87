"""Each override still has the signature of what it overrides; where it has not, this names it before a swarm does.

What hivemind does that makes an override necessary is held in ``test_upstream.py``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from types import FunctionType
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.dht import DHTNode
from hivemind.p2p import ServicerBase

from hivenb.engine.averaging.averager import Averager
from hivenb.engine.averaging.gradient_averager import GradientAverager

#: Packages of ours whose classes are looked at, and those that they build on.
OURS = ("hivenb.engine", "hivenb.strategy")
UPSTREAM = ("hivemind.", "lightning.", "torch.")

#: Constructors with parameters of their own: only hivenb makes such objects.
OWN_CONSTRUCTORS = {
    "EpochSchedulers.__init__",
    "FaultTolerantReducer.__init__",
    "FaultTolerantRunner.__init__",
    "GuardedClient.__init__",
    "HivemindStrategy.__init__",
    "WatchfulClient.__init__",
}

#: Parameters that ours take by their names alone; so does hivemind itself give them.
BY_NAME_ALONE = {
    "Averager.step": {"scheduled_time", "weight", "timeout", "allow_retries", "require_trigger", "wait"},
    "Node.find_nearest_nodes": {"node_to_peer_id"},
    "PacedGroupKeyManager.declare_averager": {"looking_for_group"},
}

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Override:
    """A method or property of ours, and the one that it stands in front of."""

    owner: type
    base: type
    name: str

    def __str__(self) -> str:
        """The name of its test."""
        return f"{self.title}-over-{self.base.__module__}"

    @property
    def title(self) -> str:
        return f"{self.owner.__qualname__}.{self.name}"

    @property
    def complaints(self) -> list[str]:
        """In what it does not go with what it overrides."""
        ours, theirs = vars(self.owner)[self.name], vars(self.base)[self.name]
        return [f"{self.title} {wrong}" for wrong in misfits(ours, theirs, BY_NAME_ALONE.get(self.title, frozenset()))]


# -- what is compared ---------------------------------------------------------------------------------------------


def overrides_in(kind: type) -> Iterator[Override]:
    """What ours among the classes that make up one override of those behind them: mixins and bases, too."""
    order = kind.__mro__
    for place, owner in enumerate(order):
        if not owner.__module__.startswith((*OURS, __name__)):
            continue
        for name, member in vars(owner).items():
            if isinstance(member, FunctionType | classmethod | staticmethod | property):
                behind = (one for one in order[place + 1 :] if one.__module__.startswith(UPSTREAM))
                base = next((one for one in behind if name in vars(one)), None)
                if base is not None:
                    yield Override(owner, base, name)


@cache
def all_overrides() -> tuple[Override, ...]:
    found: set[Override] = set()
    for package in map(importlib.import_module, OURS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(kind) and kind.__module__ == module.name:
                    found.update(overrides_in(kind))
    return tuple(sorted(found, key=str))


# -- how ----------------------------------------------------------------------------------------------------------


def misfits(ours: Any, theirs: Any, by_name_alone: Collection[str] = ()) -> list[str]:
    """In what a member of a class cannot stand for another one, in words.

    :param by_name_alone: parameters that nobody gives without their names
    """
    kinds = kind_of(ours), kind_of(theirs)
    if kinds[0] != kinds[1] and kinds != ("a class method", "a static method"):  # which are called alike
        return [f"is {kind_of(ours)}, and {kind_of(theirs)} upstream"]
    if isinstance(ours, property):
        return []
    own, their = parameters_of(ours), parameters_of(theirs)
    return [
        *(
            wrong
            for place, one in enumerate(their)
            for wrong in refusals(own, one, place if one.name not in by_name_alone else None)
        ),
        *extra(own, their),
    ]


def kind_of(member: Any) -> str:
    """A property, or which kind of method, and whether that is called, awaited or iterated over."""
    if isinstance(member, property):
        return "a property"
    function = unbound(member)
    if not callable(function):
        return "an attribute"
    kind = {classmethod: "a class method", staticmethod: "a static method"}.get(type(member), "a method")
    if inspect.isasyncgenfunction(function):
        return f"{kind} that yields asynchronously"
    if inspect.iscoroutinefunction(function):
        return f"{kind} that is awaited"
    # an iterator is one however it is made
    return f"{kind} that yields" if inspect.isgeneratorfunction(function) and function.__name__ != "__iter__" else kind


def unbound(member: Any) -> Any:
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def parameters_of(member: Any) -> list[Parameter]:
    """Without that which is the object or the class. An underscore says that a parameter is not used, and no more."""
    parameters = list(inspect.signature(unbound(member)).parameters.values())
    own = parameters if isinstance(member, staticmethod) else parameters[1:]
    return [one.replace(name=one.name.lstrip("_")) if one.name.strip("_") else one for one in own]


def refusals(ours: list[Parameter], their: Parameter, place: int | None) -> Iterator[str]:
    """The ways to give one of their arguments, by its name or in its place, that ours do not take."""
    kinds = {one.kind for one in ours}
    named = {one.name: one for one in ours if one.kind in _BY_NAME}
    placed = [one for one in ours if one.kind in _BY_PLACE]
    own = named.get(their.name)
    if their.kind in _REST:
        if their.kind not in kinds:
            yield f"does not take {their}"
        return
    if their.kind in _BY_NAME and own is None and Parameter.VAR_KEYWORD not in kinds:
        yield f"does not take {their.name!r} by its name"
    if their.kind in _BY_PLACE and place is not None:
        if place < len(placed):
            if their.kind is Parameter.POSITIONAL_OR_KEYWORD and placed[place].name != their.name:
                yield f"has {placed[place].name!r} in place {place + 1}, which is that of {their.name!r}"
        elif Parameter.VAR_POSITIONAL not in kinds or (own is not None and own.kind is Parameter.KEYWORD_ONLY):
            yield f"does not take {their.name!r} in place {place + 1}"
    if own is not None and own.default is Parameter.empty and their.default is not Parameter.empty:
        yield f"needs {own.name!r}, which may be left out upstream"


def extra(ours: list[Parameter], theirs: list[Parameter]) -> Iterator[str]:
    """What ours need, and nobody gives who knows theirs."""
    known = {one.name for one in theirs}
    places = sum(one.kind is Parameter.POSITIONAL_ONLY for one in theirs)
    for place, own in enumerate(ours):
        if own.kind not in _REST and own.default is Parameter.empty and own.name not in known and place >= places:
            yield f"needs {own.name!r}, which there is not upstream"


# -- tests --------------------------------------------------------------------------------------------------------


def test_each_can_be_called_as_what_it_overrides() -> None:
    checked = [one for one in all_overrides() if one.title not in OWN_CONSTRUCTORS]
    assert [complaint for one in checked for complaint in one.complaints] == []


def test_what_is_let_off_has_to_be() -> None:
    by_title = {override.title: override for override in all_overrides()}
    assert all(by_title[title].complaints for title in OWN_CONSTRUCTORS)
    for title, names in BY_NAME_ALONE.items():
        override = by_title[title]
        wrong = misfits(vars(override.owner)[override.name], vars(override.base)[override.name])
        assert len(wrong) == len(names)
        assert all(any(f"does not take {name!r} in place" in one for one in wrong) for name in names)


def test_all_are_found() -> None:
    found = {(override.title, override.base.__module__) for override in all_overrides()}
    assert len(found) > 100
    assert found >= {
        ("DHT.run", "hivemind.dht.dht"),
        ("TiedP2P._make_process_args", "hivemind.p2p.p2p_daemon"),
        ("ProgressTracker._progress_fetcher", "hivemind.optim.progress_tracker"),
        ("GradientAverager.accumulate_grads_", "hivemind.optim.grad_averager"),
        ("Averager.rpc_aggregate_part", "hivemind.averaging.averager"),
        ("Averager._get_handle_name", "hivemind.p2p.servicer"),
        ("EpochSchedulers.step", "torch.optim.lr_scheduler"),
        ("HivemindStrategy.optimizer_step", "lightning.pytorch.strategies.strategy"),
    }
    bases = {one.base for one in overrides_in(GradientAverager) if one.owner is Averager}
    assert bases == {DecentralizedAverager, ServicerBase}, "it stands behind hivemind's GradientAverager"


class RightNode(DHTNode):
    """Takes all that hivemind's does."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Any: ...

    async def get(self, key: Any, latest: bool = False, *, more: int = 0, **kwargs: Any) -> Any: ...

    async def store(self, key: Any, value: Any, *rest: Any, **named: Any) -> Any: ...

    async def find_nearest_nodes(self, _queries: Any, *args: Any, **kwargs: Any) -> Any: ...


class WrongNode(DHTNode):
    """As if hivemind had changed everything."""

    async def create(cls, *args: Any, **kwargs: Any) -> Any: ...

    def shutdown(self) -> Any: ...

    async def find_nearest_nodes(self, queries: Any, k_nearest: Any = None, **kwargs: Any) -> Any: ...

    async def get(self, name: Any, latest: Any, **kwargs: Any) -> Any: ...

    async def get_many(self, keys: Any, sufficient_expiration_time: Any = None, *, urgent: Any) -> Any: ...

    async def get_many_by_id(self, key_ids: Any, *args: Any, num_workers: Any = None, **kwargs: Any) -> Any: ...


class WrongAverager(DecentralizedAverager):
    """As if hivemind had changed everything."""

    def peer_id(self) -> Any: ...

    async def rpc_join_group(self, request: Any, context: Any) -> Any: ...

    @classmethod
    async def rpc_download_state(cls, request: Any, context: Any) -> AsyncIterator[Any]:
        yield

    async def _load_state_from_peers(self, future: Any) -> None: ...


def test_what_fits_is_let_through() -> None:
    complaints = {one.name: one.complaints for one in overrides_in(RightNode)}
    assert complaints == {"create": [], "get": [], "store": [], "find_nearest_nodes": []}


def test_what_does_not_fit_is_named() -> None:
    complaints = {one.title: one.complaints for kind in (WrongNode, WrongAverager) for one in overrides_in(kind)}
    wrong = {
        "WrongNode.create": ["is a method that is awaited, and a class method that is awaited upstream"],
        "WrongNode.shutdown": ["is a method, and a method that is awaited upstream"],
        "WrongNode.find_nearest_nodes": [
            f"does not take {name!r} in place {place}"
            for place, name in enumerate(("beam_size", "num_workers", "node_to_peer_id", "exclude_self"), start=3)
        ],
        "WrongNode.get": [
            "has 'name' in place 1, which is that of 'key'",
            "needs 'latest', which may be left out upstream",
            "needs 'name', which there is not upstream",
        ],
        "WrongNode.get_many": ["does not take **kwargs", "needs 'urgent', which there is not upstream"],
        "WrongNode.get_many_by_id": ["does not take 'num_workers' in place 3"],
        "WrongAverager.peer_id": ["is a method, and a property upstream"],
        "WrongAverager.rpc_join_group": [
            "is a method that is awaited, and a method that yields asynchronously upstream"
        ],
        "WrongAverager.rpc_download_state": [
            "is a class method that yields asynchronously, and a method that yields asynchronously upstream"
        ],
        "WrongAverager._load_state_from_peers": [
            "does not take 'timeout' by its name",
            "does not take 'timeout' in place 2",
        ],
    }
    assert complaints == {title: [f"{title} {one}" for one in all_of_it] for title, all_of_it in wrong.items()}
