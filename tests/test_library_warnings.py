"""Warnings of libraries end nothing of ours, and the filters of whoever uses hivenb stay as they are."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hivenb._library_warnings import library_warnings_ignored, no_errors_on_this_thread, raise_no_warnings


@pytest.fixture(autouse=True)
def errors() -> Iterator[None]:
    """Warnings are errors, as with ``python -W error``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def warn(text: str = "of a library") -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=2)


def test_none_is_an_error_while_libraries_are_imported():
    before = list(warnings.filters)
    with library_warnings_ignored():
        warn()
        with library_warnings_ignored():
            warn()
        warn()
    assert list(warnings.filters) == before
    with pytest.raises(DeprecationWarning):
        warn()


def test_filters_that_a_library_adds_as_it_is_imported_stay():
    with library_warnings_ignored():
        warnings.filterwarnings("ignore", message="that of the library")
    warn("that of the library")
    with pytest.raises(DeprecationWarning):
        warn()


def test_filters_that_were_set_anew_meanwhile_are_left_alone():
    with library_warnings_ignored():
        warnings.resetwarnings()
        warnings.simplefilter("error")
    with pytest.raises(DeprecationWarning):
        warn()


def test_what_would_be_an_error_is_shown_on_one_thread_and_raised_on_others(monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    warnings.filterwarnings("ignore", message="ignored")
    before = list(warnings.filters)
    raised: list[BaseException] = []

    def warn_elsewhere() -> None:
        try:
            warn("elsewhere")
        except DeprecationWarning as e:
            raised.append(e)

    with no_errors_on_this_thread():
        warn("here")
        warn("ignored")
        other = threading.Thread(target=warn_elsewhere)
        other.start()
        other.join(10)
        kept = list(warnings.filters)
    assert (shown, list(map(str, raised))) == (["here"], ["elsewhere"])
    assert list(warnings.filters) == before
    warnings.filters[:] = kept  # as the end of somebody's warnings.catch_warnings() may do
    with pytest.raises(DeprecationWarning):
        warn("here")


def test_patterns_of_those_filters_count_there_as_well():
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="those alone")
    with no_errors_on_this_thread(), warnings.catch_warnings(record=True) as shown:
        warn("those alone, and no others")
        warn("others")
    assert [str(one.message) for one in shown] == ["those alone, and no others"]


def test_a_child_raises_none():
    warnings.filterwarnings("ignore", message="ignored")
    raise_no_warnings()
    with warnings.catch_warnings(record=True) as shown:
        warn()
        warn("ignored")
    assert [str(one.message) for one in shown] == ["of a library"]


TRAINS = """
import warnings
import hivenb
before = list(warnings.filters)
[getattr(hivenb, name) for name in hivenb.__all__]
import hivenb.strategy, hivenb.swarm.swarm, hivenb.training
import tiny
def main():
    with hivenb.Swarm() as swarm:
        options = hivenb.Options(target_batch_size=64)
        run = hivenb.TrainingRun(tiny.TinyModel(), tiny.loader(), swarm=swarm, accelerator="cpu", options=options)
        swarm.add_local_peers(1, run)
        run.start()
        assert run.wait(epochs=3, timeout=120)
        run.stop()
    del run
    print(sum(one[0] == "error" for one in warnings.filters), all(one in warnings.filters for one in before))
if __name__ == "__main__":
    main()
"""


@pytest.mark.process
@pytest.mark.slow
def test_two_peers_train_where_warnings_are_errors(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True\n", "")


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import hivenb.swarm.invites",
        "import hivenb.compression",
    ],
)
def test_a_part_is_imported_where_warnings_are_errors(code):
    """All public names are in the training above."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
