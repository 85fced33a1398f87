"""hivenb: train one model together, from notebooks, across unreliable machines.

Public names are loaded on first use, so that ``import hivenb`` is quick and needs neither torch nor widgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hivenb.errors import HivenbError
    from hivenb.history import History
    from hivenb.options import Options
    from hivenb.strategy import HivemindStrategy
    from hivenb.swarm import Swarm
    from hivenb.swarm_stats_monitor import SwarmStatsMonitor
    from hivenb.training import TrainingRun
    from hivenb.view.comparison import compare
    from hivenb.view.dashboard import Dashboard

_HOME_OF = {
    "Dashboard": "hivenb.view.dashboard",
    "HivemindStrategy": "hivenb.strategy",
    "HivenbError": "hivenb.errors",
    "History": "hivenb.history",
    "Options": "hivenb.options",
    "Swarm": "hivenb.swarm",
    "SwarmStatsMonitor": "hivenb.swarm_stats_monitor",
    "TrainingRun": "hivenb.training",
    "compare": "hivenb.view.comparison",
}

__all__ = [
    "Dashboard",
    "History",
    "HivemindStrategy",
    "HivenbError",
    "Options",
    "Swarm",
    "SwarmStatsMonitor",
    "TrainingRun",
    "__version__",
    "compare",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hivenb' has no attribute {name!r}; public names: {', '.join(sorted(_HOME_OF))}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
