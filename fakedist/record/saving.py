"""Detects the checkpoints that the script saves."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fakedist.patch import patched, present

#: Modules and their functions that write a checkpoint. A nested call among them is part of the same checkpoint.
_SAVE = (
    ("torch", ("save",)),
    ("torch.distributed.checkpoint", ("save", "async_save", "save_state_dict")),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save", "save_state_dict")),
    ("safetensors.torch", ("save_file", "save_model")),
)


@contextmanager
def saves(saved: Callable[[], None]) -> Iterator[None]:
    """Call ``saved`` whenever a checkpoint has been written. What it raises propagates into the script.

    This imports the modules to patch, so that a script that imports a function from one gets the patched function.

    Raises:
        RecordingError: This version of torch saves in another way.
    """
    depth = 0

    def watch(original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def save(*args: object, **kwargs: object) -> object:
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
