"""One job of the accuracy set, for a thousand steps: ``python tests/gpu/many_steps.py JOB``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakedist.extras.confirm.jobs import JOBS, dense

if __name__ == "__main__":
    dense.STEPS = 1_000
    job = JOBS[sys.argv[1]]
    function = getattr(importlib.import_module(job.module), job.function)
    function() if job.argument is None else function(job.argument)
