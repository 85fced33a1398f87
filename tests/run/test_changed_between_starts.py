"""What somebody leaves in the model between two starts, or in a pause, is what goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import hivenb
from hivenb.errors import TrainingError


@pytest.fixture(scope="module")
def swarm() -> Iterator[hivenb.Swarm]:
    with hivenb.Swarm("changed") as opened:
        yield opened


class Tuned(tiny.PacedModel):
    """A frozen body and a head, with an optimizer of what needs gradients; changes little in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.rate = 1e-4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.body(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)]


def put_in(model: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.fill_(value)


def value_of(model: Any) -> float:
    return float(model.layer.weight[0, 0])


def trained(run: hivenb.TrainingRun, steps: int = 4) -> None:
    run.start()
    run.wait(steps=steps)
    run.stop()


def moments(run: hivenb.TrainingRun, parameter: nn.Parameter) -> dict[str, Any]:
    assert run.strategy is not None
    assert run.strategy.optimizer is not None
    return run.strategy.optimizer.opt.state[parameter]


_numbers = itertools.count(1)


@pytest.fixture
def make(swarm: hivenb.Swarm) -> Callable[..., Any]:
    def make_run(**options: Any) -> tuple[Any, hivenb.TrainingRun]:
        model = Tuned()
        options = {"target_batch_size": 16, "run_id": f"changed-{next(_numbers)}", **options}
        run = hivenb.TrainingRun(model, tiny.loader(), swarm=swarm, options=hivenb.Options(**options))
        return model, run

    return make_run


@pytest.mark.process
def test_another_start_goes_on_with_what_the_model_is_by_then(make: Callable[..., Any]) -> None:
    model, run = make()
    trained(run)
    put_in(model, 50.0)
    trained(run, 1)
    assert value_of(model) == pytest.approx(50.0, abs=0.1)
    steps, epoch = float(moments(run, model.layer.weight)["step"]), run.status.epoch
    assert steps >= 2

    model.body.requires_grad_(True)  # as plain torch says: a parameter group of another size
    kept = model.body.weight.detach().clone()
    trained(run)
    assert run.status.epoch > epoch
    assert not torch.equal(model.body.weight, kept)
    assert float(moments(run, model.layer.weight)["step"]) > steps
    assert float(moments(run, model.body.weight)["step"]) < float(moments(run, model.layer.weight)["step"])
    assert any("begins anew for body.weight, body.bias" in line for line in run.log_lines)

    model.rate = 3e-5
    trained(run)
    assert run.strategy.optimizer.opt.param_groups[0]["lr"] == pytest.approx(3e-5, rel=0.1)
    model.layer = nn.Linear(4, 2)  # a new head
    kept = model.layer.weight.detach().clone()
    trained(run)
    assert (model.layer.weight - kept).abs().max() < 0.1
    assert float(moments(run, model.layer.weight)["step"]) < float(moments(run, model.body.weight)["step"])


@pytest.mark.process
@pytest.mark.parametrize("mode", ["synchronous", "offloaded", "all delays"])
def test_weights_that_are_put_in_while_it_is_paused_go_on(mode: str, make: Callable[..., Any]) -> None:
    model, run = make(**tiny.MODES[mode])
    run.start()
    for ends in (False, True):
        run.wait(steps=4)
        run.pause()
        run.wait_for("paused")
        put_in(model, 50.0)
        if ends:
            run.stop()
            run.start()
        else:
            run.resume()
        run.wait(epochs=2)
        assert value_of(run.snapshot()) == pytest.approx(50.0, abs=0.1)
    run.pause()
    run.wait_for("paused")
    model.layer = nn.Linear(4, 2)
    with pytest.raises(TrainingError, match=r"layer\.bias, layer\.weight .*run\.stop\(\) and run\.start\(\)"):
        run.resume()
    run.stop()
    kept = model.layer.weight.detach().clone()
    trained(run)
    assert (model.layer.weight - kept).abs().max() < 0.1


@pytest.mark.process
def test_a_checkpoint_that_is_asked_for_is_what_goes_on(make: Callable[..., Any], tmp_path: Any) -> None:
    model, run = make()
    trained(run)
    saved, was = tmp_path / "saved.ckpt", value_of(model)
    run.trainer.save_checkpoint(saved)
    put_in(model, 50.0)
    run.start(checkpoint=saved)
    run.wait(steps=1)
    run.stop()
    assert value_of(model) == pytest.approx(was, abs=0.1)


@pytest.mark.process
@pytest.mark.slow
def test_weights_that_are_put_in_where_others_train_on_give_way_to_theirs_and_that_is_said(
    make: Callable[..., Any], swarm: hivenb.Swarm
) -> None:
    model, run = make(target_batch_size=320)
    with hivenb.Swarm.join(swarm.invite) as elsewhere:
        other = hivenb.TrainingRun(Tuned(), tiny.loader(seed=1), swarm=elsewhere, options=run.options)
        other.start()
        run.start()
        run.wait(epochs=2)
        for stops in (True, False):
            if stops:
                run.stop()
            else:
                run.pause()
                run.wait_for("paused")
            put_in(model, 50.0)
            # one that waits for a round with this peer has not gone on without it, and takes its state as well
            assert other.wait(epochs=2, timeout=60)
            run.start()
            run.wait(epochs=3)
            assert abs(value_of(run.snapshot())) < 10
            assert abs(value_of(other.snapshot())) < 10
        run.stop()
        other.stop()
    said = [event.text for event in run.history.snapshot().events if "gave way" in event.text]
    assert len(said) == 2
