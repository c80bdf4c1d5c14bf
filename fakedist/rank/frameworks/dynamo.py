"""Dynamo: keeps ``torch.compile`` out of fakedist's code, so that our groups and works are like C++ ones.

A call on a C++ group breaks the graph and runs uncompiled. Dynamo would trace into a Python group, with every tape and
value behind it. Two things keep it out, at no cost per call: Dynamo's list of files to skip, and a mark on each of our
functions, without which it compiles a frame of ours that starts between two graphs of the script. Nothing below our
functions is compiled, except where they run the script's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import torch

from fakedist.patch import present

_PACKAGE = Path(__file__).parents[2]
#: Packages that a script calls. The recorder's is not one of them: its global hooks are hidden from Dynamo, but Dynamo
#: looks into the call of a module with ``module.compile()``, to see that it does nothing in a graph.
_CALLED = ("world", "rank/frameworks", "gpu")
#: Modules whose functions run the script's own: backwards, modules that it compiled, operations of tensor subclasses.
_RUN_THE_SCRIPTS = tuple(
    f"{_PACKAGE.name}.{name}"
    for name in (
        *("record.dispatch", "record.hooks", "record.unseen", "record.compiled_graphs"),
        "gpu.demand.extension_demand",
    )
)


def nothing_of_ours(module: ModuleType) -> dict[str, object]:
    """For ``torch._dynamo.trace_rules``: skip our files."""
    _mark_frames()
    ours = {str(path) for room in _CALLED for path in (_PACKAGE / room).rglob("*.py")}
    return {"FORCE_SKIP_FILES": {*present(module, "FORCE_SKIP_FILES"), *ours}}


def _mark_frames() -> None:
    """Run our functions' frames, and all that they call, uncompiled, unless they run the script's own code."""
    dynamo = torch._C._dynamo.eval_frame
    action = dynamo._FrameAction
    for code, name in codes_of_ours():
        below = action.DEFAULT if name in _RUN_THE_SCRIPTS else action.SKIP
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, below))


def codes_of_ours() -> Iterator[tuple[CodeType, str]]:
    """The code of each of our imported functions, with its module's name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE.name}."):
            for value in list(vars(module).values()):
                for code in _codes(value, name):
                    yield code, name


def _codes(value: object, module: str) -> Iterator[CodeType]:
    value = getattr(value, "__wrapped__", value)  # functools.cache
    if isinstance(value, type) and value.__module__ == module:
        for member in vars(value).values():
            if isinstance(member, property):
                yield from _codes(member.fget, module)
                yield from _codes(member.fset, module)
            else:
                yield from _codes(getattr(member, "__func__", member), module)
    elif isinstance(value, FunctionType) and value.__module__ == module:
        yield from _nested(value.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
