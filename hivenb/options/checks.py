"""Every reason why a set of options cannot work, found before hivemind finds the first the hard way.

hivemind checks with bare asserts, some of them only at the end of the first epoch, inside a background
thread. The rules here are those asserts, and the combinations that it accepts but cannot train with. What is wrong with
one value by itself, its kind knows (:mod:`hivenb.options.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hivenb.errors import OptionsError
from hivenb.options.choices import NESTEROV
from hivenb.options.declarations import Declared
from hivenb.options.kinds import short


def checked(values: Mapping[str, Any], declared: Declared) -> dict[str, Any]:
    """The same values in one form each: plain ints and floats, codecs by name where they have one, own copies
    of dicts; what is on as needed (None) is on where it is needed, as in hivemind.

    :param values: of all options, by name
    :param declared: what is declared of them
    :raises OptionsError: when a value, or a combination, cannot work; each problem with option, value and remedy
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    wrong = set()
    for name, value in values.items():
        kind = declared[name].kind
        try:
            found[name] = None if value is None and kind.takes_none else kind.checked(name, value, declared)
        except OptionsError as error:
            problems += error.args
            wrong.add(name)
    for name, option in declared.items():
        if option.requires and found.get(name) is True:
            found |= _needed(name, found, declared)
    # combinations of values that are wrong by themselves only confuse
    for name, option in declared.items():
        if option.requires and wrong.isdisjoint((name, *option.requires)):
            problems += _missing(name, found[name], {other: found[other] for other in option.requires})
    for rule in COMBINATIONS:
        if wrong.isdisjoint(rule.of):
            problems += rule.says(*(found[name] for name in rule.of))
    if len(problems) == 1:
        raise OptionsError(problems[0])
    if problems:
        raise OptionsError("\n- ".join([f"{len(problems)} problems:", *problems]))
    return found


def _needed(name: str, values: Mapping[str, Any], declared: Declared) -> dict[str, bool]:
    """What is on as needed, and needed by an option that is on."""
    needed: dict[str, bool] = {}
    for other in declared[name].requires:
        if values.get(other, False) is None:
            needed[other] = True
        if other in needed or values.get(other) is True:
            needed |= _needed(other, values, declared)
    return needed


def _missing(name: str, value: Any, needed: Mapping[str, Any]) -> Iterator[str]:
    """What an option that is on would need, and is off."""
    missing = [other for other, on in needed.items() if on is not True]
    if value not in (None, False) and missing:
        wanted = " and ".join(f"{other}=True" for other in missing)
        given = ", ".join(f"{other}={needed[other]!r}" for other in missing)
        on = f"{name}={short(value)}"
        remedy = f"set that too, for example with Options.with_prerequisites({on}), or leave {name} off."
        yield f"{on} needs {wanted} (now {given}): {remedy}"


