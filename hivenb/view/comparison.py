"""Several options side by side, live while the trainings work."""

from __future__ import annotations

import base64
import html
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hivenb._signatures import shown_with
from hivenb.figures.history import Snapshot
from hivenb.figures.metric_names import validation_loss_among
from hivenb.run.comparison import ComparedTraining, Comparison, Outcome, Unfinished, run_each
from hivenb.run.fit import trainer_keywords
from hivenb.view import formats, notebook_output, style, theme
from hivenb.view.charts.drawing import Box, DrawingSurface, PanelDrawing, TextStyle
from hivenb.view.charts.panels import ChartChoice, Line, Panel, Points, as_chosen, to_axis
from hivenb.view.terminal import Terminal
from hivenb.view.text import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from hivenb.options.options import Options


# -- comparison picture ----------------------------------------------------------------------------------------------
#
# The losses of a comparison as curves: those of training and those of validation, over time and over epochs.


#: Of the options in the order in which they were given, in the table and in the picture; every other line is dashed,
#: and hues that are near each other differ in that.
COLORS = (theme.BLUE, theme.VERMILLION, theme.GREEN, theme.PURPLE, theme.ORANGE, theme.GREY)

_WIDTH, _ROW, _DPI = 9.0, 2.5, 130  # inches, pixels an inch
_LEGEND_ROW, _SAMPLE_OF_LINE, _MARGIN = 0.26, 0.30, 0.14  # inches
_TEXT = 9.0  # points
_CHOICE = ChartChoice(smoothing="strong")  # several curves in one panel: nobody can tell zigzags apart


def color_of(index: int) -> str:
    """The colour of the options with that place among all."""
    return COLORS[index % len(COLORS)]


def is_dashed(index: int) -> bool:
    """Whether their lines are dashed, so that neighbours differ without colours as well."""
    return index % 2 == 1


def picture(comparison: Comparison) -> bytes | None:
    """The picture as PNG; ``None`` while there is no loss."""
    entries = [(index, entry) for index, entry in enumerate(comparison.entries) if _has(entry.snapshot, "loss")]
    if not entries:
        return None
    titles = {"loss": "Training loss, smoothed"} | dict.fromkeys(_validation_losses(comparison), "Validation loss")
    shown = [name for name in titles if any(_has(entry.snapshot, name) for _, entry in entries)]
    rows = _legend_rows(entries)
    top = len(rows) * _LEGEND_ROW + 0.06
    surface = DrawingSurface(_WIDTH, top + _ROW * len(shown), _DPI)
    surface.clear(theme.LIGHT.paper)
    _draw_legend(surface, rows)
    middle = surface.width / 2
    for row, name in enumerate(shown):
        high = surface.height - (top + _ROW * row) * surface.inch
        for column, axis in enumerate(("time", "epochs")):
            place = Box(column * middle, high - _ROW * surface.inch, (column + 1) * middle, high)
            panel = Panel(f"{titles[name]}, over {axis}", _lines(entries, name, axis), axis=axis)
            end = max(float(line.points.times[-1]) for line in panel.lines)
            drawing = PanelDrawing(surface, theme.LIGHT, place, lambda places: places, end)
            drawing.draw(as_chosen(panel, _CHOICE, np.array([])), ())
    return surface.png()


def _validation_losses(comparison: Comparison) -> tuple[str, ...]:
    """The name of the validation loss, which is the same in all; none without one."""
    name = validation_loss_among(name for one in comparison.entries if one.snapshot for name in one.snapshot.series)
    return () if name is None else (name,)


def _lines(entries: Sequence[tuple[int, Outcome | Unfinished]], name: str, axis: str) -> tuple[Line, ...]:
    lines = []
    for index, entry in entries:
        snapshot = entry.snapshot
        if snapshot is not None and _has(snapshot, name):
            series = snapshot.series[name]
            places = np.asarray(to_axis(snapshot, axis)(series.times), float)
            points = Points.single(places, series.values)
            lines.append(Line(points, color_of(index), "", "", smooth=name == "loss", dashed=is_dashed(index)))
    return tuple(lines)


