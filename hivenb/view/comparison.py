"""Several options side by side, live while the trainings work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hivenb._signatures import shown_with
from hivenb.run.comparison import ComparedTraining, run_each
from hivenb.run.trainer import trainer_keywords
from hivenb.view.live_comparison import watcher
from hivenb.view.shown_comparison import ShownComparison

if TYPE_CHECKING:
    from hivenb.options.options import Options


@shown_with(trainer_keywords)
def compare(
    options: Mapping[str, Options],
    model: Any,
    data: Any,
    *,
    epochs: int,
    local_peers: int = 2,
    seed: int = 0,
    swarm_settings: Mapping[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> ShownComparison:
    """Train the same model with each of several options in turn, and put what came out side by side.

    Each training starts from the same parameters and random numbers, in a swarm of its own with as many peers. While
    they work, a table and curves in the cell, or a line in a terminal, say how far they are. The comparison has time
    per epoch, share of it for which training stood still, bytes sent per epoch, memory that this training took, the
    loss of training and that of validation, and the curves in one picture.

    An interrupt (Kernel > Interrupt, or Ctrl+C) ends the comparison, not what it has found: the training at work is
    stopped, and ``compare`` returns the comparison with what is finished; ``unfinished`` says what is not. A training
    that fails is shown as failed, and the others have their turn.

    :param options: by the name under which to compare them
    :param model: the LightningModule to begin with; it stays as it is
    :param data: as for :class:`hivenb.TrainingRun`
    :param epochs: of the swarm, for each, after all peers have met; at least 2
    :param local_peers: further peers, as processes on this machine
    :param seed: of all random numbers
    :param swarm_settings: keyword arguments of :class:`hivenb.Swarm` for the swarm of each training, such as addresses
      at which a slow line begins; by default it is of this machine only
    :param trainer_kwargs: keyword arguments of ``lightning.Trainer``
    :returns: the outcomes, by name; ``to_dataframe()`` gives the figures
    :raises OptionsError: if there is nothing to compare
    :raises Exception: the first error, if every training has failed
    """
    watch = watcher()
    training = ComparedTraining(model, data, epochs, local_peers, seed, trainer_kwargs, swarm_settings or {})
    done = ShownComparison(run_each(training, options, lambda now: watch.show(ShownComparison(now.entries))).entries)
    watch.finish(done)
    return done
