"""How far swarm-wide options may change at once."""

from __future__ import annotations

from typing import Any

import pytest

from hivenb.options import Options
from hivenb.options.largest_change import too_large_a_change
from hivenb.options.swarm_wide import shared_part

OPTIONS = Options(target_batch_size=256)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"target_batch_size": 2048}, None),
        ({"target_batch_size": 32}, None),
        ({"target_batch_size": 2049}, "target batch size from 256 to 2049"),
        ({"target_batch_size": 31}, "target batch size from 256 to 31"),
        ({"average_state_every": 8}, None),
        ({"average_state_every": 9}, "swarm epochs between averagings from 1 to 9"),
        ({"averager_opts": {"part_size_bytes": 2**17}}, None),
        ({"averager_opts": {"part_size_bytes": 2**15}}, "size of parts from 524288 to 32768"),
        ({"use_local_updates": True}, None),
    ],
)
def test_numbers_change_by_a_factor_of_eight_at_most(changes: dict[str, Any], word: str | None) -> None:
    reason = too_large_a_change(shared_part(OPTIONS), shared_part(OPTIONS.replace(**changes)))
    assert reason is None if word is None else reason is not None and reason.startswith(word)
