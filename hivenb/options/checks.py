"""Every reason why a set of options cannot work, found before hivemind finds the first the hard way.

hivemind checks with bare asserts, some of them only at the end of the first epoch, inside a background
thread. The rules here are those asserts, and the combinations that it accepts but cannot train with.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hivenb.compression import codec_name, missing_package
from hivenb.errors import OptionsError
from hivenb.options.choices import wrong_outer_optimizer

CODEC_FIELDS = ("grad_compression", "state_averaging_compression", "load_state_compression")

#: Options that must be on as well: ``state_averager.py`` works in background only on a copy. Who needs comes first.
PREREQUISITES: Mapping[str, tuple[str, ...]] = {
    "delay_grad_averaging": ("delay_optimizer_step",),
    "delay_optimizer_step": ("offload_optimizer", "delay_state_averaging"),
    "outer_optimizer": ("use_local_updates",),
}

#: Rules by which what peers send is averaged, with their names in words.
AGGREGATIONS: Mapping[str, str] = {
    "none": "none: any finite numbers count",
    "norm_bound": "bound on norms",
    "centered_clipping": "centered clipping",
}

#: What becomes of layers that the optimizer was not given, with the words for it.
FROZEN_PARAMETERS: Mapping[str, str] = {
    "compare": "compared",
    "download": "downloaded",
    "own": "each peer's own",
}

_FLAGS = (
    "delay_state_averaging",
    "delay_grad_averaging",
    "reuse_grad_buffers",
    "average_buffers",
    "roll_back",
    "use_local_updates",
    "auxiliary",
)
_MAYBE_FLAGS = ("delay_optimizer_step", "offload_optimizer", "client_mode")

#: The largest number of samples or epochs, and of bytes in a part of what is averaged, which is one message.
MOST, MOST_IN_PART = 2**40, 2**24

#: Seconds for which a peer may let its records stand; the others take no other (hivenb/engine/network/records.py).
_LONGEST_RECORDS = {("averager_opts", "declare_state_period"): 590, ("tracker_opts", "metadata_expiration"): 120}

#: Seconds for which a peer may look for others at a time, for the same reason.
MOST_MATCHMAKING = 590

_COUNTS = {
    "target_batch_size": "samples",
    "batch_size": "samples",
    "average_state_every": "epochs",
    "keep_state_every": "epochs",
    "outer_fragments": "pieces",
}
_SECONDS = (
    "matchmaking_time",
    "averaging_timeout",
    "allreduce_timeout",
    "next_chunk_timeout",
    "load_state_timeout",
    "shutdown_timeout",
)
#: Numbers that need not be given.
MAY_BE_NONE = ("batch_size", "keep_state_every", "allreduce_timeout", "next_chunk_timeout")

# What hivemind.Optimizer passes to its averagers by another name than that of the option which sets it.
_SET_ELSEWHERE = {
    "min_matchmaking_time": "matchmaking_time",
    "scheduler": "scheduler_fn",
    "state_compression": "load_state_compression",
}
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


def normalized(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values in one form each: plain ints and floats, codecs by name where they have one, own copies
    of dicts; what is on as needed (None) is on where it is needed, as in hivemind.

    What is wrong stays as it is, for `find_problems` to report.
    """
    result = dict(values)
    for name in _COUNTS:
        if _is_integer(values[name]):
            result[name] = operator.index(values[name])
    for name in (*_SECONDS, "performance_ema_alpha"):
        if _is_number(values[name]):
            result[name] = float(values[name])
    for name, needed in PREREQUISITES.items():
        if result[name] is True:
            result |= {other: True for other in needed if result[other] is None}
    for name in CODEC_FIELDS:
        try:
            result[name] = codec_name(values[name]) or values[name]
        except OptionsError:
            continue
    for name in ("averager_opts", "tracker_opts"):
        if isinstance(values[name], Mapping):
            result[name] = dict(values[name]) or None
    statistics = values["average_opt_statistics"]
    if isinstance(statistics, Sequence) and not isinstance(statistics, str):
        result["average_opt_statistics"] = tuple(statistics)
    return result


def find_problems(values: Mapping[str, Any]) -> list[str]:
    """Every reason why these (normalized) options cannot work, each naming option, value and remedy."""
    problems = [*_wrong_values(values), *_wrong_codecs(values)]
    if not problems:  # combinations of values that are wrong by themselves only confuse
        problems += _wrong_combinations(values)
    return [*problems, *_wrong_functions(values), *wrong_outer_optimizer(values), *_wrong_settings(values)]


