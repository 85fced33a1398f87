"""hivenb's peers in one run with a peer of plain hivemind: whoever starts it, and whoever leaves and returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hivemind.compression import Float16Compression

from strategy import plain_peer
from strategy.peer import NormModel, WideModel
from strategy.peers import Peer, Start, meet, met, stop

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

#: An epoch takes one of them alone 1.6 s: hivemind looks for others every 10 s at times.
SETTINGS: dict[str, Any] = {"epochs": None, "target": 256, "model": {"lr": 0.05}}


def assert_agree(first: Peer, second: Peer, epoch: int, rtol: float = 0.0) -> None:
    mine, theirs = (met(one, epoch, 2)[epoch].parameters for one in (first, second))
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-5)


def test_each_can_start_the_run_leave_it_and_return(start_peer: Start) -> None:
    start_plain = partial(start_peer, target=plain_peer.train)
    plain = start_plain(0, SETTINGS)
    alone = plain.wait_for_epoch(2).epoch
    ours = start_peer(1, SETTINGS, addresses=plain.addresses)
    assert_agree(plain, ours, meet([plain, ours], alone))

    stop([plain])
    alone = ours.wait_for_epoch(ours.moments[-1].epoch + 1, group_size=1).epoch
    plain = start_plain(2, SETTINGS, addresses=ours.addresses)
    assert_agree(plain, ours, meet([plain, ours], alone))

    stop([ours])
    alone = plain.wait_for_epoch(plain.moments[-1].epoch + 1, group_size=1).epoch
    ours = start_peer(3, SETTINGS, addresses=plain.addresses)
    assert_agree(plain, ours, meet([plain, ours], alone))
    stop([plain, ours])


def test_they_cut_large_tensors_alike_with_the_same_codec(start_peer: Start) -> None:
    """hivenb's peers among themselves cut them in another way."""
    codecs = {"grad_compression": Float16Compression(), "state_averaging_compression": Float16Compression()}
    settings = {**SETTINGS, "module": WideModel, "strategy": codecs, "plain": codecs}
    ours = start_peer(0, settings)
    alone = ours.wait_for_epoch(1).epoch
    plain = start_peer(1, settings, addresses=ours.addresses, target=plain_peer.train)
    # one of them has the other's parameters as they were sent, rounded to half precision
    assert_agree(plain, ours, meet([plain, ours], alone), rtol=2**-10)
    stop([plain, ours])


def test_a_model_with_batch_norm_trains_with_both_and_each_keeps_its_statistics(start_peer: Start) -> None:
    """A peer of plain hivemind has none to be averaged; a state can be downloaded from each of them."""
    settings = {**SETTINGS, "module": NormModel}
    ours = start_peer(0, {**settings, "model": {"lr": 0.05, "shift": 20.0}})
    alone = ours.wait_for_epoch(1).epoch
    plain = start_peer(
        1,
        {**settings, "model": {"lr": 0.05, "shift": -20.0}},
        addresses=ours.addresses,
        target=plain_peer.train,
    )
    together = meet([plain, ours], alone)
    assert_agree(plain, ours, together)
    np.testing.assert_allclose(met(ours, together, 2)[together].buffers["layer.1.running_mean"], 20.0, atol=2.0)
    late = start_peer(2, {**settings, "model": {"lr": 0.05, "shift": 20.0}}, addresses=ours.addresses)
    meet([plain, ours, late], together)
    stop([plain, ours, late])
