"""Writes the public address of the repository wherever one is needed: ``python tests/badges.py``.

It is ``Repository`` among the project's URLs in ``pyproject.toml``. Below the title of each notebook come badges that
open it in Binder, in Colab and as a page, and the README says from where to clone. Without an address there are no
badges, and a placeholder stands there. ``Documentation``, if it is there, is where the book is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

BRANCH = "main"

#: What the README says to clone as long as the repository has no address.
PLACEHOLDER = "https://github.com/OWNER/hivenb"


def urls() -> dict[str, str]:
    """Of the project, by their names."""
    found: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return found


def badges(name: str, addresses: Mapping[str, str]) -> str:
    """A line of Markdown; empty as long as the repository has no address.

    :param name: of the notebook, without its ending
    :param addresses: the project's URLs
    :raises ValueError: if the repository is not on GitHub, from where Binder and Colab take it
    """
    repository = addresses.get("Repository")
    if repository is None:
        return ""
    match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", repository)
    if match is None:
        raise ValueError(f"badges lead to a repository on GitHub, https://github.com/OWNER/NAME, not {repository!r}")
    place, path = match[1], f"notebooks/{name}.ipynb"
    page = f"https://nbviewer.org/github/{place}/blob/{BRANCH}/{path}"
    if "Documentation" in addresses:
        page = f"{addresses['Documentation'].rstrip('/')}/{name}.html"
    shown = {
        "Open in Binder": (
            "https://mybinder.org/badge_logo.svg",
            f"https://mybinder.org/v2/gh/{place}/{BRANCH}?urlpath=lab/tree/{path}",
        ),
        "Open in Colab": (
            "https://colab.research.google.com/assets/colab-badge.svg",
            f"https://colab.research.google.com/github/{place}/blob/{BRANCH}/{path}",
        ),
        "Read as a page": ("https://img.shields.io/badge/read%20as%20a-page-blue", page),
    }
    return " ".join(f"[![{words}]({picture})]({target})" for words, (picture, target) in shown.items())


def with_badges(opening: str, line: str) -> str:
    """The first cell of a notebook with these badges below its title, instead of those that are there.

    :param opening: what it begins with: a title, an empty line
    """
    title, *rest = opening.split("\n\n")
    texts = [text for text in rest if not text.startswith("[![")]
    return "\n\n".join([title, *([line] if line else []), *texts])


def with_address(readme: str, addresses: Mapping[str, str]) -> str:
    """The README with the address to clone from, instead of the one that is there.

    :param addresses: the project's URLs
    """
    address = addresses.get("Repository", PLACEHOLDER).rstrip("/")
    return re.sub(r"(?<=^git clone )\S+", lambda _: address, readme, flags=re.MULTILINE)


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_address(readme.read_text(), urls()))
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, nbformat.NO_CONVERT)
        line = badges(path.stem, urls())
        opening = with_badges(notebook.cells[0].source, line)
        if opening != notebook.cells[0].source:
            notebook.cells[0].source = opening
            path.write_text(nbformat.writes(notebook) + "\n")
            print(f"{path.name}: {line or 'no badges any more'}")


if __name__ == "__main__":
    main()
