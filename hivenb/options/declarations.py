"""What is declared of an option, in one place: its values, its words, its place in the panel, and when it takes effect.

The declarations themselves are those of the fields of :class:`hivenb.options.options.Options`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from hivenb.options.kinds import Kind


class TakesEffect(Enum):
    """From when on a run that trains goes by another value of an option."""

    #: The strategy looks it up; the optimizer does not know of it.
    NEXT_BATCH = "at the next batch"
    #: The optimizer that trains is given it: ``set_live`` of ``hivenb/engine/optimizer/handover.py``.
    IN_PLACE = "at the next batch, in the optimizer that trains"
    #: The optimizer that trains hands over to one that is made with it.
    REBUILD = "at the next batch, in another optimizer"
    #: Nothing that trains goes by it.
    NEXT_START = "at the next start"


class Place(NamedTuple):
    """Where the panel shows an option.

    :param group: of switches; ``GROUPS`` of ``hivenb/view/options_panel.py`` has them
    :param at: which one of that group it is, counted from 0, as one thing builds on another
    """

    group: str
    at: int


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All that is said of one option beside its type and default.

    :param kind: which values it takes
    :param label: its name in words
    :param help: what it costs and gains, one sentence
    :param group: of the reference: "overlap", "memory", "compression" or "rounds"
    :param takes_effect: from when on, where a run trains
    :param place: in the panel; ``None`` where it has no switch
    :param swarm_wide: whether all peers of a run must agree on it
    :param largest_factor: by which a number that all agree on may become larger or smaller at once
    :param requires: options that must be on as well for this one to be on
    :param instead: what counts where it is not given, in words
    """

    kind: Kind
    label: str
    help: str
    group: str
    takes_effect: TakesEffect
    place: Place | None = None
    swarm_wide: bool = False
    largest_factor: int | None = None
    requires: tuple[str, ...] = ()
    instead: str | None = None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """For the field of the dataclass that holds its values."""
        return vars(self)


@dataclass(frozen=True, kw_only=True)
class Option(Declaration):
    """What is known about one option: what people should know, and what code needs.

    :param name: the option's name, the same everywhere in code
    :param default: its value unless given; `dataclasses.MISSING` where it must be given
    """

    name: str
    default: Any

    @property
    def unit(self) -> str | None:
        """Of a number: "samples", "seconds", "swarm epochs" or "pieces"."""
        return self.kind.unit

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

    def words(self, value: Any) -> str:
        """A value of it as people read it, without its name."""
        if value is None:
            return self.instead or "none"
        return self.kind.words(value)


Declared = Mapping[str, Option]


def declared_in(options: Any) -> dict[str, Option]:
    """What a dataclass declares of its fields, by their names."""
    return {one.name: Option(name=one.name, default=one.default, **one.metadata) for one in dataclasses.fields(options)}


def prerequisites(declared: Declared, name: str) -> set[str]:
    """All that must be on for an option to be on."""
    direct = declared[name].requires
    return set(direct).union(*(prerequisites(declared, needed) for needed in direct))
