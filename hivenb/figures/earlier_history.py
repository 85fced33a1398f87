"""Histories of earlier runs of the same name: as files hold them, and put before that of a run."""

from __future__ import annotations

import json
import math
import time as _time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType
from typing import Any

import numpy as np

from hivenb.figures.history import APART, EVENT_KINDS, MAX_EVENTS, MAX_SERIES, Event, History, Series, Snapshot

#: In the first line of a file that holds a history.
FORMAT = "hivenb-history-1"

#: Bytes of such a file at most; a larger one is none of ours.
MAX_BYTES = 8 << 20

_MAX_NAME, _MAX_TEXT = 200, 2000

#: Series that count from the beginning of their run.
_COUNTED = ("bytes_sent", "bytes_received", "skipped_batches")


def header_line(run: str, model: str, started_at: float) -> str:
    """The first line of a file.

    :param run: name of the run
    :param model: name of the model's class
    :param started_at: unix time of the first record
    """
    return json.dumps({"format": FORMAT, "run": run, "model": model, "started_at": started_at}) + "\n"


def point_line(name: str, time: float, value: float, epoch: int, samples: int) -> str:
    """A line for a point of a series.

    :param time: unix time
    """
    shown = value if math.isfinite(value) else None
    return json.dumps(["point", name, round(time, 3), shown, int(epoch), int(samples)]) + "\n"


def event_line(event: Event, started_at: float) -> str:
    """A line for an event.

    :param started_at: unix time from which the event's time counts
    """
    return json.dumps(["event", event.kind, round(started_at + event.time, 3), event.text[:_MAX_TEXT]]) + "\n"


def read_history(path: Path) -> tuple[str, Snapshot]:
    """What a file holds: the name of the model's class, and the history.

    The end of a file whose writer was killed may be half a line, which is left out.

    :raises ValueError: if it is no such file
    :raises OSError: if it cannot be read
    """
    status = path.lstat()
    if not S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise ValueError("is no file of a history, or too large for one")
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        raise ValueError("is empty")
    header = json.loads(lines[0])
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("model"), str):
        raise ValueError(f"does not begin as a file of {FORMAT} does")
    history = History()
    records = [_checked(json.loads(line)) for line in lines[1:]]
    for record in sorted(records, key=lambda record: record[2]):  # the first one is where time begins
        _take(record, history)
    return header["model"], history.snapshot()


def _checked(record: Any) -> list[Any]:
    """A line's record, as far as its kind and its time go.

    :raises ValueError: if it is none
    """
    if not isinstance(record, list) or len(record) < 4:
        raise ValueError("has a line that is no record")
    _number(record[2])
    return record


def _take(record: list[Any], history: History) -> None:
    """Put a line's record into a history.

    :raises ValueError: if it is none
    """
    if record[0] == "event" and len(record) == 4:
        _, kind, when, text = record
        if kind not in EVENT_KINDS or not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError("has an event that is none")
        history.mark(kind, text, time=_number(when))
    elif record[0] == "point" and len(record) == 6:
        _, name, when, value, epoch, samples = record
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise ValueError("has a point of no series")
        number = math.nan if value is None else _number(value)
        history.record(name, number, epoch=_whole(epoch), samples=_whole(samples), time=_number(when))
    else:
        raise ValueError("has a line that is no record")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"has {value!r} in place of a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 62) < value < 1 << 62:
        raise ValueError(f"has {value!r} in place of a whole number")
    return value


def joined(histories: Sequence[Snapshot]) -> Snapshot | None:
    """Several histories as one, oldest first, each with an event that says of when it is.

    Time goes on from one to the next without what was between them.
    """
    if not histories:
        return None
    whole = _said_to_be_earlier(histories[0])
    for one in histories[1:]:
        whole = _after(whole, _said_to_be_earlier(one))
    return whole


@lru_cache(maxsize=2)  # one is drawn several times
def whole(present: Snapshot) -> Snapshot:
    """A history behind the earlier ones, as charts show it; itself without any.

    What is earlier has lower epochs and samples than those that it began with.
    """
    return present if present.earlier is None else _after(present.earlier, present)


def _said_to_be_earlier(one: Snapshot) -> Snapshot:
    when = _time.strftime("%b %d, %H:%M", _time.localtime(one.started_at))
    begins = Event(0.0, "run", f"earlier run, {when}")
    is_start = bool(one.events) and one.events[0].kind == "run" and one.events[0].time < APART
    events = one.events[1:] if is_start else one.events  # two words at one place cannot be read
    return replace(one, events=(begins, *(replace(event, text=f"earlier: {event.text}") for event in events)))


def _after(before: Snapshot, after: Snapshot) -> Snapshot:
    """One history behind another."""
    shift = before.end + APART
    epochs = _below(before.series.values(), after.series.values(), "epochs")
    samples = _below(before.series.values(), after.series.values(), "samples")
    names = list(dict.fromkeys((*before.series, *after.series)))[:MAX_SERIES]
    series = {
        name: _one_series(name, before.series.get(name), after.series.get(name), shift, epochs, samples)
        for name in names
    }
    events = (*before.events, *(replace(event, time=event.time + shift) for event in after.events))
    return Snapshot(
        version=after.version,
        started_at=after.started_at - shift,
        series=MappingProxyType(series),
        events=events[-2 * MAX_EVENTS :],
        _last=MappingProxyType({**before._last, **after._last}),
    )


def _below(before: Iterable[Series], after: Iterable[Series], of: str) -> int:
    """By how much the epochs or samples of a history are to be lowered to lie before those of the next."""
    last = max((int(getattr(one, of).max()) for one in before if len(one)), default=0)
    first = min((int(getattr(one, of).min()) for one in after if len(one)), default=0)
    return max(0, last - first)


def _one_series(
    name: str, before: Series | None, after: Series | None, shift: float, epochs: int, samples: int
) -> Series:
    parts: list[Mapping[str, np.ndarray]] = []
    counted = 0.0
    if before is not None and len(before):
        parts.append(_arrays(before, 0.0, -epochs, -samples, 0.0))
        finite = before.values[np.isfinite(before.values)]
        counted = float(finite[-1]) if name in _COUNTED and len(finite) else 0.0
        if after is not None and len(after):  # a gap: no line leads from one to the other
            nan = np.array([math.nan])
            place = {key: parts[0][key][-1:] for key in ("epochs", "samples")}
            gap = {**place, "times": np.array([shift - APART / 2]), "counts": np.zeros(1, np.int64)}
            parts.append({**gap, "values": nan, "lows": nan, "highs": nan})
    if after is not None:
        parts.append(_arrays(after, shift, 0, 0, counted))
    return Series(name=name, **{key: _together(parts, key) for key in parts[0]} if parts else _nothing())


def _together(parts: Sequence[Mapping[str, np.ndarray]], key: str) -> np.ndarray:
    array = np.concatenate([part[key] for part in parts])
    array.flags.writeable = False
    return array


def _arrays(series: Series, shift: float, epochs: int, samples: int, counted: float) -> Mapping[str, np.ndarray]:
    return {
        "times": series.times + shift,
        "epochs": series.epochs + epochs,
        "samples": series.samples + samples,
        "values": series.values + counted,
        "lows": series.lows + counted,
        "highs": series.highs + counted,
        "counts": series.counts,
    }


def _nothing() -> Mapping[str, np.ndarray]:
    return {key: np.zeros(0) for key in ("times", "epochs", "samples", "values", "lows", "highs", "counts")}
