from __future__ import annotations

import pytest

import hivenb
from hivenb.errors import SwarmError

PEER = "12D3KooWNTpTGNxFtZXDLUk9SpcvF6Qv1bfSVFnZfAhkuBbHbRBq"


def test_a_peer_is_blocked_until_it_is_unblocked(swarm: hivenb.Swarm) -> None:
    assert swarm.blocked == ()
    swarm.block(PEER)
    swarm.block(PEER)
    assert swarm.blocked == (PEER,)
    swarm.unblock(PEER)
    swarm.unblock(PEER)
    assert swarm.blocked == ()
    for wrong in ("", "Ann", PEER[:-1], "<script>", "0OIl", PEER + "x", "Qm"):
        with pytest.raises(SwarmError, match=r"no peer's id; swarm.peers\(\) tells those of a run"):
            swarm.block(wrong)
    with pytest.raises(SwarmError, match="cannot block itself"):
        swarm.block(swarm.peer_id)
    assert swarm.blocked == ()
    swarm.block(PEER)
    swarm.close()
    assert swarm.blocked == ()
    with pytest.raises(SwarmError, match="is closed"):
        swarm.block(PEER)


@pytest.mark.process
@pytest.mark.slow
def test_a_blocked_peer_is_in_no_round_and_the_others_go_on_with_it(swarm: hivenb.Swarm, eventually) -> None:
    import tiny

    def start(own: hivenb.Swarm) -> hivenb.TrainingRun:
        options = hivenb.Options(target_batch_size=640, matchmaking_time=2.0, averaging_timeout=10.0, run_id="block")
        model = tiny.in_large_batches(tiny.PacedModel())
        run = hivenb.TrainingRun(model, tiny.large_batches(), swarm=own, options=options, accelerator="cpu")
        run.start()
        return run

    def group(run: hivenb.TrainingRun) -> float | None:
        return run.history.snapshot().last("group_size")

    with hivenb.Swarm.join(swarm.invite, "other") as other:
        runs = [start(swarm), start(other)]
        try:
            eventually(lambda: all(group(run) == 2 for run in runs), 60)
            swarm.block(other.peer_id)
            eventually(lambda: group(runs[0]) == 1, 30)
            eventually(lambda: runs[0].status.excluded_peers == {other.peer_id: "blocked by hand"}, 30)
            epoch = runs[0].status.epoch
            eventually(lambda: runs[0].status.epoch >= epoch + 2, 30)
            assert group(runs[0]) == 1
            swarm.unblock(other.peer_id)
            eventually(lambda: all(group(run) == 2 for run in runs), 60)
        finally:
            for run in runs:
                run.stop()
