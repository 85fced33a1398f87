"""Each option is declared in one place, and all that is shown and done follows: words, panel, code, checks, changes.

Values in words, as marks on the charts have them, are never Python's.
"""

from __future__ import annotations

import enum
from dataclasses import MISSING, dataclass, field
from typing import Any

import pytest

from hivenb.errors import OptionsError
from hivenb.options import FIELDS, Option, Options, options
from hivenb.options.choices import PowerSGD
from hivenb.options.declarations import Declaration, Place, TakesEffect, declared_in
from hivenb.options.kinds import Count, Kind
from hivenb.view.options_panel import GROUPS, OptionsPanel, about, shown


@pytest.mark.parametrize("option", FIELDS.values(), ids=list(FIELDS))
def test_each_is_declared_in_full(option: Option) -> None:
    if option.default is MISSING:
        assert option.name == "target_batch_size"
    elif option.default is None:
        assert option.kind.takes_none
        assert option.words(None) != ""
    else:
        assert option.kind.checked(option.name, option.default, FIELDS) == option.default
    assert type(option.kind) is not Kind, "of no kind, any value would do"
    assert option.label
    assert "_" not in option.label
    assert option.help.endswith(".")
    assert option.group in ("overlap", "memory", "compression", "rounds")
    assert option.largest_factor is None or option.swarm_wide
    assert set(option.requires) <= set(FIELDS)
    assert isinstance(option.takes_effect, TakesEffect)
    assert option.place is None or (option.place.group in GROUPS and option.kind.control)


def test_a_choice_that_is_an_enumerations_is_kept_as_what_it_stands_for() -> None:
    class Rule(str, enum.Enum):
        NOTHING = "none"

    options = Options(target_batch_size=8, robust_aggregation=Rule.NOTHING)
    assert type(options.robust_aggregation) is str
    assert options.replace(target_batch_size=16).robust_aggregation == "none"


def test_the_panel_has_each_that_has_a_place_in_its_order() -> None:
    in_order = [
        option.name
        for group in GROUPS
        for option in sorted(FIELDS.values(), key=lambda one: -1 if one.place is None else one.place.at)
        if option.place is not None and option.place.group == group
    ]
    assert list(OptionsPanel(lambda name, value: None).controls) == in_order
    for group, names in shown().items():
        places = [place.at for name in names if (place := FIELDS[name].place) is not None]
        assert places == list(range(len(names))), f"two at one place, or a gap, in {group!r}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Zealous(Options):
    """With an option that is nowhere else."""

    zeal: int = field(
        default=3,
        metadata=Declaration(
            kind=Count("pieces"),
            label="zeal",
            help="How zealously this peer trains.",
            group="rounds",
            takes_effect=TakesEffect.NEXT_BATCH,
            place=Place("peer", 99),
            swarm_wide=True,
        ).metadata,
    )


def test_one_that_is_made_up_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options._DECLARED, "zeal", declared_in(Zealous)["zeal"])
    given = Zealous(target_batch_size=8, zeal=5)
    assert given.replace(batch_size=2).zeal == 5
    assert given.difference(given.replace(zeal=6)) == {"zeal": (5, 6)}
    assert repr(given) == "Options(target_batch_size=8, zeal=5)"
    assert "    zeal=5,\n" in given.to_code()
    assert given.to_strategy_kwargs() == {"target_batch_size": 8, "zeal": 5}
    with pytest.raises(OptionsError, match=r"^zeal=0: give a whole number of pieces, at least 1\.$"):
        given.replace(zeal=0)
    with pytest.raises(OptionsError, match=r"No such option: zael. Did you mean zeal\?"):
        given.replace(zael=4)
    assert FIELDS["zeal"].words(5000) == "5,000"
    assert FIELDS["zeal"].facts == "default: ``3``; in pieces; the same at all peers"
    changes: list[tuple[str, Any]] = []
    panel = OptionsPanel(lambda name, value: changes.append((name, value)))
    control = panel.controls["zeal"]
    assert shown()["peer"][-1] == "zeal"
    assert control.description == "zeal, pieces"
    assert about("zeal").startswith("How zealously this peer trains. All peers of a run need the same")
    control.value = "7"
    assert changes == [("zeal", 7)]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delay_grad_averaging", True, "on"),
        ("delay_grad_averaging", False, "off"),
        ("delay_optimizer_step", None, "off"),
        ("offload_optimizer", None, "off"),
        ("matchmaking_time", 10.0, "10 seconds"),
        ("matchmaking_time", 2.5, "2.5 seconds"),
        ("next_chunk_timeout", None, "as matchmaking time"),
        ("allreduce_timeout", None, "as averaging timeout"),
        ("target_batch_size", 4096, "4,096"),
        ("snapshot_every", None, "none"),
        ("performance_ema_alpha", 0.1, "0.1"),
        ("grad_compression", "float16", "float16"),
        ("robust_aggregation", "norm_bound", "norm_bound"),
        ("grad_averager_factory", None, "all-reduce"),
        ("grad_averager_factory", PowerSGD(4).factory(), "PowerSGD, rank 4"),
        ("outer_optimizer", None, "none"),
    ],
)
def test_a_value_in_words(name: str, value: Any, words: str) -> None:
    assert FIELDS[name].words(value) == words


def test_no_default_is_said_as_python_writes_it() -> None:
    defaults = Options(target_batch_size=64)
    said = {name: FIELDS[name].words(getattr(defaults, name)) for name in FIELDS}
    assert not {name: words for name, words in said.items() if words in ("None", "True", "False", "", "()")}


def test_what_is_on_as_needed_is_said_as_it_resolves() -> None:
    needed = Options(target_batch_size=64).with_prerequisites(delay_optimizer_step=True)
    assert FIELDS["offload_optimizer"].words(needed.offload_optimizer) == "on"
    without = needed.with_prerequisites(delay_state_averaging=False)
    assert without.delay_optimizer_step is None
    assert FIELDS["delay_optimizer_step"].words(without.delay_optimizer_step) == "off"