def _has(snapshot: Snapshot | None, name: str) -> bool:
    return snapshot is not None and name in snapshot.series and len(snapshot.series[name]) > 0


def _legend_rows(entries: Sequence[tuple[int, Outcome | Unfinished]]) -> list[list[tuple[int, str]]]:
    """Names beside each other, in as many rows as they need; a name that is wider than the picture is cut."""
    measure = DrawingSurface(1, 1, _DPI).measure
    rows: list[list[tuple[int, str]]] = [[]]
    room = most = (_WIDTH - 2 * _MARGIN) * _DPI
    for index, entry in entries:
        text = entry.name
        while text and measure(text, _TEXT) > most - 2 * _SAMPLE_OF_LINE * _DPI:
            text = text[:-2].rstrip("…") + "…"
        wide = measure(text, _TEXT) + 2 * _SAMPLE_OF_LINE * _DPI
        if wide > room and rows[-1]:
            rows.append([])
            room = most
        rows[-1].append((index, text))
        room -= wide
    return rows


def _draw_legend(surface: DrawingSurface, rows: Sequence[Sequence[tuple[int, str]]]) -> None:
    whole = Box(0, 0, surface.width, surface.height)
    for number, row in enumerate(rows):
        x, y = _MARGIN * surface.inch, surface.height - (number + 0.65) * _LEGEND_ROW * surface.inch
        for index, text in row:
            end = x + _SAMPLE_OF_LINE * surface.inch
            dashes = (4, 2) if is_dashed(index) else None
            surface.line([x, end], [y, y], color_of(index), width=2.2, within=whole, dashes=dashes)
            word = surface.write(text, end + 0.08 * surface.inch, y, TextStyle(_TEXT, theme.LIGHT.ink))
            x = word.box.right + (_SAMPLE_OF_LINE - 0.08) * surface.inch


# -- shown comparison ------------------------------------------------------------------------------------------------
#
# What a comparison looks like: a table, and the curves in one picture.


_SAMPLE = (
    '<svg width="30" height="8" aria-hidden="true"><line x1="1" y1="4" x2="29" y2="4" stroke="{color}" '
    'stroke-width="3" stroke-dasharray="{dashes}"/></svg>'
)


