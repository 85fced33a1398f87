from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hivenb

PACKAGE = Path(hivenb.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))

#: What draws and displays; only hivenb.view may need it.
DISPLAYS = ("IPython", "ipywidgets", "matplotlib", "traitlets")

#: Run as scripts: they do their work on import.
SCRIPTS = ("engine/process/_exec_tied", "__main__")


def python(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.process
def test_the_import_is_light():
    loaded = python("import sys, hivenb; dir(hivenb); hivenb.__version__; print(*sys.modules)")
    heavy = {"torch", "lightning", "hivemind", "numpy", *DISPLAYS}
    assert heavy.isdisjoint(loaded)


INTERRUPTED = """
import os, signal, sys

def interrupt(event, args):
    if event == "import" and args[0] == "torch.nn" and came == []:
        came.append(args[0])
        os.kill(os.getpid(), signal.SIGINT)

came = []
sys.addaudithook(interrupt)
import hivenb
try:
    hivenb.Swarm
except KeyboardInterrupt:
    print(*came)
print(hivenb.Swarm.__name__)
"""


@pytest.mark.process
def test_what_was_interrupted_while_it_was_loaded_can_be_used():
    assert python(INTERRUPTED) == ["torch.nn", "Swarm"]


def test_every_public_name_is_there():
    for name in hivenb.__all__:
        assert getattr(hivenb, name) is not None
        assert name in dir(hivenb)
    with pytest.raises(AttributeError, match=r"no attribute 'Swam'; public names: .*Swarm"):
        hivenb.Swam  # noqa: B018


@pytest.mark.process
def test_the_core_works_without_what_displays():
    core = [str(m).replace("/", ".") for m in MODULES if m.parts[0] != "view" and str(m) not in SCRIPTS]
    code = f"""
import importlib, sys
import lightning  # whose torchmetrics needs matplotlib wherever it is installed
for name in [name for name in sys.modules if name.split(".")[0] in {DISPLAYS!r}]:
    del sys.modules[name]
for name in {DISPLAYS!r}:
    sys.modules[name] = None  # an import of it is an ImportError
for name in sys.argv[1:]:
    importlib.import_module(("hivenb." + name).removesuffix(".__init__"))
print(len(sys.argv))
"""
    assert python(code, *core) == [str(len(core) + 1)]


@pytest.mark.process
def test_elsewhere_than_on_linux_only_the_use_is_an_error():
    code = """
import sys
sys.platform = "darwin"
import hivenb
from hivenb.errors import PlatformError
options = hivenb.Options(target_batch_size=64)
try:
    from hivenb.system.environment import require_linux
    require_linux()
except PlatformError as e:
    print("Linux" in str(e) and "darwin" in str(e))
"""
    assert python(code) == ["True"]
