"""What a person sees of a run's present start, or its last one: what Lightning and the swarm's engine work with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning

    from hivenb.engine.progress.peer_reports import PeerInfo
    from hivenb.run.fit import Fit
    from hivenb.run.stage import Stage
    from hivenb.strategy.hivemind_strategy import HivemindStrategy


class ShowsFit:
    """Base of a run: what it trains with, which any thread may read."""

    _fit: Fit | None = None
    _stage: Stage

    @property
    def strategy(self) -> HivemindStrategy | None:
        """The strategy of the present or last start."""
        return None if self._fit is None else self._fit.strategy

    @property
    def trainer(self) -> lightning.Trainer | None:
        """The Trainer of the present or last start."""
        return None if self._fit is None else self._fit.trainer

    @property
    def is_active(self) -> bool:
        """Whether it is at work, or about to be."""
        return self._stage.state.is_active

    def peers(self) -> tuple[PeerInfo, ...]:
        """The peers of the run, as last seen while it was active."""
        return () if self._fit is None or not self.is_active else self._fit.monitor.peers

    @property
    def _optimizer(self) -> Any:
        return None if self._fit is None else self._fit.optimizer
