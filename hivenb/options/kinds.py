"""Kinds of options: which values one takes, in which form, how people choose it, and what stands for it elsewhere.

A kind knows one value at a time. What does not go together is in :mod:`hivenb.options.checks`. Imports neither torch
nor hivemind.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from hivenb.compression import codec, codec_key, codec_name, missing_package
from hivenb.errors import OptionsError
from hivenb.options.as_code import Expression, codec_expression, describe, expression
from hivenb.options.choices import (
    NESTEROV,
    averager_factory,
    describe_averager,
    describe_outer_optimizer,
    outer_optimizer,
    power_sgd,
)

#: The largest number of samples or epochs.
MOST = 2**40

#: Rules by which what peers send is averaged, with their names in words.
AGGREGATIONS: Mapping[str, str] = MappingProxyType(
    {
        "none": "none: any finite numbers count",
        "norm_bound": "bound on norms",
        "centered_clipping": "centered clipping",
    }
)

#: What becomes of layers that the optimizer was not given, with the words for it.
FROZEN_PARAMETERS: Mapping[str, str] = MappingProxyType(
    {"compare": "compared", "download": "downloaded", "own": "each peer's own"}
)


@dataclass(frozen=True)
class Kind:
    """Which values an option takes; by itself, any.

    :param unit: of a number: "samples", "seconds", "swarm epochs" or "pieces"
    :param takes_none: whether it need not be given
    """

    unit: str | None = None
    takes_none: bool = field(default=False, kw_only=True)

    #: How a panel lets people choose: by a "switch", a "number", a "menu", or a menu that knows the model.
    control: ClassVar[str] = ""

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        """A value in the one form in which options hold it.

        :param name: of the option
        :param value: as it was given; not ``None`` where that may be
        :param options: the names of all
        :raises OptionsError: what is wrong with the value, with the remedy; if more is, each is an argument
        """
        return value

    def words(self, value: Any) -> str:
        """A value that is not ``None``, as people read it."""
        return "none" if value in ((), {}) else describe(value)

    def key(self, value: Any) -> Hashable:
        """A picture of a value, equal for values that configure the same."""
        return value if value is None or isinstance(value, (bool, int, float, str)) else _comparable(value)

    def argument(self, value: Any) -> Any:
        """A value as an argument of ``hivenb.HivemindStrategy``, which nobody shares with the options."""
        return value

    def expression(self, value: Any) -> Expression:
        """Python that makes a value, and the modules of the names to import for it.

        :raises NoTextError: when there is none
        """
        return expression(value)

    def pack(self, value: Any) -> Any:
        """Plain values that stand for one at other peers, equal where peers can work together."""
        return value

    def unpack(self, packed: Any) -> Any:
        """The value that :meth:`pack` has packed.

        :raises OptionsError: if this peer cannot make it
        """
        return packed


# -- switches, numbers, names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag(Kind):
    """On or off; where it need not be given, it is on as needed."""

    control: ClassVar[str] = "switch"

    def checked(self, name: str, value: Any, options: Collection[str]) -> bool:
        if not isinstance(value, bool):
            raise OptionsError(f"{name}={value!r}: give True or False{', or None' if self.takes_none else ''}.")
        return value

    def words(self, value: Any) -> str:
        return "on" if value else "off"


@dataclass(frozen=True)
class Count(Kind):
    """A whole number above 0 of something."""

    control: ClassVar[str] = "number"

    def checked(self, name: str, value: Any, options: Collection[str]) -> int:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not (is_whole and 0 < value <= MOST):
            bound = f"at most {MOST:,}" if is_whole and value > MOST else "at least 1"
            raise OptionsError(f"{name}={value!r}: give a whole number of {self.unit}, {bound}.")
        return operator.index(value)

    def words(self, value: Any) -> str:
        return f"{value:,}"  # the label says what it counts


@dataclass(frozen=True)
class Seconds(Kind):
    """A time.

    :param most: the longest that other peers take
    """

    unit: str | None = "seconds"
    most: float = field(default=math.inf, kw_only=True)

    control: ClassVar[str] = "number"

    def checked(self, name: str, value: Any, options: Collection[str]) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise OptionsError(f"{name}={value!r}: give a number of seconds above 0.")
        if value > self.most:
            raise OptionsError(
                f"{name}={float(value)!r}: give at most {self.most} seconds; peers take no such records."
            )
        return float(value)

    def words(self, value: Any) -> str:
        return f"{value:g} seconds"


@dataclass(frozen=True)
class Share(Kind):
    """A number between 0 and 1."""

    control: ClassVar[str] = "number"

    def checked(self, name: str, value: Any, options: Collection[str]) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and 0 < value < 1):
            raise OptionsError(f"{name}={value!r}: give a number between 0 and 1.")
        return float(value)

    def words(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few.

    :param choices: their names in code, with those in words
    """

    choices: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    control: ClassVar[str] = "menu"

    def checked(self, name: str, value: Any, options: Collection[str]) -> str:
        for choice in self.choices:
            if value == choice:
                return choice  # what was given may be an enumeration's
        raise OptionsError(f"{name}={value!r}: give one of {', '.join(self.choices)}.")

    def words(self, value: Any) -> str:
        return str(value)


