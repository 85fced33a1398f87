"""The book of ``notebooks/``: what is in it, where its links lead, that it builds, and that it needs no network."""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml

import hivenb
from hivenb.compression import CODECS
from hivenb.options import FIELDS

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "notebooks"

pytestmark = pytest.mark.skipif(not (BOOK / "_toc.yml").is_file(), reason="the tests run apart from the source tree")

#: What a page loads by itself when it is opened; a link is only followed by a person.
LOADED = re.compile(r"<(?:script|img|iframe|source|video|audio|embed|link)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"[^>]*>")
#: The same in a style sheet.
LOADED_BY_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


def extension(name: str) -> ModuleType:
    """One of the book's own extensions of Sphinx."""
    spec = importlib.util.spec_from_file_location(name, BOOK / "book" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed() -> set[Path]:
    """The files that the table of contents lists."""
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    files = {toc["root"], *(entry["file"] for entry in entries if "file" in entry)}
    found = {path for name in files for path in BOOK.glob(f"{name}.*")}
    assert len(found) == len(files), "the table of contents lists a page that is not there"
    return found | {path for entry in entries if "glob" in entry for path in BOOK.glob(entry["glob"])}


def test_every_notebook_and_every_page_is_in_the_table_of_contents() -> None:
    pages = {path for path in (BOOK / "book").rglob("*") if path.suffix in (".md", ".rst")}
    assert listed() == {*BOOK.glob("*.ipynb"), *pages}


def test_the_pages_that_come_with_the_package_are_in_the_book() -> None:
    shown = set(extension("repository_pages").pages())
    assert {f"hivenb/{path.name}" for path in (ROOT / "hivenb").glob("*.md")} <= shown


def test_the_reference_describes_every_public_name() -> None:
    text = "\n".join(path.read_text() for path in (BOOK / "book" / "api").glob("*.rst"))
    described = re.findall(r"^\.\. (?:auto|py:)(?!module)\w+:: hivenb\.(\w+)(?=$|\()", text, re.MULTILINE)
    assert sorted(described) == sorted(hivenb.__all__)


def test_the_reference_describes_every_method_and_property_of_options() -> None:
    (line,) = re.findall(
        r"autoclass:: hivenb\.Options\(.*\n   :members: (.+)$",
        (BOOK / "book/api/options.rst").read_text(),
        re.MULTILINE,
    )
    members = inspect.getmembers(hivenb.Options, lambda one: inspect.isfunction(one) or isinstance(one, property))
    assert set(line.split(", ")) == {name for name, _ in members if not name.startswith("_")}


def test_links_lead_to_the_page_that_shows_the_file() -> None:
    relinked = extension("repository_pages").relinked
    joining = "notebooks/book/who_can_join.md"
    assert relinked(f"[a](../{joining})", "hivenb/SECURITY.md", "book/security.md") == "[a](/book/who_can_join.md)"
    assert relinked("[a](../../hivenb/SECURITY.md#x)", joining, "book/who_can_join.md") == "[a](/book/security.md#x)"
    assert relinked("[a](hivenb/SECURITY.md)", "README.md", "book/x.md") == "[a](/book/security.md)"
    assert relinked("[a](#what-is-held-off)", "hivenb/SECURITY.md", "book/security.md") == "[a](#what-is-held-off)"
    picture = "pictures/dashboard.png"
    assert relinked(f"![a](notebooks/{picture})", "README.md", "book/x.md") == f"![a](/{picture})"
    assert relinked("[a](tests/tiny.py)", "README.md", "book/x.md") == "[a](../../tests/tiny.py)"
    assert relinked("[a](https://example.org)", "README.md", "book/x.md") == "[a](https://example.org)"
    assert relinked("`[a](nowhere.md)`", "README.md", "book/x.md") == "`[a](nowhere.md)`"
    with pytest.raises(FileNotFoundError, match=r"README\.md links to nowhere\.md"):
        relinked("[a](nowhere.md)", "README.md", "book/x.md")


def test_a_tutorial_has_its_pictures_and_no_widgets() -> None:
    pages = extension("repository_pages")
    saved = nbformat.read(BOOK / "01_quickstart.ipynb", as_version=4)
    shown = nbformat.reads(pages.tutorial(nbformat.writes(saved), "notebooks/x.ipynb", "x.ipynb"), as_version=4)
    assert "widgets" in saved.metadata
    assert "widgets" not in shown.metadata
    kinds = [set(output.get("data", {})) for cell in shown.cells for output in cell.get("outputs", ())]
    assert any("image/png" in kind for kind in kinds)
    assert not any("widget" in name for kind in kinds for name in kind)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book as the guide for contributors builds it, elsewhere."""
    builder = shutil.which("jupyter-book", path=str(Path(sys.executable).parent))
    if builder is None:
        pytest.skip("jupyter-book is not installed in this environment")
    into = tmp_path_factory.mktemp("book")
    (command,) = re.findall(r"^jupyter-book (build .*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    done = subprocess.run(
        [builder, *command.replace("build/book", str(into)).split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into / "_build" / "html"


@pytest.mark.process
@pytest.mark.timeout(540)
@pytest.mark.slow
def test_it_builds_without_a_warning_and_needs_no_host(built: Path) -> None:
    """Scripts, styles, pictures and fonts of each page are beside it."""
    pages = [page for page in sorted(built.rglob("*.html")) if "_static" not in page.parts]
    assert len(pages) > len(listed())
    for page in pages:
        for loaded in LOADED.findall(page.read_text()):
            address = urlsplit(html.unescape(loaded))
            if address.scheme == "data" or not address.path:
                continue
            assert not address.scheme, f"{page.name} loads {loaded}"
            assert not address.netloc, f"{page.name} loads {loaded}"
            assert (page.parent / unquote(address.path)).exists(), f"{page.name} loads {loaded}, which is not there"
    for style in built.rglob("*.css"):
        for found in LOADED_BY_STYLE.findall(style.read_text()):
            assert not urlsplit("".join(found)).netloc, f"{style.name} loads {found}"


@pytest.mark.process
@pytest.mark.timeout(540)
def test_a_tutorial_shows_the_pictures_that_were_saved(built: Path) -> None:
    for path in BOOK.glob("*.ipynb"):
        saved = nbformat.read(path, as_version=4)
        outputs = [output.get("data", {}) for cell in saved.cells for output in cell.get("outputs", ())]
        pictures = sum(
            "image/png" in data or "data:image/png" in "".join(data.get("text/html", "")) for data in outputs
        )
        text = (built / f"{path.stem}.html").read_text()
        article = text[text.index("<article") : text.index("</article>")]
        shown = len(re.findall(r"<img\b[^>]*src=\"(?:_images/[^\"]+\.png|data:image/png)", article))
        assert pictures > 0, f"{path.name} has no picture"
        assert shown >= pictures, f"{path.name} has {pictures} pictures, and its page {shown}"


@pytest.mark.process
@pytest.mark.timeout(540)
def test_the_reference_has_units_errors_options_and_codecs(built: Path) -> None:
    pages = {path.stem: path.read_text() for path in (built / "book" / "api").glob("*.html")}
    anchors = {anchor for text in pages.values() for anchor in re.findall(r'id="(hivenb\.[\w.]+)"', text)}
    assert {f"hivenb.{name}" for name in hivenb.__all__} <= anchors
    for owner in (hivenb.Swarm, hivenb.TrainingRun, hivenb.Dashboard, hivenb.History):
        members = {name for name in dir(owner) if not name.startswith("_")}
        assert {f"hivenb.{owner.__name__}.{name}" for name in members} <= anchors
    assert all(f">{name}</span>" in pages["options"] for name in FIELDS)
    assert all(f">{name}</span>" in pages["compression"] for name in CODECS)
    assert "seconds to wait for peers when a group forms" in pages["strategy"]
    assert "OptionsError" in pages["options"]


@pytest.mark.process
@pytest.mark.timeout(540)
def test_the_search_knows_words_of_tutorials_pages_and_docstrings(built: Path) -> None:
    index = json.loads((built / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))

    def found(word: str) -> set[str]:
        pages = index["terms"][word]
        return {index["docnames"][page] for page in ([pages] if isinstance(pages, int) else pages)}

    assert "01_quickstart" in found("dashboard")
    assert "book/security" in found("attack")
    assert "book/api/strategy" in found("multiaddress")
