"""The value of an option as people read it: on or off, a number with its unit, and what stands where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hivenb.options.as_code import describe
from hivenb.options.choices import power_sgd
from hivenb.options.options import FIELDS

#: What counts where an option is not given; an option that is on as needed says by itself whether it is.
_INSTEAD: Mapping[str, str] = {
    "batch_size": "that of the data",
    "delay_optimizer_step": "off",
    "offload_optimizer": "off",
    "scheduler_fn": "the module's own",
    "allreduce_timeout": "as averaging timeout",
    "next_chunk_timeout": "as matchmaking time",
    "grad_averager_factory": "all-reduce",
    "client_mode": "as the network needs it",
}


def value_in_words(name: str, value: Any) -> str:
    """A value of an option, without the option's name.

    :param name: of the option
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return _INSTEAD.get(name, "none")
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        number = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        return f"{number} seconds" if FIELDS[name].unit == "seconds" else number  # other labels say what they count
    if name == "grad_averager_factory" and (told := power_sgd(value)) is not None:
        return f"PowerSGD, rank {told.averager_rank}"
    return "none" if value in ((), {}) else describe(value)
