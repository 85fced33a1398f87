"""The dashboard's panels on matplotlib's own Axes, to compare what a frame costs with hivenb's drawing surface."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hivenb.figures.history import Snapshot
from hivenb.view import theme
from hivenb.view.charts.drawing import DPI
from hivenb.view.charts.panels import WIDTH, Panel, limits, panels

#: Pixels, as many as a dashboard that is that wide.
HEIGHT = 600


class AxesCharts:
    """The same panels, lines, bands and titles as in ``hivenb.view.charts.drawing``, on figures and axes that are kept.

    Between two frames the lines get other data. Smoothing and the words of marks are left out, which is in favour of
    this one.

    :param snapshot: a history with all series that there will be
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._figure = Figure((WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        FigureCanvasAgg(self._figure)
        grid = self._figure.add_gridspec(3, 6, left=0.08, right=0.98, top=0.94, bottom=0.05, hspace=0.4, wspace=1.2)
        self._axes, self._lines, self._bands = [], [], []
        for row, shown in enumerate(panels(snapshot)):
            wide = 6 // len(shown)
            for column, panel in enumerate(shown):
                axes = self._figure.add_subplot(grid[row, column * wide : (column + 1) * wide])
                axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold")
                axes.tick_params(labelsize=7.5, length=0)
                axes.grid(axis="y", linewidth=0.8)
                axes.spines[["top", "left", "right"]].set_visible(False)
                colors = [theme.LIGHT.hue(line.color) for line in panel.lines]
                self._lines.append([axes.plot([], [], color=color, linewidth=1.6)[0] for color in colors])
                places = [0.98 - 0.3 * number for number in range(len(colors))]
                self._bands.append([None] * len(colors))
                self._axes.append(
                    (axes, [axes.text(x, 1.05, "", transform=axes.transAxes, ha="right", fontsize=8.5, color=color)
                            for x, color in zip(places, colors, strict=True)])
                )  # fmt: skip

    def png(self, snapshot: Snapshot) -> bytes:
        """The picture of a snapshot."""
        shown = [panel for row in panels(snapshot) for panel in row]
        for number, panel in enumerate(shown):
            self._update(number, panel)
        file = io.BytesIO()
        self._figure.canvas.print_png(file, pil_kwargs={"compress_level": 1})
        return file.getvalue()

    def _update(self, number: int, panel: Panel) -> None:
        axes, texts = self._axes[number]
        bands = self._bands[number]
        for place, (line, drawn, text) in enumerate(zip(panel.lines, self._lines[number], texts, strict=True)):
            drawn.set_data(line.points.times, line.points.values)
            text.set_text(f"{line.word} {line.latest}")
            if bands[place] is not None:
                bands[place].remove()
            bands[place] = axes.fill_between(
                line.points.times, line.points.lows, line.points.highs, color=drawn.get_color(), alpha=0.16
            )
        if panel.lines:
            axes.set_xlim(0, max(line.points.times[-1] for line in panel.lines))
            axes.set_ylim(*limits(panel))
