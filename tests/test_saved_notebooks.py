"""What committed notebooks hold: the outputs of one full run, with their pictures, and nothing of a machine."""

from __future__ import annotations

import ast
import base64
import copy
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image
from save_notebook import INVITE, cleaned, nameless

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="the tests run apart from the source tree")

#: Methods that return nothing, with which a cell may end that shows nothing.
SILENT = {
    "append", "apply", "block", "chdir", "cleanup", "close", "insert", "join", "kill", "mkdir", "pause", "remove",
    "remove_local_peers", "resume", "rmtree", "roll_back", "send_signal", "server_close", "ban",
    "shutdown", "start", "stop", "terminate", "unlink", "write_text",
}  # fmt: skip

#: Notebooks that end in another way than with three things to try, and why.
OTHER_ENDS = {"01_quickstart": "leaves a dashboard, alive and in view, to play with"}

#: What no output may hold: what it is, and how it looks.
OF_A_MACHINE = {
    "an absolute path": r"(?<![\w:/.<*~-])/(?!ip[46]/)[A-Za-z_][\w.-]*/[\w.-]+",
    "a path of Windows": r"\b[A-Z]:\\\w+",
    "a warning": r"\b\w*Warning\b|\bWARN(?:ING)?\b|^W\d{4} ",
    "an error": r"Traceback \(most recent call last\)|^E\d{4} ",
    "an id of a peer": r"\b12D3Koo(?!WExample)\w+|\bQm[1-9A-HJ-NP-Za-km-z]{44}\b",
    "the end of a peer's id": r"…(?=\w*[A-Z\d])(?!Peer\d\d)[1-9A-HJ-NP-Za-km-z]{6}\b",
    "an invite": rf"hivenb://(?!{INVITE.removeprefix('hivenb://')})[\w-]{{12,}}",
    "an address beyond loopback": r"\b(?!127\.|0\.0\.0\.0|10\.\d+\.\d+\.\d+/)\d{1,3}(?:\.\d{1,3}){3}\b|/ip6/(?!::1)",
    "an address in memory": r"\b0x[0-9a-f]{8,}\b",
}


def problems(name: str, notebook: NotebookNode) -> list[str]:
    """All that is wrong with a notebook, in words."""
    found = []
    for check in (not_of_one_run, shows_nothing, bad_pictures, of_a_machine, bad_form):
        found += check(name, notebook)
    return found


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def data_of(cell: NotebookNode) -> dict[str, str]:
    """What a cell shows, by its kind."""
    return {kind: "".join(data) for output in cell.outputs for kind, data in output.get("data", {}).items()}


