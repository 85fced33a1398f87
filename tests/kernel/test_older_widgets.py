"""The dashboard with ipywidgets 7.7.1 and IPython 7.34, as in Colab, in a kernel of an environment of their own."""

from __future__ import annotations

import time

import pytest
from older_widgets import make_older_environment
from real_kernel import PATIENCE, Kernel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CELLS = """
import hivenb, tiny
swarm = hivenb.Swarm()
run = hivenb.TrainingRun(tiny.TinyModel(), (tiny.loader(), tiny.loader(seed=1)), swarm=swarm, accelerator="cpu",
                         options=hivenb.Options(target_batch_size=64, matchmaking_time=2.0))
dashboard = hivenb.Dashboard(run)
dashboard
"""

SWITCH = 'dashboard._view.options_panel.controls["delay_state_averaging"]'


@pytest.fixture(scope="module")
def older_python(tmp_path_factory) -> str:
    return make_older_environment(tmp_path_factory.mktemp("older"))


@pytest.fixture
def kernel(older_python, tmp_path):
    started = Kernel(tmp_path, older_python)
    try:
        yield started
    finally:
        started.close()


def until_sent(kernel: Kernel, model_id: str, condition) -> None:
    """Wait until the kernel has sent such a state of a widget."""
    end = time.monotonic() + PATIENCE
    seen = kernel.strays
    while True:
        while seen:
            message = seen.pop(0)
            content = message["content"]
            is_its = message["msg_type"] == "comm_msg" and content["comm_id"] == model_id
            if is_its and condition(content["data"].get("state", {})):
                return
        assert time.monotonic() < end, "no such message came"
        seen.append(kernel.client.get_iopub_msg(timeout=PATIENCE))


def flip(kernel: Kernel, model_id: str, value: object) -> None:
    """What a browser sends when a person flips a switch."""
    data = {"method": "update", "state": {"value": value}, "buffer_paths": []}
    message = kernel.client.session.msg("comm_msg", {"comm_id": model_id, "data": data})
    kernel.client.shell_channel.send(message)


def test_the_dashboard_is_built_follows_the_run_and_its_switches_act(kernel):
    versions = "import IPython, ipykernel, ipywidgets\nprint(ipywidgets.__version__, IPython.__version__)"
    assert kernel.run(versions) == "7.7.1 7.34.0\n"
    assert kernel.run(CELLS) == "Dashboard(run 'lightning_run')"
    assert kernel.run("print(dashboard._view._refresher.error)") == "None\n"
    assert kernel.run(f"print({SWITCH}.description_tooltip.endswith('(delay_state_averaging)'))") == "True\n"
    figures = kernel.run("print(dashboard._view.run_panel._status.model_id)").strip()
    switch = kernel.run(f"print({SWITCH}.model_id)").strip()

    kernel.run("run.start(); run.wait(epochs=2, timeout=60)")
    until_sent(kernel, figures, lambda state: "training" in state.get("value", ""))

    flip(kernel, switch, True)
    in_force = "import time\nend = time.monotonic() + 60\n"
    in_force += "while not run.options.delay_state_averaging and time.monotonic() < end: time.sleep(0.1)\n"
    assert kernel.run(f"{in_force}print(run.options.delay_state_averaging)") == "True\n"
    assert (
        kernel.run(f"print({SWITCH}.value, run.wait(epochs=2, timeout=60))") == "waited for 2 swarm epochs\nTrue True\n"
    )

    slider = "dashboard._view.peers_panel.slider"
    flip(kernel, kernel.run(f"print({slider}.model_id)").strip(), 1)
    there = in_force.replace("not run.options.delay_state_averaging", "not swarm.local_peers")
    assert kernel.run(f"{there}print(len(swarm.local_peers), {slider}.value)") == "1 1\n"

    assert kernel.run("print(dashboard._view._refresher.error)") == "None\n"
    kernel.run("dashboard.close(); swarm.close()")
