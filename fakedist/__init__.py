"""fakedist: profile one rank of a thousand-GPU PyTorch job on the one GPU you have, or on none.

The command line is the main door (``fakedist profile --help``). A training script needs nothing from here; one whose
steps cannot be seen from outside (a loop without an optimizer) may call :func:`step`.
"""

from __future__ import annotations

import sys

from fakedist.errors import FakedistError, JobError, RecordingError, RunDirectoryError, SetupError, WorldError

__version__ = "0.1.0"

__all__ = [
    "FakedistError",
    "JobError",
    "RecordingError",
    "RunDirectoryError",
    "SetupError",
    "WorldError",
    "__version__",
    "step",
]


def step() -> None:
    """Say that a training step ends here; does nothing when the script does not run under ``fakedist profile``.

    Needed only where the script has no ``optimizer.step()``. Once called, steps are counted by these calls alone.
    """
    recorder = sys.modules.get("fakedist.record.recorder")
    if recorder is not None and (active := recorder.active()) is not None:
        active.step()
