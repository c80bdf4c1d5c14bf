"""One job of the accuracy set, for a thousand steps: ``python tests/gpu/many_steps.py JOB``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakedist.extras.confirm.jobs import JOBS, training

if __name__ == "__main__":
    training.STEPS = 1_000
    JOBS[sys.argv[1]].run()
