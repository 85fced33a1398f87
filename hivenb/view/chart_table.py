"""What the charts show as a table, for a spreadsheet."""

from __future__ import annotations

import csv
import io

import numpy as np

from hivenb.figures.history import Snapshot
from hivenb.view.chart_choice import ChartChoice
from hivenb.view.horizontal_axis import to_axis
from hivenb.view.panels import panels

_HEAD = ("chart", "series", "seconds", "value", "low", "high")


def as_csv(snapshot: Snapshot, choice: ChartChoice) -> str:
    """Every point of every line within the window, also of those that are switched off, as CSV with a head.

    A point may stand for several values, whose extremes are in ``low`` and ``high``. Where a chart is drawn against
    epochs or samples, a column says which.

    :param snapshot: of the run's history
    :param choice: what is shown of it
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    extra = () if choice.axis == "time" else (choice.axis,)
    writer.writerow((*_HEAD, *extra))
    for panel in [panel for row in panels(snapshot, choice.axis, choice.log) for panel in row]:
        for line in panel.lines:
            points = line.points
            places = np.asarray(to_axis(snapshot, choice.axis)(points.times), float)
            for at, value, low, high, place in zip(
                points.times, points.values, points.lows, points.highs, places, strict=True
            ):
                if choice.window is None or choice.window[0] <= at <= choice.window[1]:
                    numbers = (f"{at:.3f}", *(f"{number:.9g}" for number in (value, low, high)))
                    further = (f"{place:.6g}",) if panel.axis != "time" else ("",)
                    writer.writerow((panel.title, line.word, *numbers, *(further if extra else ())))
    return file.getvalue()
