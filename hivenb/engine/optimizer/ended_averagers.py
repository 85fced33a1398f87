"""Whether an optimizer still has its averagers, and what has ended if it has not."""

from __future__ import annotations

from typing import Any

from hivenb.errors import ProcessEndedError


def what_has_ended(optimizer: Any) -> ProcessEndedError | None:
    """Why an optimizer can no longer average with others; ``None`` while it can.

    Training goes on without an averager: each round fails at once.

    :param optimizer: of ours
    """
    averagers = (optimizer.state_averager, optimizer.grad_averager)
    return next((one.ended for one in averagers if one is not None and one.ended is not None), None)
