"""Every switch of collaborative training as one value.

An `Options` is checked as a whole when it is made, and never changes: a change is a new value. The names are
those of `hivenb.HivemindStrategy`'s parameters. Importing this module imports neither torch nor hivemind.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from hivenb._signatures import OwnSignature, keywords_of, unchanged, with_keywords
from hivenb.compression import codec, codec_key
from hivenb.errors import OptionsError
from hivenb.options.as_code import describe, strategy_script
from hivenb.options.checks import CODEC_FIELDS, PREREQUISITES, find_problems, normalized

# -- spelling --------------------------------------------------------------------------------------------------------
#
# What somebody may have meant by a name that does not exist.


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question that names what is spelt alike, to go into the message of an error.

    :param unknown: what was written
    :param known: what there is
    :returns: such as ``"Did you mean target_batch_size? "``; empty if nothing is spelt alike
    """
    known = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
    return f"Did you mean {', '.join(close)}? " if close else ""


# -- texts -----------------------------------------------------------------------------------------------------------
#
# What people should know about each option: in words, with unit, cost and gain.


@dataclass(frozen=True)
class About:
    """What a person should know about one option.

    :param label: its name in words
    :param help: what it costs and gains, one sentence
    :param group: "overlap", "memory", "compression" or "rounds"
    :param unit: of a number: "samples", "seconds", "epochs" or "pieces"
    :param swarm_wide: whether all peers of a run must agree on it
    """

    label: str
    help: str
    group: str
    unit: str | None = None
    swarm_wide: bool = False


