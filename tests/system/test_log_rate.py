from __future__ import annotations

from hivenb.system.log_lines import AT_ONCE, MOST_KINDS, PERIOD, LogRate


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_flood_is_cut_and_counted_and_what_else_is_said_comes_through():
    clock = Clock()
    rate = LogRate(clock)
    written = [
        rate.admits(f"WARNING 12D3KooW{number:06}x sent {number} bytes of 'rubbish {number}'") for number in range(1000)
    ]
    assert sum(line is not None for line in written) == AT_ONCE
    assert written[:AT_ONCE] == [
        f"WARNING 12D3KooW{number:06}x sent {number} bytes of 'rubbish {number}'" for number in range(AT_ONCE)
    ]
    assert rate.admits("ERROR the run has failed") == "ERROR the run has failed"
    clock.now += PERIOD
    assert rate.admits("WARNING 12D3KooWabc9 sent 7 bytes of 'x'") == (
        "WARNING 12D3KooWabc9 sent 7 bytes of 'x' (and 900 more like it)"
    )
    assert rate.admits("WARNING 12D3KooWabc9 sent 7 bytes of 'x'") is None


def test_lines_at_a_modest_pace_are_all_written():
    clock = Clock()
    rate = LogRate(clock)
    for number in range(1000):
        clock.now += PERIOD
        assert rate.admits(f"epoch {number}") == f"epoch {number}"


def test_what_is_remembered_is_bounded():
    rate = LogRate(Clock())
    for number in range(10 * MOST_KINDS):
        rate.admits("".join(chr(97 + int(digit)) for digit in str(number)))
    assert len(rate._kinds) == MOST_KINDS
