"""What the charts are drawn on: lines and areas by Agg, words by Pillow.

matplotlib's figures and axes take three to four times as long for the same panels, most of it for texts:
``tests/benchmarks/dashboard.py`` draws both. Nothing here knows pyplot or the user's style, so that a background thread
may draw whatever the user does.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.path import Path
from matplotlib.transforms import Bbox, IdentityTransform
from PIL import Image, ImageDraw, ImageFont

_NOTHING = IdentityTransform()


@dataclass(frozen=True)
class Box:
    """A part of the surface, in pixels from its lower left corner."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.top - self.bottom

    def overlaps(self, other: Box) -> bool:
        """Whether they have a point in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )  # fmt: skip


@dataclass(frozen=True)
class TextStyle:
    """How a text looks.

    :param size: points
    """

    size: float
    color: str
    bold: bool = False


@dataclass(frozen=True)
class Word:
    """A text on the surface, and the room that it takes."""

    text: str
    box: Box
    style: TextStyle


class DrawingSurface:
    """A picture in pixels, ``y`` upwards, drawn anew for each frame. For one thread at a time.

    :param width: inches
    :param height: inches
    :param dpi: pixels an inch
    """

    def __init__(self, width: float, height: float, dpi: int) -> None:
        self.width, self.height = round(width * dpi), round(height * dpi)
        self.point = dpi / 72
        self.inch = dpi
        self.words: list[Word] = []
        self._renderer = RendererAgg(self.width, self.height, dpi)

    def clear(self, color: str) -> None:
        """An empty surface of that color."""
        self._renderer.clear()
        self.words = []
        self.rectangle(Box(0, 0, self.width, self.height), color)

    def rectangle(self, box: Box, color: str, alpha: float = 1.0) -> None:
        """A filled rectangle without an edge."""
        corners = [(box.left, box.bottom), (box.right, box.bottom), (box.right, box.top), (box.left, box.top)]
        self._fill(np.array(corners), color, alpha, None)

    def line(
        self, x: Any, y: Any, color: str, *, width: float = 1.0, alpha: float = 1.0, within: Box | None = None,
        dashes: tuple[float, ...] | None = None,
    ) -> None:  # fmt: skip
        """A line through these points, broken where a number is nan; widths and dashes in points."""
        vertices = np.column_stack([x, y])
        path = Path(vertices)
        path.should_simplify = len(vertices) > 128
        path.simplify_threshold = 1 / 4
        pen = self._pen(color, alpha, within)
        pen.set_linewidth(width)
        if dashes is not None:
            pen.set_dashes(0, dashes)
        self._renderer.draw_path(pen, path, _NOTHING)

    def segments(self, starts: Any, ends: Any, color: str, *, width: float = 1.0, alpha: float = 1.0) -> None:
        """Straight lines, each from a start to an end."""
        if len(starts) == 0:
            return
        vertices = np.stack([np.asarray(starts, float), np.asarray(ends, float)], axis=1).reshape(-1, 2)
        path = Path(vertices, np.tile([Path.MOVETO, Path.LINETO], len(starts)))
        pen = self._pen(color, alpha, None)
        pen.set_linewidth(width)
        pen.set_snap(True)
        self._renderer.draw_path(pen, path, _NOTHING)

    def area(self, x: Any, low: Any, high: Any, color: str, *, alpha: float, within: Box) -> None:
        """The area between two lines, broken where a number is nan."""
        x, low, high = np.broadcast_arrays(np.asarray(x, float), np.asarray(low, float), np.asarray(high, float))
        known = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(int)))
        for start, end in edges.reshape(-1, 2):
            there = np.column_stack([x[start:end], high[start:end]])
            back = np.column_stack([x[start:end], low[start:end]])[::-1]
            self._fill(np.concatenate([there, back]), color, alpha, within)

    def dots(self, x: Any, y: Any, color: str, *, size: float) -> None:
        """Round dots, ``size`` points wide."""
        circle = Path.unit_circle()
        disc = np.asarray(circle.vertices) * (size * self.point / 2)
        pen = self._pen(color, 1.0, None)
        pen.set_linewidth(0)
        fill = mpl.colors.to_rgba(color)
        for here in np.column_stack([x, y]):
            if np.isfinite(here).all():
                self._renderer.draw_path(pen, Path(disc + here, circle.codes), _NOTHING, fill)

    def measure(self, text: str, size: float, bold: bool = False) -> float:
        """How wide a text would be, in pixels."""
        return _font(size * self.point, bold).getlength(text)

    def write(
        self, text: str, x: float, y: float, style: TextStyle, *, across: str = "left", up: str = "middle"
    ) -> Word:
        """A line of text.

        :param x: of its left end, centre or right end, as ``across`` says
        :param y: of its bottom, middle or top, as ``up`` says
        """
        wide, high = self.measure(text, style.size, style.bold), 1.2 * style.size * self.point
        left = x - {"left": 0.0, "center": 0.5, "right": 1.0}[across] * wide
        bottom = y - {"bottom": 0.0, "middle": 0.5, "top": 1.0}[up] * high
        word = Word(text, Box(left, bottom, left + wide, bottom + high), style)
        self.words.append(word)
        return word

    def png(self) -> bytes:
        """The surface as it is, all words on top."""
        image = Image.frombuffer("RGBA", (self.width, self.height), self._renderer.buffer_rgba(), "raw", "RGBA", 0, 1)
        image = image.convert("RGB")
        draw = ImageDraw.Draw(image)
        for word in self.words:
            middle = self.height - (word.box.bottom + word.box.top) / 2
            font = _font(word.style.size * self.point, word.style.bold)
            draw.text((word.box.left, middle), word.text, fill=word.style.color, font=font, anchor="lm")
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _fill(self, vertices: np.ndarray, color: str, alpha: float, within: Box | None) -> None:
        pen = self._pen(color, alpha, within)
        pen.set_linewidth(0)
        self._renderer.draw_path(pen, Path(vertices), _NOTHING, (*mpl.colors.to_rgb(color), alpha))

    def _pen(self, color: str, alpha: float, within: Box | None) -> Any:
        pen = self._renderer.new_gc()
        pen.set_foreground(color)
        pen.set_alpha(alpha)
        pen.set_joinstyle("round")
        pen.set_capstyle("butt")
        if within is not None:
            pen.set_clip_rectangle(Bbox.from_extents(within.left, within.bottom, within.right, within.top))
        return pen


@cache
def _font(pixels: float, bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"  # comes with matplotlib, so it is there
    path = FilePath(mpl.get_data_path()) / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), pixels, layout_engine=ImageFont.Layout.BASIC)
