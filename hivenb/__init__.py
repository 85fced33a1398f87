"""hivenb: train one model together, from notebooks, across unreliable machines.

Public names are loaded on first use, so that ``import hivenb`` is quick and needs neither torch nor widgets.
``ARCHITECTURE.md`` beside this file is the map of all that is in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hivenb._lazy import lazy_face

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hivenb.errors import HivenbError
    from hivenb.figures.history import History
    from hivenb.options.options import Options
    from hivenb.run.training import TrainingRun
    from hivenb.strategy.strategy import HivemindStrategy
    from hivenb.strategy.swarm_stats_monitor import SwarmStatsMonitor
    from hivenb.swarm.swarm import Swarm
    from hivenb.view.comparison import compare
    from hivenb.view.dashboard import Dashboard

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

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "Dashboard": "hivenb.view.dashboard",
        "HivemindStrategy": "hivenb.strategy",
        "HivenbError": "hivenb.errors",
        "History": "hivenb.history",
        "Options": "hivenb.options",
        "Swarm": "hivenb.swarm",
        "SwarmStatsMonitor": "hivenb.swarm_stats_monitor",
        "TrainingRun": "hivenb.training",
        "compare": "hivenb.view.comparison",
    },
)
