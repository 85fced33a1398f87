"""What the parts of a strategy know of the training that they are of."""

from __future__ import annotations

from typing import Any, Protocol

import hivemind

from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.options.options import Options


class Trains(Protocol):
    """A strategy, as its parts see it: what may be another one at each batch."""

    options: Options

    @property
    def dht(self) -> hivemind.DHT:
        """The DHT of the swarm."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Hivemind's optimizer, or the successor that it has handed over to; ``None`` before the first ``fit``."""

    @property
    def lightning_module(self) -> Any:
        """The module that is trained."""

    @property
    def precision_plugin(self) -> Any:
        """The Trainer's, for its precision."""

    def notify(self, mark: str, text: str) -> None:
        """Say something that whoever trains should know, on the training thread.

        :param mark: a few words
        :param text: all of it
        """