def not_of_one_run(_name: str, notebook: NotebookNode) -> Iterator[str]:
    """Every cell was run once, in order, to its end."""
    counts = [cell.execution_count for cell in code_of(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"cells were run as {counts}"
    for cell in code_of(notebook):
        kinds = [output.output_type for output in cell.outputs]
        if "error" in kinds:
            yield f"[{cell.execution_count}] has failed"
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"[{cell.execution_count}] has written to the stream of errors"


def shows_nothing(_name: str, notebook: NotebookNode) -> Iterator[str]:
    """Cells that end with a value show it, and those that print have printed."""
    silent = set(SILENT)
    for cell in code_of(notebook):
        body = ast.parse(TransformerManager().transform_cell(cell.source)).body
        silent |= {one.name for one in body if isinstance(one, ast.FunctionDef) and not returns_something(one)}
        prints = any(is_call(statement, "print") for statement in ast.walk(ast.Module(top_level(body), [])))
        if prints and not any(output.get("name") == "stdout" for output in cell.outputs):
            yield f"[{cell.execution_count}] prints, and nothing was printed"
        last = body[-1] if body else None
        if not isinstance(last, ast.Expr) or cell.source.rstrip().endswith(";"):
            continue
        if not cell.outputs and not (isinstance(last.value, ast.Call) and called(last.value) in silent):
            yield f"[{cell.execution_count}] ends with a value, and shows nothing"


def returns_something(function: ast.FunctionDef) -> bool:
    """Whether a function gives back a value, be it in a function within it."""
    return any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(function))


def top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that are run, without what is only defined."""
    return [one for one in body if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and called(node) == name


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def pictures_of(cell: NotebookNode) -> list[bytes]:
    """The pictures that a cell shows, as PNG."""
    data = data_of(cell)
    texts = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", data.get("text/html", ""))
    texts += [data["image/png"]] if "image/png" in data else []
    return [base64.b64decode(text) for text in texts]


def bad_pictures(name: str, notebook: NotebookNode) -> Iterator[str]:
    """What is drawn was saved, and each picture can be read, is of a size to be seen, and not blank."""
    cells = code_of(notebook)
    if not any(pictures_of(cell) for cell in cells):
        yield "there is no picture"
    for cell in cells:
        draws = re.search(r"^(plt\.show\(\)|hivenb\.Dashboard\(.*\)|figure)$", cell.source, re.MULTILINE)
        # a dashboard of a run that goes on when the notebook ends has nothing final to show
        is_left_alive = name in OTHER_ENDS and cell is cells[-1]
        if draws and not pictures_of(cell) and not is_left_alive:
            yield f"[{cell.execution_count}] draws, and there is no picture"
        for picture in pictures_of(cell):
            try:
                image = Image.open(io.BytesIO(picture)).convert("RGB")
            except OSError:
                yield f"[{cell.execution_count}] has a picture that cannot be read"
                continue
            if min(image.size) < 100:
                yield f"[{cell.execution_count}] has a picture of {image.size} pixels"
            if image.getcolors(2) is not None:
                yield f"[{cell.execution_count}] has a blank picture"


def texts_of(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """All texts of outputs, and of the widgets that are saved with them, each with where it is."""
    for cell in code_of(notebook):
        for output in cell.outputs:
            for data in (output.get("text", ""), *output.get("data", {}).values()):
                yield f"[{cell.execution_count}]", data if isinstance(data, str) else str(data)
    saved = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    for number, widget in saved.get("state", {}).items():
        for data in widget["state"].values():
            yield f"the widget {number[:8]}", data if isinstance(data, str) else ""


def of_a_machine(_name: str, notebook: NotebookNode) -> Iterator[str]:
    """No output tells on which machine it came about."""
    for where, text in texts_of(notebook):
        text = re.sub(r"[A-Za-z0-9+/=\n]{400,}", "", text)  # a picture
        for what, looks in OF_A_MACHINE.items():
            found = re.search(looks, text, re.MULTILINE)
            if found:
                yield f"{where} shows {what}: {found[0]}"


def bad_form(name: str, notebook: NotebookNode) -> Iterator[str]:
    """A title and what it is about at the beginning, and three things to try at the end."""
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not re.match(r"# \S.*\n\n(?:.*\n)*?\w.{40,}", first.source):
        yield "does not begin with a title and a paragraph"
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    if sum(line.startswith("# ") for text in prose for line in text.splitlines()) != 1:
        yield "has another number of titles than one"
    # after it, a cell may close what is open
    tail = notebook.cells[-2:]
    tried = [
        text
        for cell in tail
        for text in re.findall(r"^## \d\. Try three things\n((?:.*\n?)*)", cell.source, re.MULTILINE)
    ]
    if name not in OTHER_ENDS and [re.findall(r"^(\d)\. ", text, re.MULTILINE) for text in tried] != [["1", "2", "3"]]:
        yield "does not end with three things to try"
    kept = set(notebook.metadata) - {"kernelspec", "language_info", "widgets"}
    if kept:
        yield f"has metadata of its own: {', '.join(sorted(kept))}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_as_a_full_run_left_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert problems(path.stem, notebook) == [], "python tests/save_notebook.py runs it and saves it"


@pytest.fixture
def good() -> NotebookNode:
    """A small notebook with which nothing is wrong."""
    return a_good_one()


def a_good_one() -> NotebookNode:
    file = io.BytesIO()
    Image.radial_gradient("L").save(file, "PNG")
    picture = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<Figure size 256x256>"}
    value = new_output("execute_result", {"text/plain": "2"}, execution_count=2)
    kernel = {"name": "python3", "display_name": "Python 3"}
    return new_notebook(
        metadata={"kernelspec": kernel, "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}}},
        cells=[
            new_markdown_cell("# A title\n\nWhat the reader will learn here, and that it takes a minute."),
            new_code_cell("%pip list\nx = 1", execution_count=1),
            new_code_cell("x + 1", execution_count=2, outputs=[value]),
            new_code_cell("def f():\n    print(1)\n\n\ndef g():\n    pass\n\n\ng()", execution_count=3),
            new_code_cell("plt.show()", execution_count=4, outputs=[new_output("display_data", picture)]),
            new_code_cell("print(1)", execution_count=5, outputs=[new_output("stream", text="1\n", name="stdout")]),
            new_markdown_cell("## 9. Try three things\n\n1. One.\n2. Two.\n3. Three."),
            new_code_cell("swarm.close()", execution_count=6),
        ],
    )  # fmt: skip


def test_with_a_good_notebook_nothing_is_wrong(good: NotebookNode) -> None:
    assert problems("02_small", good) == []


def show(text: str) -> Callable[[NotebookNode], None]:
    """What puts a text into an output."""
    return lambda notebook: notebook.cells[2].outputs[0].data.update({"text/plain": text})


def state(text: str) -> Callable[[NotebookNode], None]:
    """What puts a text into a widget that is saved."""
    return lambda notebook: notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"].update(
        {"state": {"abcdefgh12": {"state": {"value": text}}}}
    )


def picture(size: tuple[int, int]) -> Callable[[NotebookNode], None]:
    """What replaces the picture by a grey one."""

    def replace(notebook: NotebookNode) -> None:
        file = io.BytesIO()
        Image.new("RGB", size, "grey").save(file, "PNG")
        notebook.cells[4].outputs[0].data["image/png"] = base64.b64encode(file.getvalue()).decode()

    return replace


BROKEN: dict[str, tuple[Callable[[NotebookNode], object], str]] = {
    "not run": (lambda one: one.cells[2].update(execution_count=None), "cells were run as"),
    "run twice": (lambda one: one.cells[2].update(execution_count=7), "cells were run as"),
    "failed": (lambda one: one.cells[2].outputs.append(new_output("error", ename="E", evalue="e")), "has failed"),
    "stderr": (lambda one: one.cells[5].outputs[0].update(name="stderr"), "stream of errors"),
    "no value": (lambda one: one.cells[2].update(outputs=[]), "[2] ends with a value, and shows nothing"),
    "nothing printed": (lambda one: one.cells[5].update(outputs=[]), "nothing was printed"),
    "no picture": (lambda one: one.cells[4].outputs[0].data.pop("image/png"), "draws, and there is no picture"),
    "none at all": (lambda one: one.cells[4].outputs[0].data.pop("image/png"), "there is no picture"),
    "no PNG": (lambda one: one.cells[4].outputs[0].data.update({"image/png": "QUJD"}), "cannot be read"),
    "small picture": (picture((20, 300)), "a picture of (20, 300) pixels"),
    "blank picture": (picture((300, 300)), "a blank picture"),
    "path": (show("saved in /root/work/last.ckpt"), "an absolute path: /root/work"),
    "path in quotes": (show("{'path': '/tmp/tmpab12/x'}"), "an absolute path: /tmp/tmpab12"),
    "path in HTML": (show("<td>/home/ann/x.py</td>"), "an absolute path: /home/ann"),
    "Windows": (show(r"C:\Users\ann"), "a path of Windows"),
    "warning": (show("x.py:1: UserWarning: old"), "a warning: UserWarning"),
    "log": (show("Nov 25 [WARN] slow"), "a warning: WARN"),
    "traceback": (show("Traceback (most recent call last):"), "an error"),
    "peer": (show("12D3KooWDPQyLvhv7YPhapFBF6VJBXiNPNN97dXr3co4nEcrKgUv"), "an id of a peer"),
    "end of an id": (show("peer …raQcUa joined"), "the end of a peer's id: …raQcUa"),
    "widget": (state("<b>12D3KooWDPQyLvhv7YPhapFBF6VJBXiNPNN97dXr3co4nEcrKgUv</b>"), "the widget abcdefgh shows an id"),
    "invite": (show("hivenb://eNqLVtLPLDDRNzQy1z"), "an invite"),
    "address": (show("/ip4/192.168.3.4/tcp/1"), "an address beyond loopback: 192.168.3.4"),
    "IPv6": (show("/ip6/2001:db8::1/tcp/1"), "an address beyond loopback"),
    "memory": (show("<object at 0x7f5c0a1b2c3d>"), "an address in memory"),
    "title": (lambda one: one.cells[0].update(source="Hello"), "a title and a paragraph"),
    "two titles": (lambda one: one.cells[6].update(source=f"# B\n\n{one.cells[6].source}"), "titles than one"),
    "two things": (lambda one: one.cells[6].update(source=one.cells[6].source[:-9]), "three things to try"),
    "early things": (lambda one: one.cells.extend(one.cells[2:3] * 3), "three things to try"),
    "metadata": (lambda one: one.metadata.update(author="Ann"), "metadata of its own: author"),
}  # fmt: skip


@pytest.mark.parametrize("breaking", BROKEN)
def test_each_check_can_fail(breaking: str, good: NotebookNode) -> None:
    spoil, told = BROKEN[breaking]
    spoil(good)
    assert any(told in problem for problem in problems("02_small", good)), problems("02_small", good)


def test_loopback_made_up_ids_and_addresses_of_pages_are_nothing_of_a_machine(good: NotebookNode) -> None:
    show(
        f"127.0.0.1 /ip4/127.0.0.1/tcp/1 {INVITE} 12D3KooWExamplexPeer01 …Peer01 …second "
        "https://example.org/a/b image/png "
        "hivenb/view/x.py 1/2 <td>a</td>"
    )(good)
    assert problems("02_small", good) == []


def test_what_is_saved_names_no_peer(good: NotebookNode) -> None:
    first, second = f"12D3KooW{'a' * 38}ABCDEF", f"12D3KooW{'a' * 38}GHJKLM"
    show(f"{first} {second} …ABCDEF {first} hivenb://eNqLVtLPLDDRNzQy1zMA hivenb://...")(good)
    text = nameless(nbformat.writes(good))
    assert problems("02_small", nbformat.reads(text, as_version=4)) == []
    shown = data_of(nbformat.reads(text, as_version=4).cells[2])["text/plain"].split()
    assert shown[0] == shown[3] != shown[1]
    assert len(shown[0]) == len(first)
    assert shown[2] == f"…{shown[0][-6:]}"
    assert shown[4:] == [INVITE, "hivenb://..."]
    assert nameless(text) == text


def test_what_is_saved_has_no_times_and_no_steps_of_a_line(good: NotebookNode) -> None:
    run = copy.deepcopy(good)
    run.cells[2].metadata["execution"] = {"iopub.status.busy": "2026-01-01"}
    run.cells[5].outputs[0].text = "epoch 1 of 2\repoch 2 of 2   \n"
    run.metadata["language_info"] = {"name": "python"}
    saved = cleaned(run)
    assert saved.cells[2].metadata == {}
    assert saved.cells[5].outputs[0].text == "epoch 2 of 2\n"
    assert set(saved.metadata) == {"kernelspec", "language_info"}
    assert "widgets" in cleaned(a_good_one(), keeps_widgets=True).metadata
