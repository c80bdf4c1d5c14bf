"""Checkpoints that the script saves."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fakedist.patch import patched, present

#: Modules and their functions that write a checkpoint; what one calls of the others is a part of it.
_SAVE = (
    ("torch", ("save",)),
    ("torch.distributed.checkpoint", ("save", "async_save", "save_state_dict")),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save", "save_state_dict")),
    ("safetensors.torch", ("save_file", "save_model")),
)


@contextmanager
def saves(saved: Callable[[], None]) -> Iterator[None]:
    """Call ``saved`` whenever a checkpoint has been written; what it raises is raised there.

    Imports what would be patched: a script that takes a function out of its module has the patched one.

    Raises:
        RecordingError: This torch saves otherwise.
    """
    depth = 0

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                saved()
            return result

        return save

    with ExitStack() as stack:
        for name, functions in _SAVE:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                continue
            module = importlib.import_module(name)
            for function in functions:
                stack.enter_context(patched(module, function, watch(present(module, function))))
        yield
