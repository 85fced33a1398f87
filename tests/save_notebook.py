"""Runs notebooks from top to bottom, and saves them as they are committed: ``python tests/save_notebook.py FILE...``.

Their outputs are those of that run. What differs from run to run and helps nobody is left out: times of cells, the
steps of a line that tells how far something is, and who the peers were. A notebook that had the state of its widgets
keeps it.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

INVITE = "hivenb://an-invite-to-a-swarm-that-is-closed"
_PEER_ID = re.compile(r"12D3KooW(?!Example)[1-9A-HJ-NP-Za-km-z]{44}")
_INVITE = re.compile(r"hivenb://[\w-]{20,}")
_KEPT_METADATA = ("kernelspec", "language_info")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("notebook", type=Path, nargs="+")
    os.environ["HIVENB_HISTORY"] = "off"  # what is saved shows no earlier runs
    for path in parser.parse_args().notebook:
        notebook = nbformat.read(path, as_version=4)
        keeps_widgets = "widgets" in notebook.metadata
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
        path.write_text(nameless(nbformat.writes(cleaned(notebook, keeps_widgets)) + "\n"))


def cleaned(notebook: NotebookNode, keeps_widgets: bool = False) -> NotebookNode:
    """A notebook that was run, without what differs from run to run."""
    kept = (*_KEPT_METADATA, *["widgets"] * keeps_widgets)
    notebook.metadata = NotebookNode({key: value for key, value in notebook.metadata.items() if key in kept})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = _coalesced(cell.outputs)
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = NotebookNode()
            if output.output_type == "stream":
                output.text = "\n".join(line.rstrip("\r").split("\r")[-1].rstrip() for line in output.text.split("\n"))
        cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.text.strip()]
    nbformat.validate(notebook)
    return notebook


def _coalesced(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with what was printed in a row as one, as front ends save it, whatever the kernel's client made of it."""
    made: list[NotebookNode] = []
    for output in outputs:
        last = made[-1] if made else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            made.append(output)
    return made


def nameless(text: str) -> str:
    """A notebook's text with other ids for its peers, and another invite, of which nothing is left to be joined."""
    for number, peer_id in enumerate(dict.fromkeys(_PEER_ID.findall(text)), start=1):
        other = f"12D3KooW{'Example':x<38}Peer{number:02}"
        # a list of peers shows the end of it
        text = text.replace(peer_id, other).replace(f"…{peer_id[-6:]}", f"…{other[-6:]}")
    return _INVITE.sub(INVITE, text)


if __name__ == "__main__":
    main()
