"""The model of a run that is paused: what somebody changes in it goes on, or is an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hivenb.errors import TrainingError
from hivenb.strategy.reused_model import Prints, changed_structure, edited_since, not_trained, prints_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hivenb.strategy.strategy import HivemindStrategy


class PausedModel:
    """What a model is when training comes to wait, to see what has become of it when that goes on.

    :param model: of the run
    :param strategy: that trains it
    """

    def __init__(self, model: nn.Module, strategy: HivemindStrategy):
        self._model, self._strategy = model, strategy
        self._not_trained = not_trained(model, self._trained())
        self._prints: Prints = {}
        #: names of the parameters that somebody has changed
        self.edited: frozenset[str] = frozenset()

    def hand_out(self) -> None:
        """Note what the model holds; on the training thread, as all but the next."""
        self._prints = prints_of(self._model)

    def require_same_structure(self) -> None:
        """See whether the optimizer can go on with it; from any thread.

        :raises TrainingError: if there are parameters that it does not have
        """
        change = changed_structure(self._model, self._trained(), self._not_trained)
        if change is not None:
            raise TrainingError(
                f"{change}, and an optimizer that is at work does not take that over: call run.stop() and run.start(). "
                "The optimizer then begins anew for what is new, and keeps its state for all else"
            )

    def take_back(self, *, trains_on: bool) -> None:
        """Go on with what somebody has changed.

        :param trains_on: whether a batch follows
        """
        edited = edited_since(self._prints, self._model)
        self.edited |= frozenset(edited)
        self._strategy.take_up(sorted(self.edited) if trains_on else edited, trains_on=trains_on)

    def _trained(self) -> Iterable[Tensor]:
        optimizer = self._strategy.optimizer
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