#: Characters in the name of a run at most; an invite holds some more, for what is added to tell models apart.
LONGEST_RUN_NAME = 200


@dataclass(frozen=True)
class RunName(Kind):
    """The name of a run."""

    def checked(self, name: str, value: Any, options: Collection[str]) -> str:
        if not isinstance(value, str) or not value.strip():
            raise OptionsError(f"{name}={value!r}: give the run a name.")
        if len(value) > LONGEST_RUN_NAME:
            raise OptionsError(
                f"{name}={value!r}: {len(value)} characters; an invite holds names of up to {LONGEST_RUN_NAME}."
            )
        if "." in value:
            raise OptionsError(f"{name}={value!r}: hivemind allows no dot in it; {value.replace('.', '-')!r} would do.")
        return value

    def words(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Names(Kind):
    """Any number of names."""

    def checked(self, name: str, value: Any, options: Collection[str]) -> tuple[str, ...]:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not all(isinstance(one, str) for one in value):
            raise OptionsError(f'{name}={value!r}: give a list of names, such as ("exp_avg",).')
        return tuple(value)

    def pack(self, value: Any) -> Any:
        return list(value)


# -- codecs and functions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compression(Kind):
    """How numbers are sent: a name in `hivenb.compression.CODECS`, or one of hivemind's objects."""

    control: ClassVar[str] = "codec"

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        try:
            known = codec_name(value)
        except OptionsError as error:
            raise OptionsError(f"{name}: {error}") from error
        package = missing_package(known) if known is not None else None
        if package is not None:
            raise OptionsError(
                f"{name}={known!r} needs the package {package}, which is not installed: "
                f"run `pip install {package}`, or choose another codec."
            )
        return known or value

    def words(self, value: Any) -> str:
        return value if isinstance(value, str) else describe(value)

    def key(self, value: Any) -> Hashable:
        return value if isinstance(value, str) else codec_key(value)

    def argument(self, value: Any) -> Any:
        return codec(value)

    def expression(self, value: Any) -> Expression:
        return codec_expression(value)


@dataclass(frozen=True)
class Scheduler(Kind):
    """What makes a learning rate scheduler of an optimizer, or a scheduler."""

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        if not callable(value) and not (hasattr(value, "step") and hasattr(value, "optimizer")):
            raise OptionsError(
                f"{name}={short(value)}: give a function that makes a scheduler from an optimizer, "
                "such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10), or a scheduler."
            )
        return value


#: What hivemind passes to a ``grad_averager_factory``, always by keyword.
FACTORY_ARGUMENTS = (
    "allreduce_timeout",
    "auxiliary",
    "client_mode",
    "compression",
    "dht",
    "min_matchmaking_time",
    "next_chunk_timeout",
    "parameters",
    "prefix",
    "reuse_grad_buffers",
    "shutdown_timeout",
    "start",
)

# What hivemind.Optimizer passes to its averagers by another name than that of the option which sets it.
_SET_ELSEWHERE = {
    "min_matchmaking_time": "matchmaking_time",
    "scheduler": "scheduler_fn",
    "state_compression": "load_state_compression",
}


@dataclass(frozen=True)
class AveragerFactory(Kind):
    """What makes the averager of gradients."""

    control: ClassVar[str] = "averager"

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        if not callable(value):
            raise OptionsError(f"{name}={short(value)}: give a class or function that makes an averager.")
        problems = []
        bound = value.keywords if isinstance(value, functools.partial) else {}
        for argument in sorted(set(bound) & set(FACTORY_ARGUMENTS)):
            option = {"compression": "grad_compression", **_SET_ELSEWHERE}.get(argument, argument)
            remedy = f"use the option {option} instead" if option in options else "leave it out"
            problems.append(f"{name} binds {argument}={bound[argument]!r}, which hivemind overrules: {remedy}.")
        reason = _why_not_callable(value)
        if reason is not None:
            problems.append(
                f"{name}={short(value)} cannot be called the way hivemind does: {reason}. Bind "
                "its own arguments first, such as functools.partial(PowerSGDGradientAverager, averager_rank=32)."
            )
        if problems:
            raise OptionsError(*problems)
        return value

    def words(self, value: Any) -> str:
        told = power_sgd(value)
        return describe(value) if told is None else f"PowerSGD, rank {told.averager_rank}"

    def pack(self, value: Any) -> Any:
        return describe_averager(value)

    def unpack(self, packed: Any) -> Any:
        return averager_factory(packed)


def _why_not_callable(factory: Callable[..., Any]) -> str | None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin without a signature: hivemind will tell
        return None
    try:
        signature.bind(**dict.fromkeys(FACTORY_ARGUMENTS))
    except TypeError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class OuterOptimizer(Kind):
    """What makes the optimizer of the swarm's steps, of parameters; or the name of a known one."""

    control: ClassVar[str] = "outer optimizer"

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        if value != NESTEROV and (isinstance(value, str) or not callable(value)):
            raise OptionsError(
                f"{name}={repr(value)[:60]}: give {NESTEROV!r}, or what makes an optimizer from parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )
        return value

    def words(self, value: Any) -> str:
        return value if isinstance(value, str) else describe(value)

    def pack(self, value: Any) -> Any:
        return describe_outer_optimizer(value)

    def unpack(self, packed: Any) -> Any:
        return outer_optimizer(packed)


# -- settings of hivemind's own --------------------------------------------------------------------------------------

#: Of bytes in a part of what is averaged, which is one message.
MOST_IN_PART = 2**24

AVERAGER_OPTS = (
    "allow_state_sharing",
    "averaging_alpha",
    "bandwidth",
    "daemon",
    "declare_state_period",
    "initial_group_bits",
    "initialize_optimizer",
    "min_group_size",
    "min_vector_size",
    "parameter_names",
    "part_size_bytes",
    "reducer_timeout",
    "request_timeout",
    "reuse_tensors",
    "sender_timeout",
    "sync_epoch_when_averaging",
    "target_group_size",
)
TRACKER_OPTS = (
    "daemon",
    "default_refresh_period",
    "expected_drift_peers",
    "expected_drift_rate",
    "max_refresh_period",
    "metadata_expiration",
    "min_refresh_period",
    "private_key",
)


@dataclass(frozen=True)
class Settings(Kind):
    """A dict of settings that hivemind takes.

    :param known: their names
    """

    known: tuple[str, ...] = field(default=(), kw_only=True)

    def checked(self, name: str, value: Any, options: Collection[str]) -> Any:
        if not isinstance(value, Mapping):
            raise OptionsError(f"{name}={value!r}: give a dict of settings by name.")
        problems = []
        for key, given in value.items():
            if key in self.known:
                is_right, remedy = _SETTINGS.get(key, (None, ""))
                if is_right is not None and not is_right(given):
                    problems.append(f"{name}[{key!r}]={given!r}: {remedy}")
            elif key == "compression":
                problems.append(f"{name} holds {key!r}: use grad_compression and state_averaging_compression instead.")
            elif key in _SET_ELSEWHERE or key in options:
                problems.append(f"{name} holds {key!r}: use the option {_SET_ELSEWHERE.get(key, key)} instead.")
            else:
                problems.append(
                    f"{name} holds {key!r}, which hivemind does not know: it takes {', '.join(self.known)}."
                )
        if problems:
            raise OptionsError(*problems)
        return dict(value) or None

    def argument(self, value: Any) -> Any:
        return None if value is None else dict(value)


#: Whether the value of a setting is right, and what to do if it is not.
_Setting = tuple[Callable[[Any], bool], str]


def _record(most: float) -> _Setting:
    """Seconds for which a peer may let its records stand; the others take no other (engine/network/records.py)."""

    def is_right(value: Any) -> bool:
        return _is_number(value) and 0 < value <= most

    return is_right, f"give a number of seconds above 0, at most {most}; peers take no other."


_SETTINGS: Mapping[str, _Setting] = {
    "declare_state_period": _record(590),
    "metadata_expiration": _record(120),
    "bandwidth": (
        lambda value: value is None or (_is_number(value) and 0 <= value < 2**127),
        "give a number, at least 0, or leave it out.",
    ),
    "initial_group_bits": (
        lambda value: isinstance(value, str) and set(value) <= set("01"),
        "give a string of 0 and 1.",
    ),
    "part_size_bytes": (
        lambda value: value is None or (_is_integer(value) and 0 < value <= MOST_IN_PART),
        f"give a number of bytes, at most {MOST_IN_PART:,}.",
    ),
    "target_group_size": (lambda value: value is None or (_is_integer(value) and value >= 2), "give 2 or more."),
}


# -- values ----------------------------------------------------------------------------------------------------------


def _is_integer(value: Any) -> bool:
    """Whether it is a whole number, of Python's or of another library's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether it is a number, of Python's or of another library's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def short(value: object) -> str:
    """A value in a message: a function or class by its name."""
    return getattr(value, "__qualname__", None) or repr(value)


def _comparable(value: Any) -> Hashable:
    """A hashable picture of a value, equal for values that configure the same."""
    if isinstance(value, functools.partial):
        return (_comparable(value.func), _comparable(value.args), _comparable(value.keywords))
    if isinstance(value, Mapping):
        return frozenset((key, _comparable(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(part) for part in value)
    return value if isinstance(value, Hashable) else repr(value)
