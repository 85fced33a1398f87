from __future__ import annotations

from pathlib import Path

import badges
import nbformat
import pytest

ADDRESS = {"Repository": "https://github.com/somebody/hivenb"}
OPENING = "# A title\n\nWhat is learned.\n\nHow long it takes."


def test_without_an_address_there_are_none() -> None:
    assert badges.badges("01_quickstart", {}) == ""


@pytest.mark.parametrize("ending", ["", "/", ".git"])
def test_they_lead_to_that_very_notebook(ending: str) -> None:
    line = badges.badges("01_quickstart", {"Repository": ADDRESS["Repository"] + ending})
    for target in (
        "https://mybinder.org/v2/gh/somebody/hivenb/main?urlpath=lab/tree/notebooks/01_quickstart.ipynb",
        "https://colab.research.google.com/github/somebody/hivenb/blob/main/notebooks/01_quickstart.ipynb",
        "https://nbviewer.org/github/somebody/hivenb/blob/main/notebooks/01_quickstart.ipynb",
    ):
        assert f"]({target})" in line


def test_the_page_is_that_of_the_book_where_there_is_one() -> None:
    line = badges.badges("01_quickstart", {**ADDRESS, "Documentation": "https://hivenb.example.org/"})
    assert "](https://hivenb.example.org/01_quickstart.html)" in line
    assert "nbviewer" not in line


def test_elsewhere_than_on_github_nothing_would_open_it() -> None:
    with pytest.raises(ValueError, match=r"gitlab\.com/somebody"):
        badges.badges("01_quickstart", {"Repository": "https://gitlab.com/somebody/hivenb"})


def test_they_come_below_the_title_and_once() -> None:
    line = badges.badges("01_quickstart", ADDRESS)
    with_them = badges.with_badges(OPENING, line)
    assert with_them == f"# A title\n\n{line}\n\nWhat is learned.\n\nHow long it takes."
    assert badges.with_badges(with_them, line) == with_them
    other = badges.badges("01_quickstart", {"Repository": "https://github.com/else/where"})
    assert badges.with_badges(with_them, other) == with_them.replace("somebody/hivenb", "else/where")
    assert badges.with_badges(with_them, "") == OPENING


def test_the_readme_says_from_where_to_clone() -> None:
    readme = (badges.ROOT / "README.md").read_text()
    assert badges.with_address(readme, badges.urls()) == readme
    filled = badges.with_address(readme, ADDRESS)
    assert "git clone https://github.com/somebody/hivenb && cd hivenb" in filled
    assert badges.PLACEHOLDER not in filled
    assert badges.with_address(filled, badges.urls()) == readme


@pytest.mark.parametrize("path", badges.NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_has_those_of_this_project(path: Path) -> None:
    opening = nbformat.read(path, nbformat.NO_CONVERT).cells[0].source
    assert badges.with_badges(opening, badges.badges(path.stem, badges.urls())) == opening
