"""Marks on the charts: each can be read, by its words or by its number, however many there are."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hivenb.figures.history import Event, History
from hivenb.view.charts.drawing import draw, numbered, surface_for
from hivenb.view.charts.panels import ChartChoice
from hivenb.view.marks import Mark, Numbered, laid_out

EIGHT = (
    "gradients: float16",
    "state averaging in background: on",
    "optimizer step in background: on",
    "optimizer in main memory: on",
    "optimizer step in background: off",
    "parameters: float16",
    "target batch size: 900",
    "swarm epochs between averagings: 4",
)


def row(*events: tuple[float, str], width: float = 400.0) -> list[Mark]:
    """Marks on an axis of 100 places, with text that is seven pixels wide for each letter."""
    said = [Numbered(number, Event(at, "option", text), at) for number, (at, text) in enumerate(events, 1)]
    return laid_out(said, lambda place: place * width / 100, (0.0, width), lambda text: 7.0 * len(text), 1.0)


def test_words_stand_beside_their_line_where_all_of_them_have_room() -> None:
    first, second = row((10, "started"), (60, "gradients: float16"))
    assert (first.label, first.words, second.words) == ("1", "started", "gradients: float16")
    assert first.left > 40
    assert first.words_left > first.right
    assert second.left > first.words_right


def test_the_newest_has_its_words_first_to_the_left_if_need_be() -> None:
    older, newest = row((30, "gradients: float16"), (98, "target batch size: 900"))
    assert newest.words == "target batch size: 900"
    assert newest.words_right < 98 * 4
    assert older.words == "", "no words are cut"


def test_what_is_too_close_for_numbers_shares_them() -> None:
    first, rest = row((5, "started"), *((50 + number / 10, "x" * 99) for number in range(3)))
    assert (first.label, rest.label) == ("1", "2\N{EN DASH}4")
    assert [one.number for one in rest.events] == [2, 3, 4]
    assert rest.words == ""


@pytest.mark.parametrize("width", [60.0, 150.0, 400.0])
@pytest.mark.parametrize("step", [0.1, 2.0, 11.0])
def test_nothing_overlaps_and_nobody_is_forgotten(width: float, step: float) -> None:
    marks = row(*((min(100.0, number * step), text) for number, text in enumerate(EIGHT * 3)), width=width)
    assert [one.number for mark in marks for one in mark.events] == list(range(1, 25))
    for mark, following in pairwise(marks):
        assert mark.box[1] < following.box[0]
    assert marks[0].box[0] >= 0
    assert marks[-1].box[1] <= width


@pytest.mark.parametrize("width", [360, 470, 650])
def test_after_eight_switches_each_has_a_number_or_words_that_are_whole(width: int) -> None:
    history = History()
    history.mark("run", "started", time=1000.0)
    for second in range(40):
        history.record("loss", 2.0 / (1 + second), time=1000.0 + second)
    for number, text in enumerate(EIGHT):
        history.mark("option", text, time=1010.0 + 3 * number)
    surface = surface_for(width)
    picture = draw(history.snapshot(), surface, ChartChoice(width=width))
    marks = [mark for mark, _ in picture.panels[0].marks]
    assert [one.event.text for mark in marks for one in mark.events] == ["started", *EIGHT]
    written = {word.text for word in surface.words}
    for mark in marks:
        assert mark.label in written
        assert mark.words in ("", "; ".join(one.event.text for one in mark.events))
    assert not any("\N{HORIZONTAL ELLIPSIS}" in text for text in written)


def test_numbers_are_those_of_the_list_in_all_panels_and_go_by_time() -> None:
    history = History()
    history.mark("run", "started", time=1000.0)
    history.mark("option", "late", time=1009.0)
    history.mark("peer", "peer joined", time=1005.0)
    history.record("peers", 1, time=1010.0)
    history.record("loss", 1, time=1010.0)
    snapshot = history.snapshot()
    assert [(one.number, one.event.text) for one in numbered(snapshot)] == [
        (1, "started"), (2, "peer joined"), (3, "late"),
    ]  # fmt: skip
    picture = draw(snapshot, surface_for(650), ChartChoice())
    found = {one.number: one.event.text for panel in picture.panels for mark, _ in panel.marks for one in mark.events}
    assert found == {1: "started", 2: "peer joined", 3: "late"}
