"""What a comparison looks like: a table, and the curves in one picture."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hivenb.run.comparison import Comparison, Outcome, Unfinished
from hivenb.view import display, style, words
from hivenb.view.comparison_picture import color_of, is_dashed, picture
from hivenb.view.text import table

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
                words.share(entry.stalled_share),
                "not measured" if entry.bytes_per_epoch is None else words.size(entry.bytes_per_epoch),
                words.size(entry.peak_memory),
            ]
            cells += [words.size(entry.peak_gpu_memory)] * self._has_gpu + [words.value(entry.training_loss)]
            cells += [words.value(entry.validation_loss)] * self._is_validated
            return (entry.name, *["finished"] * bool(self.unfinished), *cells)
        last = entry.snapshot.last if entry.snapshot is not None else lambda name: None
        cells = [words.ABSENT] * (4 + self._has_gpu) + [words.value(last("loss"))]
        cells += [words.value(last("val_loss"))] * self._is_validated
        return (entry.name, " ".join(entry.words.split()), *cells)

    def is_shown_already(self) -> None:
        """Let nothing more be shown in the cell that runs now: it has shown itself there while it came about."""
        if (cell := display.cell_number()) is not None:
            _shown_in[self] = cell

    def png(self) -> bytes | None:
        """The losses of all, against time and against epochs of the swarm, as a PNG; ``None`` while there are none."""
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
        return any(one.snapshot is not None and one.snapshot.last("val_loss") is not None for one in self.entries)

    def _html_row(self, kind: str, sample: str, cells: Sequence[str]) -> str:
        """A row of the table."""
        words = len(self._words)
        shown = [f"<{kind}{' class=words' * (i < words)}>{html.escape(cell)}</{kind}>" for i, cell in enumerate(cells)]
        return f"<tr><{kind}>{sample}</{kind}>{''.join(shown)}</tr>"

    def _in_words(self) -> str:
        """What the picture shows, for those who do not see it."""
        losses = [f"{one.name}: {words.value(one.snapshot.last('loss'))}" for one in self.entries if one.snapshot]
        return f"Curves of the loss over time and over epochs. Latest training loss of {'; '.join(losses)}."

    def _ipython_display_(self, **_: Any) -> None:
        if self not in _shown_in or _shown_in[self] != display.cell_number():
            display.show_bundle({"text/plain": str(self), "text/html": self.as_html(self.png())})


def _sample(index: int) -> str:
    return _SAMPLE.format(color=color_of(index), dashes="7 4" if is_dashed(index) else "none")


#: The cell in which a comparison has shown itself already.
_shown_in: WeakKeyDictionary[ShownComparison, int] = WeakKeyDictionary()
