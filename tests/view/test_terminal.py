from __future__ import annotations

import io

import pytest

from hivenb.view.terminal import Terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        """What a person sees: each carriage return goes back to the start of the row."""
        rows = []
        for line in self.getvalue().split("\n"):
            row = ""
            for part in line.split("\r"):
                row = part + row[len(part) :]
            rows.append(row.rstrip())
        return rows


@pytest.fixture
def screen(monkeypatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    return Screen()


def test_texts_of_others_do_not_steer_it(screen):
    terminal = Terminal(screen)
    terminal.say("failed: \x1b[2Jgone\rwritten over")
    terminal.show("\x9b31m")
    assert "\x1b" not in screen.getvalue()
    first, second, *_ = screen.rows()
    assert first == r"failed: \x1b[2Jgone\rwritten over"
    assert second == r"\x9b31m"


def test_an_output_that_does_not_know_whether_it_is_a_terminal_is_none():
    class Tee:
        """Passes on what is printed, and can do no more."""

        def __init__(self):
            self.written = ""

        def write(self, text):
            self.written += text

        def flush(self):
            pass

    tee = Tee()
    terminal = Terminal(tee)
    terminal.show("epoch 1")
    terminal.say("done")
    assert tee.written == "epoch 1\ndone\n"


def test_a_passing_line_is_written_over(screen):
    terminal = Terminal(screen)
    terminal.say("hello")
    terminal.show("epoch 1, loss 0.5")
    terminal.show("epoch 2")
    assert screen.rows() == ["hello", "epoch 2"]
    terminal.say("done")
    assert screen.rows() == ["hello", "done", ""]


def test_a_passing_line_never_wraps(screen):
    Terminal(screen).show("x" * 50)
    assert screen.rows() == ["x" * 19]


def test_an_equal_line_is_not_written_again(screen):
    terminal = Terminal(screen)
    terminal.show("epoch 1")
    written = screen.getvalue()
    terminal.show("epoch 1")
    assert screen.getvalue() == written


def test_in_a_file_passing_lines_stay_but_are_few():
    file = io.StringIO()
    terminal = Terminal(file, interval=1000.0)
    for epoch in range(100):
        terminal.show(f"epoch {epoch}")
    terminal.say("done")
    assert file.getvalue() == "epoch 0\ndone\n"
    assert terminal.width is None


def test_a_dumb_terminal_is_like_a_file(screen, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    Terminal(screen).show("epoch 1")
    assert screen.getvalue() == "epoch 1\n"
