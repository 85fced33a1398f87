"""The picture beside a dashboard: drawn after the cells that have changed it, once the run does not train."""

from __future__ import annotations

import base64
import gc
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

from hivenb.run.status import RunState
from hivenb.view.dashboard import SavedPicture
from hivenb.view.notebook_output import VIEW

PNG = b"\x89PNG"

CELLS = (
    """
import hivenb
from hivenb import tasks
task = tasks.digits()
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=hivenb.Options(target_batch_size=256))
hivenb.Dashboard(run)
""",
    "run.start()\nrun.wait(epochs=3)",
    "swarm.close()",
)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    shell = InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    return shell


def test_it_is_drawn_when_the_run_has_stopped_and_something_is_new(scene: Any, shell: Any) -> None:
    pictures: list[bytes] = []
    picture = SavedPicture(scene, pictures.append)
    scene.history.record("loss", 1.0)
    scene.set(state=RunState.TRAINING)
    shell.run_cell("1")
    assert pictures == [], "it would change all the time"
    scene.set(state=RunState.STOPPED)
    shell.run_cell("2")
    shell.run_cell("3")
    assert [picture[:4] for picture in pictures] == [PNG]
    scene.history.record("loss", 0.5)
    shell.run_cell("4")
    assert len(pictures) == 2
    picture.close()
    picture.close()
    scene.history.record("loss", 0.25)
    shell.run_cell("5")
    assert len(pictures) == 2


def test_it_keeps_no_run_alive(shell: Any) -> None:
    class Run:
        pass

    run, before = Run(), list(shell.events.callbacks["post_run_cell"])
    picture = SavedPicture(run, lambda png: None)  # type: ignore[arg-type]
    del run
    gc.collect()
    picture.look()
    assert shell.events.callbacks["post_run_cell"] == before


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_notebook_is_saved_with_the_final_charts(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = [output for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert set(shown.data) == {"text/plain", VIEW, "image/png"}
    assert base64.b64decode(shown.data["image/png"]).startswith(PNG)
