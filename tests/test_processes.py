from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import threading
import time
from collections.abc import Callable

import forked
import processes
import pytest

SLEEP = ["sleep", "600"]


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(SLEEP),
        lambda: os.fork() or os._exit(0),
        lambda: os.posix_spawn("/bin/sleep", SLEEP, {}),
        mp.get_context("fork").Process(target=print).start,
        mp.get_context("spawn").Process(target=print).start,
        mp.get_context("forkserver").Process(target=print).start,
    ],
    ids=["subprocess", "fork", "posix_spawn", "multiprocessing fork", "spawn", "forkserver"],
)
def test_one_that_is_not_marked_cannot_start_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="not marked 'process'"):
        start()


def test_nor_can_its_threads() -> None:
    refused: list[BaseException] = []

    def start() -> None:
        try:
            subprocess.run(SLEEP)
        except BaseException as e:
            refused.append(e)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert [type(e) for e in refused] == [pytest.fail.Exception]


@pytest.mark.process
class TestWhatIsLeftBehind:
    @pytest.fixture(autouse=True)
    def no_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "GRACE", 0.2)

    def test_is_named_and_ended(self) -> None:
        with pytest.raises(pytest.fail.Exception, match=r"left behind: \d+ sleep 600"), processes.none_left():
            left = subprocess.Popen(SLEEP)
        assert left.wait(10) < 0

    def test_is_found_where_it_was_forked_from_a_server(self) -> None:
        with pytest.raises(pytest.fail.Exception, match="left behind: "), processes.none_left():
            left = forked.start(time.sleep, 600)
        left.join(10)
        assert left.exitcode is not None
        assert left.exitcode < 0

    def test_is_not_what_was_there_before(self) -> None:
        with subprocess.Popen(SLEEP) as there:
            with processes.none_left():
                pass
            assert there.poll() is None
            there.kill()
