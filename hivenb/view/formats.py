"""Numbers and states as people read them: with a unit, in few digits, the same everywhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hivenb.figures.metric_names import is_share

if TYPE_CHECKING:
    from hivenb.swarm.members import Member

STATES = {
    "ready": "ready to start",
    "starting": "starting",
    "training": "training",
    "paused": "paused",
    "stopping": "stopping",
    "stopped": "stopped",
    "finished": "finished",
    "failed": "failed",
}

ABSENT = "\N{EN DASH}"


def state(value: object) -> str:
    """A run's state in words; an unknown one as it is."""
    name = str(getattr(value, "value", value))
    return STATES.get(name, name)


def count(number: int | float) -> str:
    """A whole number with its thousands apart: ``1,310``."""
    return f"{number:,.0f}" if math.isfinite(number) else ABSENT


def counted(number: int | float, thing: str) -> str:
    """A number of things: ``1 peer``, ``3 peers``, ``2 batches``."""
    things = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{count(number)} {thing if number == 1 else things}"


def duration(seconds: float | None) -> str:
    """Seconds as ``0.4 s``, ``12 s``, ``2 min 5 s`` or ``3 h 10 min``; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 0.05:
        return "0 s"
    if seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = whole // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def left(seconds: float) -> str:
    """What remains: ``3 s left``, and the same words all through the last second."""
    return f"{duration(seconds)} left" if seconds >= 1 else "< 1 s left"


def ago(seconds: float | None) -> str:
    """An age in steps so coarse that a table which shows it changes only now and then."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 5:
        return "just now"
    if seconds < 60:
        return f"{int(seconds // 5) * 5} s ago"
    return f"{duration(seconds // 60 * 60)} ago"


def rate(samples_per_second: float | None) -> str:
    """Samples a second: ``412 samples/s``; a dash for None."""
    if samples_per_second is None or not math.isfinite(samples_per_second):
        return ABSENT
    if 0 < samples_per_second < 9.95:
        return f"{samples_per_second:.1f} samples/s"
    return f"{count(samples_per_second)} samples/s"


def share(part: float) -> str:
    """A part of a whole: ``42 %``, and ``< 1 %`` for what is not nothing."""
    return f"{100 * part:.0f} %" if part == 0 or part >= 0.01 else "< 1 %"


def presence(member: Member) -> str:
    """When a peer reported last, or what has become of it."""
    seen = ago(member.peer.age)
    return {"here": seen, "gone": f"gone ({seen})", "not watched": ABSENT}.get(
        member.presence.value, member.presence.value
    )


def value(number: float | None) -> str:
    """A loss or a metric in three or four digits; a dash for None."""
    if number is None:
        return ABSENT
    if not math.isfinite(number):
        return "not a number" if math.isnan(number) else "infinite"
    size = abs(number)
    if size >= 1000:
        return f"{number:,.0f}" if size < 1e7 else f"{number:.2e}"
    if size >= 10:
        return f"{number:.1f}"
    if size >= 1:
        return f"{number:.2f}"
    if size >= 0.001 or size == 0:
        return f"{number:.3f}"
    return f"{number:.1e}"


def size(number: float | None) -> str:
    """Bytes as ``1.2 MB``, in powers of ten as networks count them; a dash for None."""
    if number is None or not math.isfinite(number):
        return ABSENT
    scale, unit = byte_unit(number)
    amount = number / scale
    return f"{amount:.1f} {unit}" if scale > 1 and abs(amount) < 9.95 else f"{amount:,.0f} {unit}"


def byte_unit(most: float) -> tuple[float, str]:
    """The unit in which so many bytes are a number with few digits."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((scale, unit) for scale, unit in units if abs(most) >= 0.9995 * scale), (1.0, "B"))


def metric(name: str, number: float | None) -> str:
    """A metric's value: accuracies as a percentage, others as a plain number."""
    if number is not None and is_share(name) and 0 <= number <= 1:
        return f"{100 * number:.1f} %"
    return value(number)


def title(name: str) -> str:
    """A series' name as a heading: ``val_acc`` becomes ``Validation accuracy``."""
    known = {"loss": "Training loss", "val_loss": "Validation loss", "val_acc": "Validation accuracy"}
    if name in known:
        return known[name]
    words = name.replace("_", " ").replace("/", " ").strip()
    if words.startswith("val "):
        words = "validation " + words[4:]
    return words[:1].upper() + words[1:]
