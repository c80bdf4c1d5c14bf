"""Subjects that not everybody needs: each a package with its code and, in ``command.py``, its command.

The core imports no extra. :func:`parts` is where it finds them, by the name of a module that an extra may have:

=================  =====================================================================================
module             what the core takes of it
=================  =====================================================================================
``command``        ``COMMAND``: the command that the extra adds
``adapters``       ``ADAPTERS``, ``ADAPTERS_FOR_ABSENT_RANKS``: as of :mod:`fakedist.rank.frameworks.adapting`
``run_shares``     ``SHARES``: by its name, what measures a share of a run, such as of the draws that fit
``step_hooks``     ``hooked(phases, capacity)``: a context in which the rank's steps are recorded
``stand_in``       ``stand_in(device)``: a context of the faked world, which yields the notes for the end
``library_times``  ``LibraryTimes(gpu, nic_bandwidth)``: times of communication kernels that are not NCCL's
``summary_parts``  ``summarize(summary, recording, tables)``: the summary of a run with what the extra adds
``sweep_options``  ``OPTIONS``, ``with_axes``: axes that ``fakedist sweep`` finds of a script's own flags
``time_options``   ``OPTIONS``, ``HEADING``, ``report``: what ``fakedist time`` adds to the step of a run
=================  =====================================================================================
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType


@functools.cache
def parts(name: str) -> tuple[ModuleType, ...]:
    """The module of this name of each extra that has one."""
    modules = [f"{__name__}.{extra.name}.{name}" for extra in pkgutil.iter_modules(__path__)]
    return tuple(importlib.import_module(module) for module in modules if find_spec(module) is not None)


def shares() -> Mapping[str, Callable[..., float]]:
    """The functions of extras that measure a share of a run, by the share's name."""
    return {name: measure for part in parts("run_shares") for name, measure in part.SHARES.items()}
