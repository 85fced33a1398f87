"""What a run's Trainer is created with. It lives in :mod:`hivenb.run.fit`; this import path stays."""

from hivenb.run.fit import TRAINER_DEFAULTS

__all__ = ["TRAINER_DEFAULTS"]
