from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest

import hivenb
from hivenb.system import logs
from hivenb.system.log_lines import CAPACITY
from hivenb.system.logs import collect_logs


def in_a_child(work) -> None:
    """Do something in a process forked from this one."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_there_is_one_collector_for_all_swarms(swarm):
    collector = collect_logs()
    assert swarm.logs is collector
    with hivenb.Swarm("another") as another:
        assert another.logs is collector
    assert collect_logs() is collector
    for name in ("hivemind", "hivenb"):
        assert logging.getLogger(name).handlers.count(collector) == 1


def test_records_are_collected_and_not_printed(capfd):
    collector = collect_logs()
    logging.getLogger("hivemind.averaging").warning("a round\nfailed")
    logging.getLogger("hivenb.engine").info("something happened")
    logging.getLogger("hivenb.engine").debug("not this")
    *_, first, second = collector.tail()
    assert first.endswith("a round failed")
    assert second.endswith("INFO something happened")
    assert capfd.readouterr() == ("", "")


def test_what_steers_a_terminal_is_written_out():
    collector = collect_logs()
    logging.getLogger("hivemind.p2p").warning("peer said \x1b]0;title\x07\u202e")
    assert collector.tail()[-1].endswith(r"peer said \x1b]0;title\x07\u202e")


@pytest.mark.process
def test_children_that_were_forked_are_heard(eventually, capfd):
    collector = collect_logs()

    def talk() -> None:
        logging.getLogger("hivemind.child").warning("from a child, %s", "x" * 10_000)
        logging.getLogger("hivenb.child").info("its last words")

    in_a_child(talk)
    eventually(lambda: any("its last words" in line for line in collector.tail(5)))
    long = next(line for line in collector.tail(5) if "from a child" in line)
    assert 1000 < len(long) < 4096  # cut, so that it cannot mix with those of others
    assert capfd.readouterr() == ("", "")


@pytest.mark.process
def test_many_children_at_once_do_not_mix_their_lines(eventually):
    collector = collect_logs()
    pids = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            for count in range(50):
                logging.getLogger("hivemind.child").info("begin %d %d %s end", number, count, str(number) * 500)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    eventually(lambda: sum(" begin " in line for line in collector.tail()) >= 200)
    lines = [line for line in collector.tail() if " begin " in line][-200:]
    assert all(line.endswith(" end") and line.count("begin") == 1 for line in lines)


@pytest.mark.process
def test_a_child_with_a_collector_of_its_own_keeps_its_records_to_itself():
    collector = collect_logs()
    read_end, write_end = os.pipe()

    def own() -> None:
        own_collector = collect_logs()
        logging.getLogger("hivenb.child").info("for the child alone")
        installed = logging.getLogger("hivenb").handlers
        text = (own_collector is not collector, own_collector.tail()[-1][-19:], installed.count(own_collector))
        os.write(write_end, repr((*text, collector in installed)).encode())

    in_a_child(own)
    assert os.read(read_end, 1000).decode() == repr((True, "for the child alone", 1, False))
    os.close(read_end)
    os.close(write_end)
    assert not any("for the child alone" in line for line in collector.tail())
    assert logs._collector is collector


def test_what_a_thread_of_ours_warns_of_is_collected_and_all_else_is_not(recwarn):
    collector = collect_logs()
    logs._collect_warnings(collector)  # pytest has put its own in place
    seen = len(recwarn)

    def work() -> None:
        with collector.this_thread():
            assert collector.owns(threading.get_ident())
            warnings.warn("in the background", stacklevel=1)
            logging.getLogger("lightning.pytorch").info("said by Lightning")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert any("UserWarning: in the background" in line for line in collector.tail(3))
    assert len(recwarn) == seen
    warnings.warn("of the user", stacklevel=1)
    assert not any("of the user" in line for line in collector.tail(3))
    assert not collector.owns(thread.ident)


def test_memory_is_bounded():
    collector = collect_logs()
    for number in range(CAPACITY + 10):
        logging.getLogger("hivenb").info("line %d", number)
    lines = collector.tail()
    assert len(lines) == CAPACITY
    assert lines[-1].endswith(f"line {CAPACITY + 9}")
    assert collector.tail(2) == lines[-2:]
    assert collector.tail(0) == ()


@pytest.mark.process
def test_a_flood_in_a_child_is_cut_and_the_rest_comes_through(eventually):
    collector = collect_logs()

    def talk() -> None:
        for number in range(2000):
            logging.getLogger("hivemind.child").warning(f"a stranger has sent {number} bytes")
        logging.getLogger("hivenb.child").info("its last words after the flood")

    in_a_child(talk)
    eventually(lambda: any("last words after the flood" in line for line in collector.tail(5)))
    assert sum("a stranger has sent" in line for line in collector.tail()) <= 120


@pytest.mark.parametrize(("level", "is_kept"), [(logging.WARNING, False), (logging.ERROR, True)])
def test_an_error_is_kept_whatever_it_is_of(level, is_kept):
    collector = collect_logs()
    logging.getLogger("hivenb").log(level, "Checkpoint file not found: /tmp/hivenb-run-x/resume.ckpt")
    assert ("hivenb-run-x/resume.ckpt" in " ".join(collector.tail(1))) is is_kept