#: By the option's name in code, which is the same everywhere.
ABOUT: Mapping[str, About] = MappingProxyType(
    {
        "target_batch_size": About(
            "target batch size",
            "Samples that all peers gather before an update: more means less traffic, and fewer updates.",
            "rounds",
            unit="samples",
            swarm_wide=True,
        ),
        "run_id": About(
            "run name",
            "Peers with the same run name train together; anybody else in the swarm is left alone.",
            "rounds",
            swarm_wide=True,
        ),
        "batch_size": About(
            "batch size",
            "Samples in one batch of this peer; found in the data unless given.",
            "rounds",
            unit="samples",
        ),
        "delay_state_averaging": About(
            "state averaging in background",
            "Training goes on while parameters are averaged; the result is applied a little later.",
            "overlap",
        ),
        "delay_optimizer_step": About(
            "optimizer step in background",
            "Training goes on during the step and the averaging of parameters, with those of before the step.",
            "overlap",
        ),
        "delay_grad_averaging": About(
            "gradient averaging in background",
            "Training goes on while gradients are averaged, which then arrive up to one epoch late: no wait, but less "
            "is learned from as many samples (three peers on digits: accuracy 0.9 instead of 0.99).",
            "overlap",
        ),
        "offload_optimizer": About(
            "optimizer in main memory",
            "Keeps the optimizer's state off the GPU: saves its memory, and costs a copy each update.",
            "memory",
        ),
        "reuse_grad_buffers": About(
            "reuse gradient buffers",
            "Sums gradients where the model keeps them: saves memory, but rules out zero_grad.",
            "memory",
        ),
        "scheduler_fn": About(
            "learning rate schedule",
            "Makes the scheduler from the optimizer; it steps once per swarm epoch, alike on all peers.",
            "rounds",
        ),
        "matchmaking_time": About(
            "matchmaking time",
            "How long a round waits for peers: too short leaves some out, too long holds the others up.",
            "rounds",
            unit="seconds",
        ),
        "averaging_timeout": About(
            "averaging timeout",
            "A longer round is given up: too short loses slow peers, too long waits for lost ones.",
            "rounds",
            unit="seconds",
        ),
        "allreduce_timeout": About(
            "exchange timeout",
            "Limit for one exchange of data within a group; the averaging timeout unless given.",
            "rounds",
            unit="seconds",
        ),
        "next_chunk_timeout": About(
            "chunk timeout",
            "A peer silent for so long is left out of the round; the matchmaking time unless given.",
            "rounds",
            unit="seconds",
        ),
        "load_state_timeout": About(
            "state download timeout",
            "How long a peer that joins tries to download the others' state before it starts over.",
            "rounds",
            unit="seconds",
        ),
        "shutdown_timeout": About(
            "goodbye timeout", "How long a peer that leaves may take to say so.", "rounds", unit="seconds"
        ),
        "grad_compression": About(
            "gradients", "How gradients are sent: less traffic, for some precision.", "compression"
        ),
        "state_averaging_compression": About(
            "parameters",
            "How parameters are sent when they are averaged: less traffic, but peers agree less exactly.",
            "compression",
        ),
        "load_state_compression": About(
            "newcomers' state",
            "How the state is sent to peers that join: quicker to join, from a less exact start.",
            "compression",
        ),
        "grad_averager_factory": About(
            "gradient averager",
            "Replaces the way gradients are averaged, for example by PowerSGD, which sends far less.",
            "compression",
            swarm_wide=True,
        ),
        "average_state_every": About(
            "epochs between averagings",
            "How often parameters are averaged: more rarely saves traffic, and peers drift apart.",
            "rounds",
            unit="epochs",
            swarm_wide=True,
        ),
        "average_opt_statistics": About(
            "averaged optimizer statistics",
            "Averages these statistics of the optimizer too, such as exp_avg: closer peers, more traffic.",
            "rounds",
            swarm_wide=True,
        ),
        "average_buffers": About(
            "averaged buffers",
            "Averages BatchNorm's statistics and other buffers with the parameters; off, each peer has its own.",
            "rounds",
            swarm_wide=True,
        ),
        "frozen_parameters": About(
            "frozen layers",
            "Who joins compares what the optimizer was not given: up to 32 MB that differ, it downloads; more are an "
            "error, unless it is to download them, too, or to have its own.",
            "rounds",
        ),
        "keep_state_every": About(
            "epochs between kept states",
            "How often a good state is copied into main memory, to return to; none is kept without a number.",
            "memory",
            unit="epochs",
        ),
        "roll_back": About(
            "roll back by itself",
            "When the loss explodes, all peers return to their last good state: some epochs are lost, not the run.",
            "rounds",
            swarm_wide=True,
        ),
        "robust_aggregation": About(
            "robust averages",
            "Against members who send garbage: a bound on norms, or centered clipping, for some time and memory.",
            "rounds",
            swarm_wide=True,
        ),
        "use_local_updates": About(
            "local updates",
            "Each peer updates after every batch, and only parameters are averaged: no wait, less exact.",
            "overlap",
            swarm_wide=True,
        ),
        "outer_optimizer": About(
            "outer optimizer",
            "With local updates: peers send how far they have come, rarely, and step all together (DiLoCo).",
            "overlap",
            swarm_wide=True,
        ),
        "outer_fragments": About(
            "pieces sent in turn",
            "Each update of the outer optimizer sends one of so many pieces of the model: the line's peak falls.",
            "overlap",
            unit="pieces",
            swarm_wide=True,
        ),
        "client_mode": About(
            "client only",
            "Accepts no connections, for machines behind a firewall; others carry its share.",
            "rounds",
        ),
        "auxiliary": About("helper only", "Helps the others to average without training itself.", "rounds"),
        "averager_opts": About(
            "averager settings", "More settings for hivemind's averagers, by their names there.", "rounds"
        ),
        "tracker_opts": About(
            "progress settings",
            "More settings for hivemind's progress tracker, by their names there.",
            "rounds",
        ),
        "performance_ema_alpha": About(
            "speed smoothing",
            "Weight of the newest measurement in the estimate of speed: higher follows changes faster.",
            "rounds",
        ),
        "verbose": About("detailed log", "Logs every round, which helps to find out what holds peers up.", "rounds"),
    }
)


# -- options ---------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from hivemind.compression import CompressionBase

    Codec: TypeAlias = str | CompressionBase | None


#: Of Lightning's documentation.
DEFAULT_RUN_ID = "lightning_run"


