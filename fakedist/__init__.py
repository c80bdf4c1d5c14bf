"""fakedist: profile one rank of a thousand-GPU PyTorch job on the one GPU you have, or on none.

The command line is the main door (``fakedist profile --help``). A training script needs nothing from here; one whose
steps cannot be seen from outside (a loop without an optimizer) may call :func:`step`, and :func:`phase` names its
parts. From a test or a notebook, :func:`profile` runs a rank in a child process and returns its :class:`Run`;
:func:`open` reads an existing one, and :func:`time_job` prices runs of several ranks together. :func:`open_sweep` reads
the directory of a sweep.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fakedist._version import __version__
from fakedist.errors import (
    CheckError,
    FakedistError,
    InventedValueError,
    JobError,
    RecordingError,
    ReportError,
    RunDirectoryError,
    ScriptError,
    SetupError,
    SweepError,
    WorldError,
)

if TYPE_CHECKING:
    from fakedist.api import profile
    from fakedist.results.job_time import JobTime, time_job
    from fakedist.results.opening import open_run as open  # noqa: A004
    from fakedist.results.run import Run
    from fakedist.sweep.sweep_directory import Sweep, open_sweep

__all__ = [
    "CheckError",
    "FakedistError",
    "InventedValueError",
    "JobError",
    "JobTime",
    "RecordingError",
    "ReportError",
    "Run",
    "RunDirectoryError",
    "ScriptError",
    "SetupError",
    "Sweep",
    "SweepError",
    "WorldError",
    "__version__",
    "open",
    "open_sweep",
    "phase",
    "profile",
    "step",
    "time_job",
]

#: Loaded when they are asked for: a training script that imports fakedist pays for nothing.
_LOADED_LATER = {
    "profile": ("fakedist.api", "profile"),
    "Run": ("fakedist.results.run", "Run"),
    "JobTime": ("fakedist.results.job_time", "JobTime"),
    "time_job": ("fakedist.results.job_time", "time_job"),
    "open": ("fakedist.results.opening", "open_run"),
    "Sweep": ("fakedist.sweep.sweep_directory", "Sweep"),
    "open_sweep": ("fakedist.sweep.sweep_directory", "open_sweep"),
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module 'fakedist' has no attribute {name!r}")
    module, attribute = _LOADED_LATER[name]
    return getattr(importlib.import_module(module), attribute)


def step(shape: Sequence[int] = (), *, name: str = "") -> None:
    """Say that a training step ends here; does nothing when the script does not run under ``fakedist profile``.

    Needed only where the script has no ``optimizer.step()``, or where the inputs of its first model do not show the
    ``shape`` of a sample, whose elements ``fakedist play --steps`` takes for the step's length, or where it is another
    phase, such as ``name="rollout"``. Once called, steps are counted by these calls alone.
    """
    recorder = sys.modules.get("fakedist.record.recorder")
    if recorder is not None and (active := recorder.active()) is not None:
        active.step(shape, name)


def phase(name: str) -> AbstractContextManager[None]:
    """Name what runs in this ``with`` block in the report: its peaks, and what is in use of the GPU at its end.

    ``with fakedist.phase("rollout"): ...`` does nothing when the script does not run under ``fakedist profile``.
    Blocks may be nested, and a name may come again.
    """
    recorder = sys.modules.get("fakedist.record.recorder")
    active = None if recorder is None else recorder.active()
    return nullcontext() if active is None else active.phase(name)
