"""A peer that only helps the others to average: it is in their rounds, and neither trains nor weighs anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from strategy.peers import Start, meet, met, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SETTINGS: dict[str, Any] = {"epochs": None, "target": 96, "model": {"optimizer": torch.optim.AdamW, "lr": 0.05}}


def test_a_helper_is_in_the_rounds_of_those_that_train(start_peer: Start) -> None:
    first = start_peer(0, {**SETTINGS, "peers": 2})
    addresses = first.wait_until(lambda: first.addresses, "its addresses")
    second = start_peer(1, {**SETTINGS, "peers": 2}, addresses=addresses)
    first.wait_for_epoch(2)
    helper = start_peer(2, {**SETTINGS, "strategy": {"auxiliary": True}}, addresses=addresses)
    meet([first, second, helper], since=3)
    stop([first, second, helper])
    together = set(met(first, 3, 3)) & set(met(second, 3, 3))
    for epoch in together:
        for mine, theirs in zip(
            met(first, epoch, 3)[epoch].parameters, met(second, epoch, 3)[epoch].parameters, strict=True
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert {moment.report.samples for moment in helper.since(1)} == {0}


def test_a_helper_changes_nothing_for_one_that_trains_alone_but_for_it(start_peer: Start) -> None:
    settings = {**SETTINGS, "epochs": 8, "target": 32, "share": (0, 16)}
    alone = start_peer(0, settings)
    alone.wait_for_end()
    helped = start_peer(1, {**settings, "peers": 2})
    addresses = helped.wait_until(lambda: helped.addresses, "its addresses")
    helper = start_peer(2, {**SETTINGS, "target": 32, "strategy": {"auxiliary": True}}, addresses=addresses)
    helped.wait_for_end()
    helper.tell("stop")
    assert sum(report.group_size == 2 for report in helped.reports()) >= 4
    last = max(helped.history().keys() & alone.history().keys())
    for mine, theirs in zip(helped.history()[last], alone.history()[last], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-4)
