"""Puts Markdown files of the repository into the book: what is written once is shown in both places.

A page of the book that begins with ``from: FILE``, a path from the root of the repository, shows that file, or the
section of it that ``section: HEADING`` names. Links to other files lead to their pages, where they have one, and to the
files themselves elsewhere. Tutorials get the same links, and lose what is not for readers: marks for their tests, and
widgets, which need scripts from the network. The pictures that are saved beside widgets stay.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
BOOK = HERE.parent
ROOT = BOOK.parent

_WIDGETS = "application/vnd.jupyter.widget-view+json"
_TEST_MARK = re.compile(r"\A# NBVAL_\w+\n")
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
#: What is in code is no link: a block between fences, a piece between backticks, or a link.
_CODE_OR_LINK = re.compile(r"^```.*?^```|`+[^`]+`+|(?<=\]\()(?P<link>[^)\s]+)(?=\))", re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as forges and MyST name it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def section(text: str, heading: str) -> str:
    """The section under a heading, which becomes the title of the page, with those below it.

    :raises KeyError: if there is no such heading
    """
    found = [one for one in _HEADING.finditer(without_code(text)) if one[2] == heading]
    if len(found) != 1:
        raise KeyError(f"{len(found)} headings are {heading!r}")
    level = len(found[0][1])
    rest = text[found[0].end() :]
    end = next((one.start() for one in _HEADING.finditer(without_code(rest)) if len(one[1]) <= level), len(rest))
    body = list(rest[:end])
    for one in reversed(list(_HEADING.finditer(without_code(rest[:end])))):
        body[one.start(1) : one.end(1)] = "#" * (len(one[1]) - level + 1)
    return f"# {heading}{''.join(body)}"


def without_code(text: str) -> str:
    """The same text, of the same length, with blanks for what is between fences."""
    return re.sub(r"^```.*?^```", lambda block: re.sub(r"\S", " ", block[0]), text, flags=re.DOTALL | re.MULTILINE)


@cache
def pages() -> dict[tuple[str, str], str]:
    """Where things are: (file from the root, anchor of a section or ``""``) to the page that shows it."""
    where: dict[tuple[str, str], str] = {}
    for path in sorted(HERE.rglob("*.md")):
        head = head_of(path.read_text())
        if "from" in head:
            page = f"/{path.relative_to(BOOK)}"
            if "section" in head:
                where[head["from"], slug(head["section"])] = page
            else:
                where[head["from"], ""] = page
    return where


def head_of(text: str) -> dict[str, str]:
    """The lines ``key: value`` between dashes that a page begins with."""
    head = _HEAD.match(text)
    return dict(line.split(": ", 1) for line in head[1].splitlines()) if head else {}


def relinked(text: str, file: str, page: str) -> str:
    """The text of a file of the repository with links that are right on a page of the book.

    :param text: Markdown
    :param file: where it is from, from the root of the repository
    :param page: where it is shown, from the root of the book
    """

    def replace(found: re.Match[str]) -> str:
        if found["link"] is None:
            return found[0]
        return new_link(found["link"], file, page)

    return _CODE_OR_LINK.sub(replace, text)


def new_link(link: str, file: str, page: str) -> str:
    """Where a link of a file leads, on a page of the book.

    :raises FileNotFoundError: if it leads to a file that is not there, or to a section of the README without a page
    """
    if re.match(r"[a-z]+:", link):
        return link
    target, _, anchor = link.partition("#")
    other = os.path.normpath(PurePosixPath(file).parent / target) if target else file
    if not (ROOT / other).exists():
        raise FileNotFoundError(f"{file} links to {link}, which is not there")
    for key, at in (((other, anchor), ""), ((other, ""), anchor)):
        if key in pages():
            same = not target and pages()[key] == f"/{page}"
            return link if same else pages()[key] + (f"#{at}" if at else "")
    if not target:
        return link
    if (ROOT / other).is_relative_to(BOOK):
        return f"/{(ROOT / other).relative_to(BOOK)}" + (f"#{anchor}" if anchor else "")
    if other == "README.md":
        if anchor:
            raise FileNotFoundError(f"{file} links to {link}, and no page shows that section")
        return "/book/start.md"
    return os.path.relpath(ROOT / other, (BOOK / page).parent)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Gives Sphinx the text of a page."""
    path = Path(app.env.doc2path(docname))
    page = str(path.relative_to(BOOK))
    if path.suffix == ".ipynb":
        source[0] = tutorial(source[0], f"notebooks/{page}", page)
        return
    head = head_of(source[0])
    if "from" in head:
        app.env.note_dependency(str(ROOT / head["from"]))
        text = (ROOT / head["from"]).read_text()
        if "section" in head:
            text = section(text, head["section"])
        source[0] = relinked(text, head["from"], page)


def tutorial(text: str, file: str, page: str) -> str:
    """A notebook as the book shows it."""
    notebook: dict[str, Any] = json.loads(text)
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relinked("".join(cell["source"]), file, page)
        else:
            cell["source"] = _TEST_MARK.sub("", "".join(cell["source"]))
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(_WIDGETS, None)
    return json.dumps(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
