"""SwarmStatsMonitor. It lives in :mod:`hivenb.strategy.swarm_stats_monitor`; this import path stays."""

from hivenb.strategy.swarm_stats_monitor import SwarmStatsMonitor

__all__ = ["SwarmStatsMonitor"]
