"""The dashboard with ipywidgets 7.7.1 on the page, as Colab has it: in the classic notebook, which knows no other."""

from __future__ import annotations

import os
import signal

import pytest
from older_widgets import make_older_environment, packages_of

from hivenb.options import FIELDS
from hivenb.view.options_panel import shown

from .conftest import answers, serving, wait_for
from .test_live_control import notebook
from .test_quickstart import keep_screenshot

pytestmark = [pytest.mark.browser, pytest.mark.long]

CLASSIC = ("nbclassic==1.3.3", "widgetsnbextension==3.6.1")
CELLS = (
    "import hivenb\nfrom hivenb import tasks\ntask = tasks.digits()\nswarm = hivenb.Swarm()",
    "run = hivenb.TrainingRun(task.model, task.train, swarm=swarm, options=hivenb.Options(target_batch_size=600))\n"
    "hivenb.Dashboard(run)",
)


@pytest.fixture
def classic(tmp_path):
    """A classic notebook's address."""
    pytest.importorskip("jupyter_server", reason="Jupyter Server is not installed")
    python = make_older_environment(tmp_path / "older", *CLASSIC)
    packages, folder = packages_of(tmp_path / "older"), tmp_path / "notebooks"
    folder.mkdir()
    name = notebook(folder, "classic.ipynb", CELLS)
    env = {
        **os.environ,
        "JUPYTER_PATH": str(packages / "share" / "jupyter"),
        "JUPYTER_CONFIG_PATH": str(packages / "etc" / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    arguments = ["--allow-root", "--ip=127.0.0.1", "--IdentityProvider.token=", "--ServerApp.password="]
    log, end = tmp_path / "classic.log", signal.SIGTERM
    with serving("nbclassic", *arguments, log=log, end=end, python=python, env=env, cwd=folder) as url:
        wait_for(lambda: answers(url + "/api"), 60, f"the classic notebook does not answer; see {log}")
        yield f"{url}/nbclassic/notebooks/{name}"


@pytest.mark.timeout(420)
def test_each_field_says_what_it_means_on_the_page_of_older_widgets(classic, page):
    page.goto(classic)
    page.wait_for_function("window.Jupyter && Jupyter.notebook && Jupyter.notebook.kernel?.is_connected()")
    page.evaluate("Jupyter.utils.load_extension('jupyter-js-widgets/extension')")
    page.wait_for_function("Boolean(Jupyter.notebook.kernel.widget_manager)", timeout=60_000)
    page.evaluate("Jupyter.notebook.execute_all_cells()")
    dashboard = page.locator(".hivenb").first
    dashboard.wait_for(timeout=120_000)
    marks = dashboard.locator(".hivenb-help > summary")
    titles = marks.evaluate_all("all => all.map(e => e.title)")
    for name in (name for names in shown().values() for name in names):
        assert any(title.startswith(FIELDS[name].help) and f"({name})" in title for title in titles), name
    text = dashboard.get_by_text("(delay_state_averaging)")
    assert not text.is_visible()
    field = page.get_by_label("state averaging in background")
    dashboard.locator(".hivenb-helped", has=field).locator("summary").click()
    text.wait_for(timeout=5_000)
    keep_screenshot(page, "classic-7.7.1")
