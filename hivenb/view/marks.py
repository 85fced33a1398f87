"""Where on a panel the words of what happened go: each mark has its number, and its words where all of them have room.

A list beside the charts, and a pointer over them, say what each number stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hivenb.figures.history import Event

#: Pixels of the surface around a number and around words, for each point of it.
_GAP = 3.0


@dataclass(frozen=True)
class Numbered:
    """An event, and its number among all of the run.

    :param number: from 1, the oldest that is kept
    :param place: on the panel's horizontal axis
    """

    number: int
    event: Event
    place: float


@dataclass(frozen=True)
class Mark:
    """One or several events whose lines are too close together for a number each.

    :param events: oldest first
    :param left: of its number, in pixels
    :param right: of its number
    :param words: that are written beside the number; empty where they have no room
    :param words_left: where they begin
    :param words_right: where they end
    """

    events: tuple[Numbered, ...]
    left: float = 0.0
    right: float = 0.0
    words: str = ""
    words_left: float = 0.0
    words_right: float = 0.0

    @property
    def label(self) -> str:
        """Its number, or the first and the last of them."""
        first, last = self.events[0].number, self.events[-1].number
        return str(first) if first == last else f"{first}\N{EN DASH}{last}"

    @property
    def text(self) -> str:
        """What happened; of several events, all of it."""
        return "; ".join(one.event.text for one in self.events)

    @property
    def box(self) -> tuple[float, float]:
        """From where to where it reaches, words and all."""
        if not self.words:
            return self.left, self.right
        return min(self.left, self.words_left), max(self.right, self.words_right)


Measure = Callable[[str], float]


def laid_out(
    events: Sequence[Numbered], to_pixel: Callable[[float], float], edges: tuple[float, float], measure: Measure,
    point: float,
) -> list[Mark]:  # fmt: skip
    """Numbers and words in one row, none on another; the newest have their words first.

    :param events: oldest first, within the edges
    :param to_pixel: from places on the axis to pixels
    :param edges: the first and the last pixel of the panel
    :param measure: how many pixels wide a text is
    :param point: pixels of a point
    """
    gap = _GAP * point
    marks: list[Mark] = []
    for event in events:
        mark = _placed(Mark((event,)), to_pixel, edges, measure, gap)
        # a number that would lie on its neighbour, or on the line of it, is taken together with it
        while marks and mark.left < marks[-1].right + gap:
            mark = _placed(Mark((*marks.pop().events, *mark.events)), to_pixel, edges, measure, gap)
        marks.append(mark)
    following = edges[1] + gap
    for index in range(len(marks) - 1, -1, -1):
        mark, before = marks[index], marks[index - 1].right if index else edges[0] - gap
        marks[index] = _with_words(mark, (before + gap, following - gap), measure, gap)
        following = marks[index].box[0]
    return marks


def _placed(
    mark: Mark, to_pixel: Callable[[float], float], edges: tuple[float, float], measure: Measure, gap: float
) -> Mark:
    wide = measure(mark.label)
    left = max(edges[0], min(to_pixel(mark.events[0].place) + gap, edges[1] - wide))
    return replace(mark, left=left, right=left + wide)


def _with_words(mark: Mark, room: tuple[float, float], measure: Measure, gap: float) -> Mark:
    wide = measure(mark.text)
    if mark.right + gap + wide <= room[1]:
        return replace(mark, words=mark.text, words_left=mark.right + gap, words_right=mark.right + gap + wide)
    if mark.left - 3 * gap - wide >= room[0]:  # to the left of its line
        end = mark.left - 3 * gap
        return replace(mark, words=mark.text, words_left=end - wide, words_right=end)
    return mark
