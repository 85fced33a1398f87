"""TrainingRun, and where a run stands. They live in :mod:`hivenb.run`; this import path stays."""

from hivenb.run.status import RunState, RunStatus
from hivenb.run.training import TrainingRun

__all__ = ["RunState", "RunStatus", "TrainingRun"]
