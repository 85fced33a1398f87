"""Puts Markdown files of the repository into the book: what is written once is shown in both places.

A page of the book that begins with ``from: FILE``, a path from the root of the repository, shows that file. Links to
other files, of all pages, lead to their pages, where they have one, and to the files themselves elsewhere. Tutorials
get the same links, and lose what is not for readers: marks for their tests, and widgets, which need scripts from the
network. The pictures that are saved beside widgets stay.
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
#: What is in code is no link: a block between fences, a piece between backticks, or a link.
_CODE_OR_LINK = re.compile(r"^```.*?^```|`+[^`]+`+|(?<=\]\()(?P<link>[^)\s]+)(?=\))", re.DOTALL | re.MULTILINE)


@cache
def pages() -> dict[str, str]:
    """The pages that show files of the repository, by the paths of these from its root."""
    heads = {path: head_of(path.read_text()) for path in sorted(HERE.rglob("*.md"))}
    return {head["from"]: f"/{path.relative_to(BOOK)}" for path, head in heads.items() if "from" in head}


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

    :raises FileNotFoundError: if it leads to a file that is not there
    """
    if re.match(r"[a-z]+:", link):
        return link
    target, _, anchor = link.partition("#")
    if not target:
        return link
    other = os.path.normpath(PurePosixPath(file).parent / target)
    if not (ROOT / other).exists():
        raise FileNotFoundError(f"{file} links to {link}, which is not there")
    if other in pages():
        at = pages()[other]
    elif (ROOT / other).is_relative_to(BOOK):
        at = f"/{(ROOT / other).relative_to(BOOK)}"
    elif other == "README.md":
        at = "/book/start.md"
    else:
        at = os.path.relpath(ROOT / other, (BOOK / page).parent)
    return at + (f"#{anchor}" if anchor else "")


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Gives Sphinx the text of a page."""
    path = Path(app.env.doc2path(docname))
    page = str(path.relative_to(BOOK))
    if path.suffix == ".ipynb":
        source[0] = tutorial(source[0], f"notebooks/{page}", page)
        return
    if path.suffix != ".md":
        return
    head = head_of(source[0])
    if "from" in head:
        app.env.note_dependency(str(ROOT / head["from"]))
        source[0] = relinked((ROOT / head["from"]).read_text(), head["from"], page)
    else:
        source[0] = relinked(source[0], f"notebooks/{page}", page)


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
