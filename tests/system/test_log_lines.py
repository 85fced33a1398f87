"""What the log keeps, and what it leaves out."""

from __future__ import annotations

import logging
import threading
import warnings

from hivenb.system import log_lines, logs
from hivenb.system.log_lines import LogLines, is_deprecation_in_a_library, is_hint, is_noise
from hivenb.system.logs import collect_logs

LOOK = "Another look_for_group is already in progress. The current run will be scheduled after the existing group"


def test_a_line_that_comes_again_is_counted() -> None:
    lines = LogLines(3)
    assert lines.add("10:00:00 WARN no group")
    assert lines.add("10:00:01 INFO something else")
    assert not lines.add("10:00:02 WARN no group")
    assert not lines.add("10:00:02 WARN no group")
    assert lines.tail(9) == ("10:00:00 WARN no group (3 times, until 10:00:02)", "10:00:01 INFO something else")


def test_after_a_while_it_is_a_line_of_its_own(monkeypatch) -> None:
    lines = LogLines(3)
    lines.add("10:00:00 WARN no group")
    monkeypatch.setattr(log_lines, "_COUNTED_FOR", -1.0)
    assert lines.add("10:02:00 WARN no group")
    assert lines.tail(9) == ("10:00:00 WARN no group", "10:02:00 WARN no group")


def test_what_has_been_pushed_out_is_new_again() -> None:
    lines = LogLines(2)
    for word in ("a", "b", "c"):
        lines.add(word)
    assert lines.add("a")
    assert lines.tail(9) == ("c", "a")
    assert len(lines._newest) == 2


def test_noise_is_left_out_of_the_log() -> None:
    collector = collect_logs()
    logging.getLogger("hivemind.averaging.averager").info(LOOK)
    logging.getLogger("hivenb.test").info("this is worth reading")
    assert collector.tail(1)[0].endswith("this is worth reading")
    assert not any("look_for_group" in line for line in collector.tail())
    assert is_noise("Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]")


def test_a_hint_of_lightnings_is_no_warning() -> None:
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    assert is_hint(PossibleUserWarning)
    assert not is_hint(UserWarning)
    collector = collect_logs()
    logs._collect_warnings(collector)
    with collector.this_thread():
        warnings.warn("You defined a `validation_step` but have no `val_dataloader`", PossibleUserWarning, stacklevel=1)
        warnings.warn("this is one", UserWarning, stacklevel=1)
    hint, warning = (line.split(" ")[1] for line in collector.tail(2))
    assert (hint, warning) == ("INFO", "WARN")


def test_notes_for_the_authors_of_libraries_are_left_out_and_the_users_own_are_kept() -> None:
    library = "/env/lib/python3.11/site-packages/torch/utils/_pytree.py"
    assert is_deprecation_in_a_library(FutureWarning, library)
    assert is_deprecation_in_a_library(DeprecationWarning, library)
    assert not is_deprecation_in_a_library(UserWarning, library)
    assert not is_deprecation_in_a_library(FutureWarning, "/home/ann/model.py")
    collector = collect_logs()
    logs._collect_warnings(collector)

    def work() -> None:
        with collector.this_thread():
            warnings.warn_explicit("isinstance(treespec, LeafSpec) is deprecated", FutureWarning, library, 1)
            warnings.warn_explicit("of the user's own", FutureWarning, "/home/ann/model.py", 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert collector.tail(1)[0].endswith("FutureWarning: of the user's own")
    assert not any("LeafSpec" in line for line in collector.tail(3))
