"""What is to be done when a process has ended that training needs: averagers are made anew, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hivemind
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from hivenb.engine.dht.restarts import Restarting
from hivenb.engine.optimizer.ended_averagers import what_has_ended
from hivenb.engine.optimizer.handover import release, take_over
from hivenb.engine.optimizer.optimizer import Optimizer
from hivenb.engine.process.restart_count import RestartCount
from hivenb.errors import ProcessEndedError
from hivenb.options.options import Options
from hivenb.strategy.reconfiguration import engine_settings


class Recovery:
    """Lets an optimizer whose averagers have ended, by themselves or with the DHT, hand over to a successor."""

    def __init__(self) -> None:
        self._count = RestartCount()

    def successor(
        self, optimizer: Optimizer, ended: ProcessEndedError, options: Options, make: Callable[..., Optimizer]
    ) -> Optimizer:
        """The optimizer that training goes on with; to be called on the training thread, between two steps.

        :param optimizer: that cannot go on; it trained with these options
        :param ended: why it cannot
        :param make: makes an optimizer from keyword arguments
        :raises ProcessEndedError: if what has ended cannot be started anew, or has ended too often of late
        """
        handover = None
        while True:
            self._count.add(ended)
            _require(optimizer.dht, ended)  # which has ended its averagers by then
            handover = handover or release(optimizer)
            settings = engine_settings(options)
            try:
                return take_over(handover, make, offload=settings.pop("offload_optimizer"), **settings)
            except ProcessEndedError as e:
                ended = e  # it has ended once more
            except Exception as e:
                raise ProcessEndedError(f"{ended}. It could not be started anew: {str(e) or repr(e)}") from e


def _require(dht: hivemind.DHT, ended: ProcessEndedError) -> None:
    """Wait for a DHT that is started anew.

    :param ended: what has ended
    :raises ProcessEndedError: if the DHT could not be started anew, or is not one that is
    """
    if isinstance(dht, Restarting):
        dht.require()
    elif not dht.is_alive():
        raise ProcessEndedError(f"{ended}. It belongs to a DHT of plain hivemind's (dht=...), which only you can start")


class Recovers:
    """Mixin to put *before* Lightning's strategy: goes on with new averagers when those of its optimizer have ended."""

    #: called on the training thread with a few words on what whoever trains should know
    on_notice: Callable[[str], None] | None = None

    options: Options
    _optimizer: Optimizer | None
    _hooks: Any
    _make_optimizer: Callable[..., Optimizer]
    _show_to_lightning: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._recovery = Recovery()

    def notify(self, mark: str, text: str) -> None:
        """Say something that whoever trains should know, on the training thread.

        :param mark: a few words
        :param text: all of it
        """
        rank_zero_warn(text)
        if self.on_notice is not None:
            self.on_notice(mark)

    def recover(self, failure: ProcessEndedError | None = None) -> bool:
        """Start averagers anew that have ended; to be called on the training thread, between two steps.

        :param failure: of the step before, if it has failed with that. Then they are made anew also if they live: they
            may be about to end with the DHT, or an answer of theirs may be lost with that of a process that was killed
        :returns: whether any were
        :raises ProcessEndedError: if they cannot be
        """
        optimizer = self._optimizer
        if optimizer is None or self._hooks is None or (ended := what_has_ended(optimizer) or failure) is None:
            return False
        self._optimizer = self._recovery.successor(optimizer, ended, self.options, self._make_optimizer)
        self._show_to_lightning(self._optimizer, self._hooks)
        self.notify(f"{ended.title} was started anew", f"{ended}. It was started anew, and training goes on")
        return True

    def recovering(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a step; give it up if it cannot go on since a process has ended, and recover.

        :returns: what it gives; ``None`` if it was given up
        """
        try:
            return step(*args, **kwargs)
        except ProcessEndedError as e:
            if not self.recover(e):
                raise
        return None