def _wrong_values(values: Mapping[str, Any]) -> Iterator[str]:
    for name, unit in _COUNTS.items():
        value = values[name]
        if not (_is_integer(value) and 0 < value <= MOST) and not (value is None and name in MAY_BE_NONE):
            bound = f"at most {MOST:,}" if _is_integer(value) and value > MOST else "at least 1"
            yield f"{name}={value!r}: give a whole number of {unit}, {bound}."
    for name in _SECONDS:
        value = values[name]
        if not (_is_number(value) and 0 < value < math.inf) and not (value is None and name in MAY_BE_NONE):
            yield f"{name}={value!r}: give a number of seconds above 0."
    if _is_number(matchmaking := values["matchmaking_time"]) and MOST_MATCHMAKING < matchmaking < math.inf:
        yield f"matchmaking_time={matchmaking!r}: give at most {MOST_MATCHMAKING} seconds; peers take no such records."
    alpha = values["performance_ema_alpha"]
    if not (_is_number(alpha) and 0 < alpha < 1):
        yield f"performance_ema_alpha={alpha!r}: give a number between 0 and 1."
    for name in (*_FLAGS, *_MAYBE_FLAGS, "verbose"):
        if not isinstance(values[name], bool) and not (values[name] is None and name in _MAYBE_FLAGS):
            yield f"{name}={values[name]!r}: give True or False{', or None' if name in _MAYBE_FLAGS else ''}."
    if values["robust_aggregation"] not in (*AGGREGATIONS,):
        yield f"robust_aggregation={values['robust_aggregation']!r}: give one of {', '.join(AGGREGATIONS)}."
    if values["frozen_parameters"] not in (*FROZEN_PARAMETERS,):
        yield f"frozen_parameters={values['frozen_parameters']!r}: give one of {', '.join(FROZEN_PARAMETERS)}."
    run_id = values["run_id"]
    if not isinstance(run_id, str) or not run_id.strip():
        yield f"run_id={run_id!r}: give the run a name."
    elif "." in run_id:
        yield f"run_id={run_id!r}: hivemind allows no dot in it; {run_id.replace('.', '-')!r} would do."
    statistics = values["average_opt_statistics"]
    if not isinstance(statistics, tuple) or not all(isinstance(name, str) for name in statistics):
        yield f'average_opt_statistics={statistics!r}: give a list of names, such as ("exp_avg",).'


def _wrong_codecs(values: Mapping[str, Any]) -> Iterator[str]:
    for name in CODEC_FIELDS:
        try:
            known = codec_name(values[name])
        except OptionsError as error:
            yield f"{name}: {error}"
            continue
        package = missing_package(known) if known is not None else None
        if package is not None:
            yield (
                f"{name}={known!r} needs the package {package}, which is not installed: "
                f"run `pip install {package}`, or choose another codec."
            )


def _wrong_combinations(values: Mapping[str, Any]) -> Iterator[str]:
    for name, needed in PREREQUISITES.items():
        missing = [other for other in needed if values[other] is not True]
        if values[name] not in (None, False) and missing:
            wanted = " and ".join(f"{other}=True" for other in missing)
            given = ", ".join(f"{other}={values[other]!r}" for other in missing)
            on = f"{name}={_short(values[name])}"
            remedy = f"set that too, for example with Options.with_prerequisites({on}), or leave {name} off."
            yield f"{on} needs {wanted} (now {given}): {remedy}"
    matchmaking, timeout = values["matchmaking_time"], values["averaging_timeout"]
    if timeout <= matchmaking:
        yield (
            f"averaging_timeout={timeout:g} does not exceed matchmaking_time={matchmaking:g}: a round would "
            f"end before it could begin; give it more, such as {3 * matchmaking:g} seconds."
        )
    if values["use_local_updates"]:
        yield from _wrong_with_local_updates(values)
    if values["auxiliary"]:
        yield from _wrong_for_helpers(values)
    settings = _settings(values, "averager_opts")
    if settings.get("allow_state_sharing") and values["client_mode"]:
        yield (
            "averager_opts['allow_state_sharing']=True does not go with client_mode=True: nobody can connect "
            "to this peer to download its state; drop one of them."
        )


def _wrong_with_local_updates(values: Mapping[str, Any]) -> Iterator[str]:
    reasons = {
        "delay_grad_averaging": "gradients are not averaged then",
        "grad_averager_factory": "gradients are not averaged then",
        "offload_optimizer": "hivemind gives an offloaded optimizer no local gradients: nothing is learned",
        "reuse_grad_buffers": "gradients are not accumulated then",
    }
    for name, reason in reasons.items():
        if values[name]:
            yield f"use_local_updates=True does not go with {name}={_short(values[name])}: {reason}; drop one."
    if _settings(values, "averager_opts").get("reuse_tensors") and values["delay_state_averaging"]:
        yield (
            "averager_opts['reuse_tensors']=True does not go with use_local_updates=True and "
            "delay_state_averaging=True: both would write to the same memory; drop one of them."
        )