# -- combinations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """A rule for some options together.

    :param of: their names
    :param says: what is wrong with their values, which it is called with in this order, or what they cost; each with a
      remedy
    """

    of: tuple[str, ...]
    says: Callable[..., Iterator[str]]


def _round_ends_before_it_begins(matchmaking: float, timeout: float) -> Iterator[str]:
    if timeout <= matchmaking:
        yield (
            f"averaging_timeout={timeout:g} does not exceed matchmaking_time={matchmaking:g}: a round would "
            f"end before it could begin; give it more, such as {3 * matchmaking:g} seconds."
        )


def _local_updates_without(name: str, reason: str) -> Combination:
    """The rule that an option does not go with local updates."""

    def wrong(use_local_updates: bool, value: Any) -> Iterator[str]:
        if use_local_updates and value:
            yield f"use_local_updates=True does not go with {name}={short(value)}: {reason}; drop one."

    return Combination(("use_local_updates", name), wrong)


def _local_updates_in_the_same_memory(
    use_local_updates: bool, delay_state_averaging: bool, averager_opts: dict[str, Any] | None
) -> Iterator[str]:
    if use_local_updates and delay_state_averaging and (averager_opts or {}).get("reuse_tensors"):
        yield (
            "averager_opts['reuse_tensors']=True does not go with use_local_updates=True and "
            "delay_state_averaging=True: both would write to the same memory; drop one of them."
        )


def _helper_that_nobody_reaches(auxiliary: bool, client_mode: bool | None) -> Iterator[str]:
    if auxiliary and client_mode:
        yield "auxiliary=True does not go with client_mode=True: a helper accepts connections; drop one."


def _helper_with_batches(auxiliary: bool, batch_size: int | None) -> Iterator[str]:
    if auxiliary and batch_size is not None:
        yield f"auxiliary=True does not go with batch_size={batch_size}: a helper trains on no batches."


def _helper_with_nothing_to_do(auxiliary: bool, delay_grad_averaging: bool, average_state_every: int) -> Iterator[str]:
    if auxiliary and delay_grad_averaging and average_state_every > 1:
        yield (
            "auxiliary=True with delay_grad_averaging=True needs average_state_every=1 "
            f"(now {average_state_every}): between averagings of parameters a helper would have "
            "nothing to do in the background; leave delay_grad_averaging off."
        )


def _client_that_shares_its_state(client_mode: bool | None, averager_opts: dict[str, Any] | None) -> Iterator[str]:
    if client_mode and (averager_opts or {}).get("allow_state_sharing"):
        yield (
            "averager_opts['allow_state_sharing']=True does not go with client_mode=True: nobody can connect "
            "to this peer to download its state; drop one of them."
        )


def _pieces_of_nothing(fragments: int, chosen: Any) -> Iterator[str]:
    if fragments > 1 and chosen is None:
        yield (
            f"outer_fragments={fragments} without an outer_optimizer, which alone synchronizes a model in pieces: "
            f"set outer_optimizer={NESTEROV!r} as well, or leave it at 1."
        )


def _pieces_without_a_turn(fragments: int, average_state_every: int) -> Iterator[str]:
    if fragments > 1 and average_state_every != 1:
        yield (
            f"outer_fragments={fragments} with average_state_every={average_state_every}: some pieces "
            "would never have their turn. Set average_state_every=1, and target_batch_size to as many samples as "
            "there should be between two exchanges."
        )


def _differences_in_the_same_memory(chosen: Any, averager_opts: dict[str, Any] | None) -> Iterator[str]:
    if chosen is not None and (averager_opts or {}).get("reuse_tensors") is True:
        yield (
            f"averager_opts['reuse_tensors']=True does not go with outer_optimizer={repr(chosen)[:60]}: parameters and "
            "their differences cannot be in the same memory; drop one of them."
        )


#: All rules for more than one option, but that each has what it needs.
COMBINATIONS = (
    Combination(("matchmaking_time", "averaging_timeout"), _round_ends_before_it_begins),
    _local_updates_without("delay_grad_averaging", "gradients are not averaged then"),
    _local_updates_without("grad_averager_factory", "gradients are not averaged then"),
    _local_updates_without(
        "offload_optimizer", "hivemind gives an offloaded optimizer no local gradients: nothing is learned"
    ),
    _local_updates_without("reuse_grad_buffers", "gradients are not accumulated then"),
    Combination(("use_local_updates", "delay_state_averaging", "averager_opts"), _local_updates_in_the_same_memory),
    Combination(("auxiliary", "client_mode"), _helper_that_nobody_reaches),
    Combination(("auxiliary", "batch_size"), _helper_with_batches),
    Combination(("auxiliary", "delay_grad_averaging", "average_state_every"), _helper_with_nothing_to_do),
    Combination(("client_mode", "averager_opts"), _client_that_shares_its_state),
    Combination(("outer_fragments", "outer_optimizer"), _pieces_of_nothing),
    Combination(("outer_fragments", "average_state_every"), _pieces_without_a_turn),
    Combination(("outer_optimizer", "averager_opts"), _differences_in_the_same_memory),
)


# -- notes -----------------------------------------------------------------------------------------------------------


def _gradients_come_late(delay_grad_averaging: bool, delay_compensation: bool, auxiliary: bool) -> Iterator[str]:
    if delay_grad_averaging and not delay_compensation and not auxiliary:
        yield (
            "delay_grad_averaging=True with delay_compensation=False: gradients arrive up to one swarm epoch late, and "
            "less is learned from as many samples (three peers on digits: accuracy 0.9 instead of 0.99). "
            "delay_compensation=True makes up for most of it; a lower learning rate or a longer warm-up helps."
        )


#: What works, and costs something that nobody would expect.
NOTES = (Combination(("delay_grad_averaging", "delay_compensation", "auxiliary"), _gradients_come_late),)
