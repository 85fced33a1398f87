"""Where the ticks of an axis go, and what is written on them."""

from __future__ import annotations

import math

_STEPS_OF_TIME = (
    1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400
)  # fmt: skip
_UNITS_OF_TIME = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def time_ticks(end: float, most: int) -> tuple[list[float], list[str]]:
    """Ticks from 0 to ``end`` seconds, each label with its unit.

    :param end: seconds, more than 0
    :param most: ticks that fit, not counting the one at 0
    """
    step = next((s for s in _STEPS_OF_TIME if end / s <= most), None)
    if step is None:
        step = 86400 * math.ceil(end / 86400 / most)
    size, unit = next((size, unit) for size, unit in _UNITS_OF_TIME if step >= size and step % size == 0)
    places = [float(i * step) for i in range(int(end // step) + 1)]
    return places, [f"{place / size:.0f} {unit}" for place in places]


def number_ticks(
    low: float, high: float, most: int, *, whole: bool = False, percent: bool = False
) -> tuple[list[float], list[str]]:
    """Round numbers between ``low`` and ``high``.

    :param low: the axis' limits, ``low < high``
    :param high: the axis' limits, ``low < high``
    :param most: ticks that fit
    :param whole: nothing but whole numbers
    :param percent: write shares of one as percentages
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    places = [i * step for i in range(first, last + 1)]
    return places, [_label(place, step, percent) for place in places]


def _label(place: float, step: float, percent: bool) -> str:
    if percent:
        return f"{place * 100:.{_digits(step * 100)}f} %"
    if step >= 1e6 or step < 1e-5:
        return f"{place:.3g}"
    if step >= 1000:
        return f"{place / 1000:,.{_digits(step / 1000)}f}k" if place else "0"
    return f"{place:,.{_digits(step)}f}"


def _digits(step: float) -> int:
    """Decimals that tell neighbouring ticks apart, and no more."""
    return next((digits for digits in range(8) if math.isclose(round(step, digits), step, rel_tol=1e-6)), 8)