@dataclass(frozen=True, kw_only=True)
class FieldInfo(About):
    """What is known about one option: what people should know, and what code needs.

    :param name: the option's name, the same everywhere in code
    :param default: its value unless given; `dataclasses.MISSING` where it must be given
    :param requires: options that must be on as well for this one to be on
    """

    name: str
    default: Any
    requires: tuple[str, ...]

    @property
    def facts(self) -> str:
        """Its default and unit, whether all peers share it, and what it needs, in a line of reStructuredText."""
        facts = ["must be given" if self.default is dataclasses.MISSING else f"default: ``{self.default!r}``"]
        if self.unit:
            facts.append(f"in {self.unit}")
        if self.swarm_wide:
            facts.append("the same at all peers")
        if self.requires:
            facts.append("needs " + " and ".join(f"``{name}``" for name in self.requires))
        return "; ".join(facts)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Options:
    """Every option of `hivenb.HivemindStrategy` but those of the swarm, checked as a whole.

    `hivenb.options.FIELDS` says for code what is said below. ``offload_optimizer`` and ``delay_optimizer_step`` are on
    as needed unless given, and say here whether they are. Codecs are names in `hivenb.compression.CODECS` or
    hivemind's objects; an object that does what a named codec does is kept by its name.

    Two options are equal when they configure the same: codecs and ``functools.partial`` objects are compared
    by what they hold. They can be pickled as far as the functions in them can (cloudpickle takes those of a
    notebook).

    :raises OptionsError: when a value, or a combination, cannot work; the message names every problem at once
    """

    target_batch_size: int
    run_id: str = DEFAULT_RUN_ID
    batch_size: int | None = None
    delay_state_averaging: bool = False
    delay_optimizer_step: bool | None = None
    delay_grad_averaging: bool = False
    offload_optimizer: bool | None = None
    reuse_grad_buffers: bool = False
    scheduler_fn: Callable[[Any], Any] | None = None
    matchmaking_time: float = 5.0
    averaging_timeout: float = 30.0
    allreduce_timeout: float | None = None
    next_chunk_timeout: float | None = None
    load_state_timeout: float = 600.0
    shutdown_timeout: float = 5.0
    grad_compression: Codec = "none"
    state_averaging_compression: Codec = "none"
    load_state_compression: Codec = "none"
    grad_averager_factory: Callable[..., Any] | None = None
    average_state_every: int = 1
    average_opt_statistics: tuple[str, ...] = ()
    average_buffers: bool = True
    frozen_parameters: str = "compare"
    robust_aggregation: str = "norm_bound"
    keep_state_every: int | None = 10
    roll_back: bool = False
    use_local_updates: bool = False
    outer_optimizer: str | Callable[..., Any] | None = None
    outer_fragments: int = 1
    client_mode: bool | None = None
    auxiliary: bool = False
    averager_opts: dict[str, Any] | None = None
    tracker_opts: dict[str, Any] | None = None
    performance_ema_alpha: float = 0.1
    verbose: bool = False

    __signature__ = OwnSignature(lambda: inspect.Signature(keywords_of(Options.__init__)))

    def __new__(cls, *args: Any, **values: Any) -> Options:
        _check_names(values)  # before the dataclass's own __init__, whose TypeError suggests nothing
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values = normalized({name: getattr(self, name) for name in FIELD_NAMES})
        for name, value in values.items():
            object.__setattr__(self, name, value)
        problems = find_problems(values)
        if len(problems) == 1:
            raise OptionsError(problems[0])
        if problems:
            raise OptionsError("\n- ".join([f"{len(problems)} problems:", *problems]))

    def replace(self, **changes: Any) -> Options:
        """The same options with some changed.

        :param changes: new values by option name
        :raises OptionsError: for an unknown name, or when the result cannot work
        """
        _check_names(changes)
        return Options(**{**self._values(), **changes})

    def with_prerequisites(self, **changes: Any) -> Options:
        """Like `replace`, but switches on what an option needs with it, and off what needs it.

        An explicit value among the changes is never overruled: if it contradicts another one, that is an
        error.

        :param changes: new values by option name
        :raises OptionsError: for an unknown name, or when the result cannot work
        """
        _check_names(changes)
        wanted = dict(changes)
        for name, value in changes.items():
            if name in PREREQUISITES and value not in (None, False):
                for needed in _all_prerequisites(name):
                    wanted.setdefault(needed, True)
            for dependent in PREREQUISITES:
                if name in _all_prerequisites(dependent) and value is False and getattr(self, dependent):
                    wanted.setdefault(dependent, FIELDS[dependent].default)
        if wanted.get("outer_optimizer", self.outer_optimizer) is None:
            wanted.setdefault("outer_fragments", FIELDS["outer_fragments"].default)
        return self.replace(**wanted)

    def difference(self, other: Options) -> dict[str, tuple[Any, Any]]:
        """What differs from these options to others: option name -> (value here, value there)."""
        mine, theirs = self._comparable(), other._comparable()
        return {name: (getattr(self, name), getattr(other, name)) for name in FIELD_NAMES if mine[name] != theirs[name]}

    def to_strategy_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `hivenb.HivemindStrategy`: what is not the default, codecs as objects.

        :raises MissingDependencyError: when a codec needs a package that has been removed since
        """
        return {
            name: codec(value) if name in CODEC_FIELDS else dict(value) if isinstance(value, dict) else value
            for name, value in self._changed().items()
        }

    def to_code(
        self,
        model: str = "model",
        data: str = "data",
        *,
        trainer: Mapping[str, Any] | None = None,
        copies: bool = False,
    ) -> str:
        """The same configuration as a plain Lightning script.

        Functions and objects that have no text of their own, such as a lambda, become a comment that asks for
        them.

        :param model: the Python expression for the LightningModule
        :param data: the Python expression(s) for what follows it in ``trainer.fit``: ``train_loader, val_loader`` for
          two of them, ``datamodule=...`` for a DataModule. By default ``data``, whichever of these it is.
          :meth:`hivenb.TrainingRun.to_code` finds out by itself
        :param trainer: keyword arguments of the Trainer; by default those for one device of whatever kind there is
        :param copies: whether to train a copy of the model, since something else is training it
        """
        return strategy_script(self._changed(), model=model, data=data, trainer=trainer, copies=copies)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELD_NAMES}

    def _comparable(self) -> dict[str, Hashable]:
        return {name: _comparable(value, is_codec=name in CODEC_FIELDS) for name, value in self._values().items()}

    def _changed(self) -> dict[str, Any]:
        comparable = self._comparable()
        return {
            name: value
            for name, value in self._values().items()
            if FIELDS[name].default is dataclasses.MISSING or comparable[name] != FIELDS[name].default
        }

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Options) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._comparable().values()))

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={describe(value)}' for name, value in self._changed().items())})"


for _changing in (Options.replace, Options.with_prerequisites):
    _shown = with_keywords(_changing, unchanged(keywords_of(Options.__init__)))
    _changing.__signature__ = _shown  # type: ignore[attr-defined]

FIELD_NAMES = tuple(option.name for option in dataclasses.fields(Options))

#: What is known about each option, by its name, in the order in which people should see them.
FIELDS: Mapping[str, FieldInfo] = MappingProxyType(
    {
        option.name: FieldInfo(
            name=option.name,
            default=option.default,
            requires=PREREQUISITES.get(option.name, ()),
            **vars(ABOUT[option.name]),
        )
        for option in dataclasses.fields(Options)
    }
)


def _explained(text: str) -> str:
    """The docstring of the options with each of them: a notebook shows it, and nobody writes it twice."""
    before, field, after = inspect.cleandoc(text).partition(":raises ")
    lines = [f":param {one.name}: {one.help} ({one.facts})" for one in FIELDS.values()]
    wrapped = [textwrap.fill(line, 112, subsequent_indent="  ", break_long_words=False) for line in lines]
    return "\n".join([*before.splitlines(), *wrapped, field + after])


Options.__doc__ = _explained(Options.__doc__ or "")


def _check_names(changes: Mapping[str, Any]) -> None:
    unknown = [name for name in changes if name not in FIELDS]
    if unknown:
        raise OptionsError(
            f"No such option: {', '.join(unknown)}. {did_you_mean(unknown, FIELD_NAMES)}There are "
            f"{', '.join(FIELD_NAMES)}."
        )


def _all_prerequisites(name: str) -> set[str]:
    direct = PREREQUISITES.get(name, ())
    return set(direct).union(*(_all_prerequisites(needed) for needed in direct))


def _comparable(value: Any, is_codec: bool = False) -> Hashable:
    """A hashable picture of an option's value, equal for values that configure the same."""
    if is_codec and not isinstance(value, str):
        return codec_key(value)
    if isinstance(value, functools.partial):
        return (_comparable(value.func), _comparable(value.args), _comparable(value.keywords))
    if isinstance(value, Mapping):
        return frozenset((key, _comparable(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(part) for part in value)
    return value if isinstance(value, Hashable) else repr(value)
