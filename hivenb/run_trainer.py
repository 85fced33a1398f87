"""What a run's Trainer is created with. It lives in :mod:`hivenb.run.trainer`; this import path stays."""

from hivenb.run.trainer import TRAINER_DEFAULTS

__all__ = ["TRAINER_DEFAULTS"]
