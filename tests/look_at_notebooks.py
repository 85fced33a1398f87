"""Runs notebooks in JupyterLab in Chromium, as a reader does: ``python tests/look_at_notebooks.py --into FOLDER``.

Each is copied into a folder of its own, which a JupyterLab of its own shows. All its cells are run, and when the last
one has, the page is scrolled from top to bottom: a picture of each screen is in FOLDER then, for a person to look at. A
line for each notebook tells how long it ran, and what no reader should see: cells with errors, errors of the page,
widgets that do not show, code and outputs that are wider than their box.

``--gallery`` makes the README's pictures instead, each of a run of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser.conftest import CHROMIUM_ARGUMENTS, find_chromium, jupyterlab, wait_for
from browser.test_quickstart import run_all, switch_theme
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]

#: Of a screen, in pixels.
SIZE = {"width": 1400, "height": 900}
#: No notebook runs for so long, in seconds.
TOO_LONG = 600

#: Of the notebook in view: the kernel, how many cells were not run, whether one is at work, and which have errors or,
#: on the channel for them, messages.
STATE = """() => {
    const shown = window.jupyterapp.shell.currentWidget;
    const cells = [...shown.content.model.cells].filter(cell => cell.type === 'code');
    const outputs = cell => [...Array(cell.outputs.length).keys()].map(at => cell.outputs.get(at).toJSON());
    const wrong = output => output.output_type === 'error' || output.name === 'stderr';
    return {
        kernel: shown.sessionContext.session?.kernel?.status,
        unrun: cells.filter(cell => cell.executionCount === null).length,
        running: cells.some(cell => cell.executionState === 'running'),
        errors: cells.flatMap((cell, at) => outputs(cell).filter(wrong).map(
            output => `code cell ${at + 1}: ${output.ename ?? ''} ${output.evalue ?? output.text}`)),
    };
}"""

#: Scrolls to a height; when the page has come to rest there, tells where it is, and what is wrong with what is seen.
SCROLLED = """async to => {
    const box = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer');
    const shape = () => [box.scrollTop, box.scrollHeight, document.querySelectorAll('.jp-Cell, img').length].join();
    const loaded = () => [...document.images].every(image => image.complete);
    box.scrollTop = to;
    for (let still = 0, before = '', times = 0; still < 3 && times < 50; times += 1) {
        await new Promise(done => setTimeout(done, 100));
        still = before === (before = shape()) && loaded() ? still + 1 : 0;
    }
    const seen = box.getBoundingClientRect();
    const inView = e => (r => r.height && r.bottom > seen.top && r.top < seen.bottom)(e.getBoundingClientRect());
    const all = selector => [...box.querySelectorAll(selector)].filter(inView);
    const named = e => `${e.closest('.jp-Cell')?.querySelector('.jp-InputPrompt')?.innerText.trim()} ${e.className}`;
    return {
        top: box.scrollTop,
        height: box.clientHeight,
        ends: [...box.querySelectorAll('.jp-Cell')].at(-1).getBoundingClientRect().bottom <= seen.bottom,
        broken: all('.jp-OutputArea-output').filter(e => /Error displaying widget|Loading widget/.test(e.innerText))
            .map(e => `${named(e)}: a widget does not show`),
        wide: all('.cm-scroller, .jp-OutputArea-output, .jp-OutputArea-output *')
            .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible')
            .filter(e => e.clientWidth > 1 && e.tagName !== 'INPUT')
            .map(e => `${named(e)}: ${e.scrollWidth} px in ${e.clientWidth} px`),
    };
}"""


@dataclass(frozen=True)
class Picture:
    """One of the README.

    :param notebook: of which it is a picture
    :param cell: among those with code, the place of the one whose output it shows, from 0; -1 is the last
    :param theme: JupyterLab's, ``"Light"`` or ``"Dark"``
    :param waits_for: a text that the output shows when the picture is to be taken
    :param tab: of a dashboard, the one that is opened
    :param part: of the output, what is shown
    :param margin: around it, in pixels; the frame of its cell is further away
    :param scale: pixels of the picture for one of the page; a chart of matplotlib's has one
    """

    notebook: str
    cell: int
    theme: str = "Light"
    waits_for: str = ""
    tab: str = ""
    part: str = ".jp-OutputArea-output"
    margin: int = 4
    scale: float = 2.0


#: The README's pictures, by their names in ``notebooks/pictures``.
GALLERY = {
    "dashboard": Picture("01_quickstart", -1, waits_for=r"epoch\s*4\d"),
    "advice": Picture("01_quickstart", -1, "Dark", r"epoch\s*4\d", "Advice"),
    "comparison": Picture("04_compression", 2),
    "unreliable": Picture("09_unreliable_peers", 18, part=".jp-OutputArea-output img", margin=0, scale=1.0),
}


@dataclass
class Seen:
    """What a notebook was like.

    :param seconds: for which its cells ran
    :param pictures: of its screens, from top to bottom
    :param errors: of cells, and what they have written to where errors go
    :param console: errors of the page
    :param looks: widgets that do not show, and what is wider than its box
    """

    seconds: float
    errors: list[str]
    console: list[str]
    pictures: list[Path] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = {"cell errors": self.errors, "console errors": self.console, "looks": self.looks}
        counts = ", ".join(f"{len(lines)} {name}" for name, lines in found.items())
        details = [f"    {name}: {line[:300]}" for name, lines in found.items() for line in lines]
        return "\n".join([f"{self.seconds:.0f} s, {len(self.pictures)} screens, {counts}", *details])


def main() -> None:
    """The command."""
    os.environ["HIVENB_HISTORY"] = "off"  # what is pictured shows no earlier runs
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("notebook", type=Path, nargs="*", help="default: all of notebooks/")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--into", type=Path, help="the folder for the pictures")
    what.add_argument(
        "--gallery",
        nargs="*",
        choices=GALLERY,
        metavar="NAME",
        help=f"make the README's pictures: {', '.join(GALLERY)}",
    )
    parser.add_argument("--dark", action="store_true", help="in JupyterLab's dark theme")
    arguments = parser.parse_args()
    if arguments.gallery is not None:
        make_gallery(arguments.gallery or GALLERY, ROOT / "notebooks" / "pictures")
        return
    arguments.into.mkdir(parents=True, exist_ok=True)
    well = True
    for path in arguments.notebook or sorted((ROOT / "notebooks").glob("*.ipynb")):
        with opened(path, "Dark" if arguments.dark else "Light") as (page, console):
            seconds, errors = run_to_its_end(page)
            seen = Seen(seconds, errors, console)
            look(page, seen, arguments.into, path.stem + "-dark" * arguments.dark)
        print(f"{path.stem}: {seen}", flush=True)
        well = well and not (seen.errors or seen.console)
    sys.exit(not well)


@contextmanager
def opened(path: Path, theme: str, scale: float = 1.0, **size: int) -> Iterator[tuple[Any, list[str]]]:
    """A notebook in JupyterLab in Chromium; server, kernel and browser are gone afterwards.

    :param path: it stays as it is: a copy is run
    :param theme: ``"Light"`` or ``"Dark"``
    :param scale: pixels of the screen for one of the page
    :param size: of the page, where it is not :data:`SIZE`
    :returns: the page, and a list to which its errors are added
    """
    with tempfile.TemporaryDirectory() as shown, tempfile.TemporaryDirectory() as own:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                # What was saved is seen at first, but counts only tell that a cell has run if they are of this run.
                cell.execution_count = None
        nbformat.write(notebook, Path(shown) / path.name)
        console: list[str] = []
        with (
            jupyterlab(Path(shown), Path(own), "--expose-app-in-browser") as lab,
            sync_playwright() as playwright,
            playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS) as browser,
        ):
            page = browser.new_page(viewport={**SIZE, **size}, device_scale_factor=scale)
            page.on("console", lambda message: console.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: console.append(str(error)))
            page.goto(lab.open(path.name))
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
            if theme != "Light":
                switch_theme(page, theme)
            yield page, console


def chromium() -> str:
    """Where Chromium is; without one, the command ends."""
    try:
        return find_chromium()
    except pytest.skip.Exception as error:
        sys.exit(str(error))


def run_to_its_end(page: Any) -> tuple[float, list[str]]:
    """Run all cells of the notebook in view.

    :returns: for how many seconds they ran, and their errors
    """
    run_all(page)
    began = time.monotonic()

    def is_done() -> dict[str, Any] | None:
        state = page.evaluate(STATE)
        done = state["kernel"] == "idle" and not state["running"] and (state["errors"] or not state["unrun"])
        return state if done else None

    state = wait_for(is_done, TOO_LONG, "it does not come to its end", interval=0.5)
    skipped = [f"{state['unrun']} cells were not run"] if state["unrun"] else []
    return time.monotonic() - began, state["errors"] + skipped


def look(page: Any, seen: Seen, into: Path, name: str) -> None:
    """Scroll from top to bottom, and leave a picture of each screen.

    :param seen: where what was seen is added
    :param into: the folder
    :param name: that of a picture begins with it
    """
    for old in into.glob(f"{name}-[0-9][0-9].png"):
        old.unlink()
    at, ends = 0, False
    while not ends and len(seen.pictures) < 99:
        view = page.evaluate(SCROLLED, at)
        picture = into / f"{name}-{len(seen.pictures) + 1:02}.png"
        page.screenshot(path=picture)
        seen.pictures.append(picture)
        seen.looks.extend(found for found in view["broken"] + view["wide"] if found not in seen.looks)
        # A line that is cut by the edge of one screen is whole on the next one.
        at, ends = view["top"] + view["height"] - 40, view["ends"]


def make_gallery(names: Iterable[str], folder: Path) -> None:
    """Run what the README's pictures show, and save them.

    :param names: of those that are made
    :param folder: where they belong
    """
    folder.mkdir(exist_ok=True)
    for name in names:
        image, saved = taken(GALLERY[name]), folder / f"{name}.png"
        # A page of text and lines has few colours: with a palette, its file has a third of the size.
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(saved, optimize=True)
        kilobytes = saved.stat().st_size / 1000
        print(f"{saved.relative_to(ROOT)}: {image.width} x {image.height}, {kilobytes:.0f} kB", flush=True)


def taken(wanted: Picture) -> Image.Image:
    """One of the README's pictures, of a run that is made for it."""
    path = ROOT / "notebooks" / f"{wanted.notebook}.ipynb"
    with opened(path, wanted.theme, wanted.scale, height=1300) as (page, _):
        _, errors = run_to_its_end(page)
        if errors:
            sys.exit(f"{wanted}: {errors}")
        output = page.locator(".jp-CodeCell").nth(wanted.cell).locator(wanted.part).last
        output.scroll_into_view_if_needed()
        if wanted.tab:
            output.get_by_role("tab", name=wanted.tab).click()
        wait_for(lambda: re.search(wanted.waits_for, output.inner_text()), TOO_LONG, "it does not come so far")
        box, margin = output.bounding_box(), wanted.margin
        size = {"width": box["width"] + 2 * margin, "height": box["height"] + 2 * margin}
        clip = {"x": box["x"] - margin, "y": box["y"] - margin, **size}
        return Image.open(io.BytesIO(page.screenshot(clip=clip)))


if __name__ == "__main__":
    main()