class ShownComparison(Comparison):
    """A comparison that shows itself as the last line of a cell."""

    def __str__(self) -> str:
        return "\n".join(table(self.head, [self.row(entry) for entry in self.entries], numbers_from=len(self._words)))

    @property
    def head(self) -> tuple[str, ...]:
        """The titles of the columns that are needed."""
        columns = ["time/epoch", "stalled", "bytes/epoch", "memory"]
        columns += ["GPU memory"] * self._has_gpu + ["training loss"] + ["validation loss"] * self._is_validated
        return (*self._words, *columns)

    def row(self, entry: Outcome | Unfinished) -> tuple[str, ...]:
        """One of the entries in words, for each column."""
        if isinstance(entry, Outcome):
            cells = [
                f"{entry.seconds_per_epoch:.2f} s",
                formats.share(entry.stalled_share),
                "not measured" if entry.bytes_per_epoch is None else formats.size(entry.bytes_per_epoch),
                formats.size(entry.peak_memory),
            ]
            cells += [formats.size(entry.peak_gpu_memory)] * self._has_gpu + [formats.value(entry.training_loss)]
            cells += [formats.value(entry.validation_loss)] * self._is_validated
            return (entry.name, *["finished"] * bool(self.unfinished), *cells)
        last = entry.snapshot.last if entry.snapshot is not None else lambda name: None
        cells = [formats.ABSENT] * (4 + self._has_gpu) + [formats.value(last("loss"))]
        cells += [formats.value(last(name)) for name in _validation_losses(self)]
        return (entry.name, " ".join(entry.words.split()), *cells)

    def is_shown_already(self) -> None:
        """Let nothing more be shown in the cell that runs now: it has shown itself there while it came about."""
        if (cell := notebook_output.cell_number()) is not None:
            _shown_in[self] = cell

    def png(self) -> bytes | None:
        """The losses of all, against time and against swarm epochs, as a PNG; ``None`` while there are none."""
        return picture(self)

    def as_html(self, png: bytes | None, note: str = "") -> str:
        """Table and curves.

        :param png: what :meth:`png` gave
        :param note: a sentence between them
        """
        head = self._html_row("th", "", self.head)
        rows = "".join(self._html_row("td", _sample(i), self.row(entry)) for i, entry in enumerate(self.entries))
        shown = f'<div class="hivenb-scroll"><table class="hivenb-table hivenb-compared">{head}{rows}</table></div>'
        shown += style.note(note) if note else ""
        if png is not None:
            source = base64.b64encode(png).decode()
            shown += f'<img alt="{style.safe(self._in_words())}" src="data:image/png;base64,{source}">'
        return f'{style.sheet()}<div class="hivenb">{shown}</div>'

    @property
    def _words(self) -> tuple[str, ...]:
        """Titles of the first columns, which hold no numbers."""
        return ("options", "state") if self.unfinished else ("options",)

    @property
    def _has_gpu(self) -> bool:
        return any(outcome.peak_gpu_memory is not None for outcome in self.outcomes)

    @property
    def _is_validated(self) -> bool:
        return bool(_validation_losses(self))

    def _html_row(self, kind: str, sample: str, cells: Sequence[str]) -> str:
        """A row of the table."""
        words = len(self._words)
        shown = [f"<{kind}{' class=words' * (i < words)}>{html.escape(cell)}</{kind}>" for i, cell in enumerate(cells)]
        return f"<tr><{kind}>{sample}</{kind}>{''.join(shown)}</tr>"

    def _in_words(self) -> str:
        """What the picture shows, for those who do not see it."""
        losses = [f"{one.name}: {formats.value(one.snapshot.last('loss'))}" for one in self.entries if one.snapshot]
        return f"Curves of the loss over time and over epochs. Latest training loss of {'; '.join(losses)}."

    def _ipython_display_(self, **_: Any) -> None:
        if self not in _shown_in or _shown_in[self] != notebook_output.cell_number():
            notebook_output.show_bundle({"text/plain": str(self), "text/html": self.as_html(self.png())})


def _sample(index: int) -> str:
    return _SAMPLE.format(color=color_of(index), dashes="7 4" if is_dashed(index) else "none")


#: The cell in which a comparison has shown itself already.
_shown_in: WeakKeyDictionary[ShownComparison, int] = WeakKeyDictionary()


# -- live comparison -------------------------------------------------------------------------------------------------
#
# A comparison while it comes about: in the cell that compares, or in the last line of a terminal.
#
# All of it happens on the thread that compares, between two looks at the training.


#: Share of the time that drawing may take, and the seconds between two pictures at most.
_DRAWING_SHARE, _LONGEST_PAUSE = 0.02, 5.0

#: Seconds between two tables at least, unless another training has its turn.
_INTERVAL = 1.0


class Watcher(Protocol):
    """Shows a comparison again and again."""

    def show(self, comparison: ShownComparison) -> None:
        """Show how far it is."""

    def finish(self, comparison: ShownComparison) -> None:
        """Show it for the last time."""


def watcher() -> Watcher:
    """The one for the place where this runs."""
    return InCell() if notebook_output.in_notebook() else InTerminal(Terminal(sys.stderr))