def _wrong_for_helpers(values: Mapping[str, Any]) -> Iterator[str]:
    if values["client_mode"]:
        yield "auxiliary=True does not go with client_mode=True: a helper accepts connections; drop one."
    if values["batch_size"] is not None:
        batch_size = values["batch_size"]
        yield f"auxiliary=True does not go with batch_size={batch_size}: a helper trains on no batches."
    if values["delay_grad_averaging"] and values["average_state_every"] > 1:
        yield (
            "auxiliary=True with delay_grad_averaging=True needs average_state_every=1 "
            f"(now {values['average_state_every']}): between averagings of parameters a helper would have "
            "nothing to do in the background; leave delay_grad_averaging off."
        )


def _wrong_functions(values: Mapping[str, Any]) -> Iterator[str]:
    scheduler_fn, factory = values["scheduler_fn"], values["grad_averager_factory"]
    is_scheduler = hasattr(scheduler_fn, "step") and hasattr(scheduler_fn, "optimizer")
    if scheduler_fn is not None and not callable(scheduler_fn) and not is_scheduler:
        yield (
            f"scheduler_fn={_short(scheduler_fn)}: give a function that makes a scheduler from an optimizer, "
            "such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10), or a scheduler."
        )
    if factory is None:
        return
    if not callable(factory):
        yield f"grad_averager_factory={_short(factory)}: give a class or function that makes an averager."
        return
    bound = factory.keywords if isinstance(factory, partial) else {}
    for name in sorted(set(bound) & set(FACTORY_ARGUMENTS)):
        option = {"compression": "grad_compression", **_SET_ELSEWHERE}.get(name, name)
        remedy = f"use the option {option} instead" if option in values else "leave it out"
        yield f"grad_averager_factory binds {name}={bound[name]!r}, which hivemind overrules: {remedy}."
    reason = _why_not_callable(factory)
    if reason is not None:
        yield (
            f"grad_averager_factory={_short(factory)} cannot be called the way hivemind does: {reason}. Bind "
            "its own arguments first, such as functools.partial(PowerSGDGradientAverager, averager_rank=32)."
        )


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


def _wrong_settings(values: Mapping[str, Any]) -> Iterator[str]:
    for name, known in {"averager_opts": AVERAGER_OPTS, "tracker_opts": TRACKER_OPTS}.items():
        if values[name] is not None and not isinstance(values[name], dict):
            yield f"{name}={values[name]!r}: give a dict of settings by name."
            continue
        for key in (key for key in _settings(values, name) if key not in known):
            if key == "compression":
                yield f"{name} holds {key!r}: use grad_compression and state_averaging_compression instead."
            elif key in _SET_ELSEWHERE or key in values:
                yield f"{name} holds {key!r}: use the option {_SET_ELSEWHERE.get(key, key)} instead."
            else:
                yield f"{name} holds {key!r}, which hivemind does not know: it takes {', '.join(known)}."
    settings = _settings(values, "averager_opts")
    for (name, key), most in _LONGEST_RECORDS.items():
        seconds = _settings(values, name).get(key, 1.0)
        if not (_is_number(seconds) and 0 < seconds <= most):
            yield f"{name}[{key!r}]={seconds!r}: give a number of seconds above 0, at most {most}; peers take no other."
    bandwidth = settings.get("bandwidth")
    if bandwidth is not None and not (_is_number(bandwidth) and 0 <= bandwidth < 2**127):
        yield f"averager_opts['bandwidth']={bandwidth!r}: give a number, at least 0, or leave it out."
    bits = settings.get("initial_group_bits", "")
    if not (isinstance(bits, str) and set(bits) <= set("01")):
        yield f"averager_opts['initial_group_bits']={bits!r}: give a string of 0 and 1."
    part = settings.get("part_size_bytes")
    if part is not None and not (_is_integer(part) and 0 < part <= MOST_IN_PART):
        yield f"averager_opts['part_size_bytes']={part!r}: give a number of bytes, at most {MOST_IN_PART:,}."
    size = settings.get("target_group_size")
    if size is not None and not (_is_integer(size) and size >= 2):
        yield f"averager_opts['target_group_size']={size!r}: give 2 or more."


def _settings(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return values[name] if isinstance(values[name], dict) else {}


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _short(value: object) -> str:
    return getattr(value, "__qualname__", None) or repr(value)
