"""Where tests of a GPU train; with ``HIVENB_GPU_TESTS_ON=cpu`` in the environment, on a CPU, to try them themselves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else os.environ.get("HIVENB_GPU_TESTS_ON", "")
IS_CUDA = DEVICE == "cuda"

#: Marks of such a test.
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not DEVICE, reason="needs a CUDA device"),
]

#: Of a Trainer there.
THERE: dict[str, Any] = {"accelerator": "gpu" if IS_CUDA else "cpu"}
