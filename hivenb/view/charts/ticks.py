"""Where the ticks of an axis go, and what is written on them.

Not by ``matplotlib.ticker``: its locators and formatters follow the user's style, which may change while a background
thread draws, ``LogLocator`` gives more ticks than fit or none, and none of them knows minutes and hours.
"""

from __future__ import annotations

import math

from hivenb.view.formats import byte_unit

_STEPS_OF_TIME = (
    1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400
)  # fmt: skip
_UNITS_OF_TIME = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def time_ticks(end: float, most: int, start: float = 0.0) -> tuple[list[float], list[str]]:
    """Ticks from ``start`` to ``end`` seconds, each label with its unit.

    :param end: seconds, more than ``start``
    :param most: ticks that fit, not counting the one at ``start``
    """
    step = next((s for s in _STEPS_OF_TIME if (end - start) / s <= most), None)
    if step is None:
        step = 86400 * math.ceil((end - start) / 86400 / most)
    size, unit = next((size, unit) for size, unit in _UNITS_OF_TIME if step >= size and step % size == 0)
    numbers = range(math.ceil(start / step), int(end // step) + 1)
    places = [float(number * step) for number in numbers]
    if size < 3600 and start >= 60 * size:  # far from the start: 62 min 5 s rather than 3725 s
        larger = "h" if size == 60 else "min"
        parts = [divmod(round(place / size), 60) for place in places]
        return places, [f"{many} {larger} {few} {unit}" if few else f"{many} {larger}" for many, few in parts]
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


def byte_ticks(low: float, high: float, most: int) -> tuple[list[float], list[str]]:
    """Round numbers of bytes between ``low`` and ``high``, each label with its unit."""
    scale, unit = byte_unit(high)
    places, labels = number_ticks(low / scale, high / scale, most)
    return [place * scale for place in places], [
        f"{label} {unit}" if place else "0" for place, label in zip(places, labels, strict=True)
    ]


def log_ticks(low: float, high: float, most: int) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis: powers of ten, with round numbers between them where there is room.

    :param low: the axis' limits as logarithms to base 10, ``low < high``
    :param high: the axis' limits as logarithms to base 10, ``low < high``
    :param most: ticks that fit
    """
    for factors in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(low), math.ceil(high) + 1)
        numbers = [factor * 10.0**power for power in powers for factor in factors]
        numbers = [number for number in numbers if low <= math.log10(number) <= high]
        if len(numbers) <= most:
            break
    else:
        numbers = numbers[:: math.ceil(len(numbers) / most)]
    if len(numbers) < 2:  # less than a decade: evenly spaced ones tell more
        places, labels = number_ticks(10.0**low, 10.0**high, most)
        found = [(math.log10(place), label) for place, label in zip(places, labels, strict=True) if place > 0]
        return [place for place, _ in found], [label for _, label in found]
    return [math.log10(number) for number in numbers], [
        f"{number:,.10g}" if 1e-4 <= number < 1e6 else f"{number:.0e}" for number in numbers
    ]


def _label(place: float, step: float, percent: bool) -> str:
    if percent:
        return f"{place * 100:.{_digits(step * 100)}f} %"
    if step >= 1e6 or step < 1e-5:
        # as many digits as it takes to tell neighbours apart
        digits = 3 if place == 0 else max(3, math.ceil(math.log10(abs(place) / step)) + 2)
        return f"{place:.{digits}g}"
    if step >= 1000:
        return f"{place / 1000:,.{_digits(step / 1000)}f}k" if place else "0"
    return f"{place:,.{_digits(step)}f}"


def _digits(step: float) -> int:
    """Decimals that tell neighbouring ticks apart, and no more."""
    return next((digits for digits in range(8) if math.isclose(round(step, digits), step, rel_tol=1e-6)), 8)
