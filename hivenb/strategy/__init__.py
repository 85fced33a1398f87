"""HivemindStrategy: the seam between Lightning and hivemind's optimizer.

Not loaded on first use, as other faces are: importing this makes ``Trainer(strategy="hivemind")`` known to
Lightning. ``pytorch_lightning`` is to be imported before, for its Trainer to know that name; a strategy that is made
any Trainer takes, whatever was imported first.
"""

import hivenb.engine  # noqa: F401 - before hivemind, whose import it keeps quiet
from hivenb.strategy.schedulers import HiveMindScheduler
from hivenb.strategy.strategy import DEFAULT_HOST_MADDRS, HivemindStrategy

__all__ = ["DEFAULT_HOST_MADDRS", "HiveMindScheduler", "HivemindStrategy"]
