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


UNCHANGED = """
import importlib, pkgutil, sys, types, warnings
warnings.simplefilter("ignore")
import hivemind, lightning.pytorch, torch
import multiprocessing.connection, multiprocessing.heap, multiprocessing.managers, multiprocessing.popen_forkserver
for one in pkgutil.walk_packages(hivemind.__path__, "hivemind."):
    if "hivemind_cli" not in one.name:
        importlib.import_module(one.name)
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.utils import MSGPackSerializer
from hivemind.utils.tensor_descr import BatchTensorDescriptor
LIBRARIES = ("hivemind", "torch", "lightning", "pickle", "copyreg", "multiprocessing", "threading", "signal")
modules = [name for name in sys.modules if name.split(".")[0] in LIBRARIES]

def parts(module):
    tables = module.__name__.startswith("hivemind")
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) or (tables and type(value) is dict):
            yield name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for own, what in list(vars(value).items()):
                if not own.startswith("__") or own in ("__init__", "__new__", "__call__", "__reduce__", "__getattr__"):
                    yield f"{name}.{own}", what

def snapshot():
    tables = lambda value: dict(value) if type(value) is dict else value
    return {(name, part): tables(value) for name in modules for part, value in parts(sys.modules[name])}

def same(old, new):
    if type(old) is dict and type(new) is dict:
        return old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    return old is new

before = snapshot()
assert len(before) > 10_000
for name in sys.argv[1:]:
    importlib.import_module(("hivenb." + name).removesuffix(".__init__"))
after = snapshot()
for key in before.keys() | after.keys():
    if not same(before.get(key), after.get(key)):
        print(*key, sep=":")
expert = ModuleBackend("expert.0", torch.nn.Linear(3, 2), optimizer=None, max_batch_size=4,
                       args_schema=(BatchTensorDescriptor(3),), outputs_schema=BatchTensorDescriptor(2))
read = MSGPackSerializer.loads(MSGPackSerializer.dumps(expert.get_info()))
print(read["forward_schema"][0][0].size, read["outputs_schema"].size)
"""


@pytest.mark.process
def test_the_import_changes_no_other_library():
    """Also what hivemind's mixture of experts says of its experts is read as before."""
    modules = [str(m).replace("/", ".") for m in MODULES if str(m) not in SCRIPTS]
    assert python(UNCHANGED, *modules) == ["(None,", "3)", "(None,", "2)"]