class InCell:
    """Under the cell that runs: one output, which is replaced."""

    def __init__(self) -> None:
        self._update: Callable[[dict[str, str]], None] | None = None
        self._began = time.monotonic()
        self._due = self._picture_due = 0.0
        self._finished = -1
        self._png: bytes | None = None

    def show(self, comparison: ShownComparison) -> None:
        """Show table and curves, unless they have been shown just now."""
        now, finished = time.monotonic(), len(comparison.outcomes)
        if finished == self._finished and now < self._due:
            return
        if finished != self._finished or now >= self._picture_due:
            self._png = comparison.png()
            took = time.monotonic() - now
            self._picture_due = now + min(max(took / _DRAWING_SHARE, _INTERVAL), _LONGEST_PAUSE)
        self._finished, self._due = finished, now + _INTERVAL
        count = formats.counted(len(comparison.entries), "training")
        passed = formats.duration(now - self._began)
        self._put(comparison, f"{finished} of {count} finished, after {passed}. An interrupt keeps what is finished.")

    def finish(self, comparison: ShownComparison) -> None:
        """Show it as it stays."""
        self._png = comparison.png()
        self._put(comparison, "")
        comparison.is_shown_already()

    def _put(self, comparison: ShownComparison, note: str) -> None:
        text = f"{comparison}\n{note}".strip()
        bundle = {"text/plain": text, "text/html": comparison.as_html(self._png, note)}
        if self._update is None:
            self._update = notebook_output.show_bundle(bundle)
        else:
            self._update(bundle)


class InTerminal:
    """In the last line of a terminal, and a line for each training that has ended."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._said: set[str] = set()

    def show(self, comparison: ShownComparison) -> None:
        """Say how the training at work goes, and of a new outcome what it is."""
        for entry in comparison.outcomes:
            if entry.name not in self._said:
                self._said.add(entry.name)
                alone = ShownComparison((entry,))
                named = zip(alone.head[1:], alone.row(entry)[1:], strict=True)
                self._terminal.say(f"{entry.name}: " + ", ".join(f"{title} {cell}" for title, cell in named))
        at_work = next((entry for entry in comparison.unfinished if entry.error is None), None)
        if at_work is not None:
            loss = at_work.snapshot.last("loss") if at_work.snapshot is not None else None
            said = "" if loss is None else f", training loss {formats.value(loss)}"
            self._terminal.show(f"{at_work.name}: {at_work.words}{said}")

    def finish(self, comparison: ShownComparison) -> None:
        """Say what is not finished."""
        for entry in comparison.unfinished:
            self._terminal.say(f"{entry.name}: {entry.words}")


# -- comparison ------------------------------------------------------------------------------------------------------


@shown_with(trainer_keywords)
def compare(
    options: Mapping[Any, Options],
    model: Any,
    data: Any,
    *,
    epochs: int,
    local_peers: int = 2,
    seed: int = 0,
    swarm_settings: Mapping[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> ShownComparison:
    """Train the same model with each of several options in turn, and put what came out side by side.

    Each training starts from the same parameters and random numbers, with callbacks copied from those given, in a swarm
    of its own with as many peers. While they work, a table and curves in the cell, or a line in a terminal, say how far
    they are. The comparison has time per swarm epoch, share of it for which training stood still, bytes sent in it,
    memory that this training took, the loss of training and that of validation, and the curves in one picture.

    An interrupt (Kernel > Interrupt, or Ctrl+C) ends the comparison, not what it has found: the training at work is
    stopped, and ``compare`` returns the comparison with what is finished; ``unfinished`` says what is not. A training
    that fails is shown as failed, and the others have their turn.

    :param options: by the name under which to compare them, a text or what is to become one, such as a number
    :param model: the LightningModule to begin with; it stays as it is
    :param data: as for :class:`hivenb.TrainingRun`
    :param epochs: swarm epochs for each, after all peers have met; at least 2
    :param local_peers: further peers, as processes on this machine
    :param seed: of all random numbers
    :param swarm_settings: keyword arguments of :class:`hivenb.Swarm` for the swarm of each training, such as addresses
      at which a slow line begins; by default it is of this machine only
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :returns: the outcomes, by name; ``to_dataframe()`` gives the figures
    :raises OptionsError: if there is nothing to compare
    :raises Exception: the first error, if every training has failed
    """
    watch = watcher()
    training = ComparedTraining(model, data, epochs, local_peers, seed, trainer_kwargs, swarm_settings or {})
    done = ShownComparison(run_each(training, options, lambda now: watch.show(ShownComparison(now.entries))).entries)
    watch.finish(done)
    return done
