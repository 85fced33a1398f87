"""Every switch of collaborative training as one value.

An `Options` is checked as a whole when it is made, and never changes: a change is a new value. The names are
those of `hivenb.HivemindStrategy`'s parameters. Importing this module imports neither torch nor hivemind.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from hivenb._signatures import OwnSignature, keywords_of, unchanged, with_keywords
from hivenb.errors import OptionsError
from hivenb.options.as_code import describe, strategy_script
from hivenb.options.checks import NOTES, checked
from hivenb.options.declarations import Declaration, Option, Place, TakesEffect, declared_in, prerequisites
from hivenb.options.kinds import (
    AGGREGATIONS,
    AVERAGER_OPTS,
    FROZEN_PARAMETERS,
    TRACKER_OPTS,
    AveragerFactory,
    Compression,
    Count,
    Flag,
    Names,
    OneOf,
    OuterOptimizer,
    RunName,
    Scheduler,
    Seconds,
    Settings,
    Share,
)

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


# -- options ---------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from hivemind.compression import CompressionBase

    Codec: TypeAlias = str | CompressionBase | None


#: Of Lightning's documentation.
DEFAULT_RUN_ID = "lightning_run"

#: Seconds for which a peer may look for others at a time: no record may stand longer (engine/network/records.py).
MOST_MATCHMAKING = 590

#: By which factor a number that all peers agree on may become larger or smaller at once.
LARGEST_FACTOR = 8


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

    target_batch_size: int = field(
        metadata=Declaration(
            kind=Count("samples"),
            label="target batch size",
            help="Samples that all peers gather before an update: more means less traffic, and fewer updates.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("all peers", 0),
            swarm_wide=True,
            largest_factor=LARGEST_FACTOR,
        ).metadata,
    )
    run_id: str = field(
        default=DEFAULT_RUN_ID,
        metadata=Declaration(
            kind=RunName(),
            label="run name",
            help="Peers with the same run name train together; anybody else in the swarm is left alone.",
            group="rounds",
            takes_effect=TakesEffect.NEXT_START,
            swarm_wide=True,
        ).metadata,
    )
    batch_size: int | None = field(
        default=None,
        metadata=Declaration(
            kind=Count("samples", takes_none=True),
            label="batch size",
            help="Samples in one batch of this peer; found in the data unless given.",
            group="rounds",
            takes_effect=TakesEffect.NEXT_BATCH,
            instead="that of the data",
        ).metadata,
    )
    delay_state_averaging: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="state averaging in background",
            help="Training goes on while parameters are averaged; the result is applied a little later.",
            group="overlap",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("overlap", 0),
        ).metadata,
    )
    delay_optimizer_step: bool | None = field(
        default=None,
        metadata=Declaration(
            kind=Flag(takes_none=True),
            label="optimizer step in background",
            help=("Training goes on during the step and the averaging of parameters, with those of before the step."),
            group="overlap",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("overlap", 1),
            requires=("offload_optimizer", "delay_state_averaging"),
            instead="off",
        ).metadata,
    )
    delay_grad_averaging: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="gradient averaging in background",
            help=(
                "Training goes on while gradients are averaged, which then arrive up to one swarm epoch late: no "
                "wait. Without delay compensation less is learned from as many samples (three peers on digits: "
                "accuracy 0.9 instead of 0.99); a lower learning rate or a longer warm-up helps."
            ),
            group="overlap",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("overlap", 2),
            requires=("delay_optimizer_step",),
        ).metadata,
    )
    delay_compensation: bool = field(
        default=True,
        metadata=Declaration(
            kind=Flag(),
            label="delay compensation",
            help=(
                "While gradients are averaged in the background, a peer goes on from a step with its own: what it "
                "computes then is hardly late, for 4 bytes of main memory a parameter."
            ),
            group="overlap",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 6),
        ).metadata,
    )
    offload_optimizer: bool | None = field(
        default=None,
        metadata=Declaration(
            kind=Flag(takes_none=True),
            label="optimizer in main memory",
            help="Keeps the optimizer's state off the GPU: saves its memory, and costs a copy each update.",
            group="memory",
            takes_effect=TakesEffect.REBUILD,
            place=Place("memory", 0),
            instead="off",
        ).metadata,
    )
    reuse_grad_buffers: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="reuse gradient buffers",
            help="Sums gradients where the model keeps them: saves memory, but rules out zero_grad.",
            group="memory",
            takes_effect=TakesEffect.REBUILD,
            place=Place("memory", 1),
        ).metadata,
    )
    scheduler_fn: Callable[[Any], Any] | None = field(
        default=None,
        metadata=Declaration(
            kind=Scheduler(takes_none=True),
            label="learning rate schedule",
            help="Makes the scheduler from the optimizer; it steps once per swarm epoch, alike on all peers.",
            group="rounds",
            takes_effect=TakesEffect.NEXT_BATCH,
            instead="the module's own",
        ).metadata,
    )
    matchmaking_time: float = field(
        default=5.0,
        metadata=Declaration(
            kind=Seconds(most=MOST_MATCHMAKING),
            label="matchmaking time",
            help="How long a round waits for peers: too short leaves some out, too long holds the others up.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 0),
        ).metadata,
    )
    averaging_timeout: float = field(
        default=30.0,
        metadata=Declaration(
            kind=Seconds(),
            label="averaging timeout",
            help="A longer round is given up: too short loses slow peers, too long waits for lost ones.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 1),
        ).metadata,
    )
    allreduce_timeout: float | None = field(
        default=None,
        metadata=Declaration(
            kind=Seconds(takes_none=True),
            label="exchange timeout",
            help="Limit for one exchange of data within a group; the averaging timeout unless given.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 2),
            instead="as averaging timeout",
        ).metadata,
    )
    next_chunk_timeout: float | None = field(
        default=None,
        metadata=Declaration(
            kind=Seconds(takes_none=True),
            label="chunk timeout",
            help="A peer silent for so long is left out; the matchmaking time, 5 s at least, unless given.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 3),
            instead="as matchmaking time",
        ).metadata,
    )
    load_state_timeout: float = field(
        default=600.0,
        metadata=Declaration(
            kind=Seconds(),
            label="state download timeout",
            help="How long a peer that joins tries to download the others' state before it starts over.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("other", 4),
        ).metadata,
    )
    shutdown_timeout: float = field(
        default=5.0,
        metadata=Declaration(
            kind=Seconds(),
            label="goodbye timeout",
            help="How long a peer that leaves may take to say so.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("other", 5),
        ).metadata,
    )
    grad_compression: Codec = field(
        default="none",
        metadata=Declaration(
            kind=Compression(),
            label="gradients",
            help="How gradients are sent: less traffic, for some precision.",
            group="compression",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("compression", 0),
        ).metadata,
    )
    state_averaging_compression: Codec = field(
        default="none",
        metadata=Declaration(
            kind=Compression(),
            label="parameters",
            help="How parameters are sent when they are averaged: less traffic, but peers agree less exactly.",
            group="compression",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("compression", 1),
        ).metadata,
    )
    load_state_compression: Codec = field(
        default="none",
        metadata=Declaration(
            kind=Compression(),
            label="newcomers' state",
            help="How the state is sent to peers that join: quicker to join, from a less exact start.",
            group="compression",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("other", 3),
        ).metadata,
    )
    grad_averager_factory: Callable[..., Any] | None = field(
        default=None,
        metadata=Declaration(
            kind=AveragerFactory(takes_none=True),
            label="gradient averager",
            help="Replaces the way gradients are averaged, for example by PowerSGD, which sends far less.",
            group="compression",
            takes_effect=TakesEffect.REBUILD,
            place=Place("all peers", 2),
            swarm_wide=True,
            instead="all-reduce",
        ).metadata,
    )
    average_state_every: int = field(
        default=1,
        metadata=Declaration(
            kind=Count("swarm epochs"),
            label="swarm epochs between averagings",
            help="How often parameters are averaged: more rarely saves traffic, and peers drift apart.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("all peers", 1),
            swarm_wide=True,
            largest_factor=LARGEST_FACTOR,
        ).metadata,
    )
    average_opt_statistics: tuple[str, ...] = field(
        default=(),
        metadata=Declaration(
            kind=Names(),
            label="averaged optimizer statistics",
            help="Averages these statistics of the optimizer too, such as exp_avg: closer peers, more traffic.",
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
            swarm_wide=True,
        ).metadata,
    )
    average_buffers: bool = field(
        default=True,
        metadata=Declaration(
            kind=Flag(),
            label="averaged buffers",
            help=("Averages BatchNorm's statistics and other buffers with the parameters; off, each peer has its own."),
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
            place=Place("other", 1),
            swarm_wide=True,
        ).metadata,
    )
    frozen_parameters: str = field(
        default="compare",
        metadata=Declaration(
            kind=OneOf(choices=FROZEN_PARAMETERS),
            label="frozen layers",
            help=(
                "Who joins compares what the optimizer was not given: up to 32 MB that differ, it downloads; "
                "more are an error, unless it is to download them, too, or to have its own."
            ),
            group="rounds",
            takes_effect=TakesEffect.NEXT_START,
            place=Place("other", 2),
        ).metadata,
    )
    robust_aggregation: str = field(
        default="norm_bound",
        metadata=Declaration(
            kind=OneOf(choices=AGGREGATIONS),
            label="robust averages",
            help=(
                "Against members who send garbage: a bound on norms, or centered clipping, for some time and memory."
            ),
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("rounds", 4),
            swarm_wide=True,
        ).metadata,
    )
    snapshot_every: int | None = field(
        default=10,
        metadata=Declaration(
            kind=Count("swarm epochs", takes_none=True),
            label="swarm epochs between snapshots",
            help=(
                "How often a snapshot of a good state is taken in main memory, to roll back to; none without a number."
            ),
            group="memory",
            takes_effect=TakesEffect.NEXT_BATCH,
            place=Place("peer", 0),
        ).metadata,
    )
    auto_roll_back: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="roll back automatically",
            help=(
                "When the loss explodes, all peers return to their last snapshot: swarm epochs are lost, not the run."
            ),
            group="rounds",
            takes_effect=TakesEffect.NEXT_BATCH,
            place=Place("other", 0),
            swarm_wide=True,
        ).metadata,
    )
    use_local_updates: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="local updates",
            help="Each peer updates after every batch, and only parameters are averaged: no wait, less exact.",
            group="overlap",
            takes_effect=TakesEffect.REBUILD,
            place=Place("all peers", 3),
            swarm_wide=True,
        ).metadata,
    )
    outer_optimizer: str | Callable[..., Any] | None = field(
        default=None,
        metadata=Declaration(
            kind=OuterOptimizer(takes_none=True),
            label="outer optimizer",
            help=("With local updates: peers send how far they have come, rarely, and step all together (DiLoCo)."),
            group="overlap",
            takes_effect=TakesEffect.REBUILD,
            place=Place("all peers", 4),
            swarm_wide=True,
            requires=("use_local_updates",),
        ).metadata,
    )
    outer_fragments: int = field(
        default=1,
        metadata=Declaration(
            kind=Count("pieces"),
            label="pieces sent in turn",
            help=(
                "Each update of the outer optimizer sends one of so many pieces of the model: the line's peak falls."
            ),
            group="overlap",
            takes_effect=TakesEffect.REBUILD,
            place=Place("rounds", 5),
            swarm_wide=True,
        ).metadata,
    )
    client_mode: bool | None = field(
        default=None,
        metadata=Declaration(
            kind=Flag(takes_none=True),
            label="client only",
            help="Accepts no connections, for machines behind a firewall; others carry its share.",
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
            place=Place("peer", 1),
            instead="as the network needs it",
        ).metadata,
    )
    auxiliary: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="helper only",
            help="Helps the others to average without training itself.",
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
            place=Place("peer", 2),
        ).metadata,
    )
    averager_opts: dict[str, Any] | None = field(
        default=None,
        metadata=Declaration(
            kind=Settings(known=AVERAGER_OPTS, takes_none=True),
            label="averager settings",
            help="More settings for hivemind's averagers, by their names there.",
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
        ).metadata,
    )
    tracker_opts: dict[str, Any] | None = field(
        default=None,
        metadata=Declaration(
            kind=Settings(known=TRACKER_OPTS, takes_none=True),
            label="progress settings",
            help="More settings for hivemind's progress tracker, by their names there.",
            group="rounds",
            takes_effect=TakesEffect.REBUILD,
        ).metadata,
    )
    performance_ema_alpha: float = field(
        default=0.1,
        metadata=Declaration(
            kind=Share(),
            label="speed smoothing",
            help="Weight of the newest measurement in the estimate of speed: higher follows changes faster.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("other", 6),
        ).metadata,
    )
    verbose: bool = field(
        default=False,
        metadata=Declaration(
            kind=Flag(),
            label="detailed log",
            help="Logs every round, which helps to find out what holds peers up.",
            group="rounds",
            takes_effect=TakesEffect.IN_PLACE,
            place=Place("peer", 3),
        ).metadata,
    )

    __signature__ = OwnSignature(lambda: inspect.Signature(keywords_of(Options.__init__)))

    def __new__(cls, *args: Any, **values: Any) -> Options:
        _check_names(values.keys())  # before the dataclass's own __init__, whose TypeError suggests nothing
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in checked(vars(self), FIELDS).items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Options:
        """The same options with some changed.

        :param changes: new values by option name
        :raises OptionsError: for an unknown name, or when the result cannot work
        """
        return type(self)(**{**vars(self), **changes})

    def with_prerequisites(self, **changes: Any) -> Options:
        """Like `replace`, but switches on what an option needs with it, and off what needs it.

        An explicit value among the changes is never overruled: if it contradicts another one, that is an
        error.

        :param changes: new values by option name
        :raises OptionsError: for an unknown name, or when the result cannot work
        """
        _check_names(changes.keys())
        wanted = dict(changes)
        for name, value in changes.items():
            if value not in (None, False):
                for needed in prerequisites(FIELDS, name):
                    wanted.setdefault(needed, True)
            for dependent in FIELDS:
                if name in prerequisites(FIELDS, dependent) and value is False and getattr(self, dependent):
                    wanted.setdefault(dependent, FIELDS[dependent].default)
        if wanted.get("outer_optimizer", self.outer_optimizer) is None:
            wanted.setdefault("outer_fragments", FIELDS["outer_fragments"].default)
        return self.replace(**wanted)

    def difference(self, other: Options) -> dict[str, tuple[Any, Any]]:
        """What differs from these options to others: option name -> (value here, value there)."""
        found: dict[str, tuple[Any, Any]] = {}
        for name, value in vars(self).items():
            theirs, key = getattr(other, name), FIELDS[name].kind.key
            if value is not theirs and key(value) != key(theirs):
                found[name] = (value, theirs)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of these options, which work, each with what helps; mostly nothing."""
        return tuple(text for note in NOTES for text in note.says(*(getattr(self, name) for name in note.of)))

    def to_strategy_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `hivenb.HivemindStrategy`: what is not the default, codecs as objects.

        :raises MissingDependencyError: when a codec needs a package that has been removed since
        """
        return {name: FIELDS[name].kind.argument(value) for name, value in self._changed().items()}

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
        written = {name: (value, FIELDS[name].kind.expression) for name, value in self._changed().items()}
        return strategy_script(written, model=model, data=data, trainer=trainer, copies=copies)

    def _changed(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if FIELDS[name].default is dataclasses.MISSING or FIELDS[name].kind.key(value) != FIELDS[name].default
        }

    def __eq__(self, other: object) -> bool:
        return not self.difference(other) if isinstance(other, Options) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(FIELDS[name].kind.key(value) for name, value in vars(self).items()))

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={describe(value)}' for name, value in self._changed().items())})"


for _changing in (Options.replace, Options.with_prerequisites):
    _shown = with_keywords(_changing, unchanged(keywords_of(Options.__init__)))
    _changing.__signature__ = _shown  # type: ignore[attr-defined]

#: What is declared of each, which :data:`FIELDS` lets others read.
_DECLARED = declared_in(Options)

#: What is known about each option, by its name, in the order in which people should see them.
FIELDS: Mapping[str, Option] = MappingProxyType(_DECLARED)

FIELD_NAMES = tuple(FIELDS)


def _explained(text: str) -> str:
    """The docstring of the options with each of them: a notebook shows it, and nobody writes it twice."""
    before, field, after = inspect.cleandoc(text).partition(":raises ")
    lines = [f":param {one.name}: {one.help} ({one.facts})" for one in FIELDS.values()]
    wrapped = [textwrap.fill(line, 112, subsequent_indent="  ", break_long_words=False) for line in lines]
    return "\n".join([*before.splitlines(), *wrapped, field + after])


Options.__doc__ = _explained(Options.__doc__ or "")


def _check_names(names: Iterable[str]) -> None:
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise OptionsError(
            f"No such option: {', '.join(unknown)}. {did_you_mean(unknown, FIELDS)}There are {', '.join(FIELDS)}."
        )
