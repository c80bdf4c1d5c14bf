"""``print(tensor)`` on the virtual GPU: torch prints below its dispatch modes, where no value can be made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fakedist.errors import RecordingError
from fakedist.gpu.values.engine import ValueEngine


@contextmanager
def printed_values(engine: ValueEngine) -> Iterator[None]:
    """Print device tensors with the engine's values; those too large to have any as ``tensor(..., device=...)``.

    Raises:
        RecordingError: This torch prints otherwise.
    """
    import torch._tensor_str as printer

    original = getattr(printer, "_str", None)
    contents = getattr(printer, "_tensor_str", None)
    if original is None or contents is None:
        raise RecordingError(f"torch {torch.__version__} has no torch._tensor_str._str", "pip install torch==2.15.0")

    def _str(self: torch.Tensor, *, tensor_contents: Any = None) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.is_cuda and tensor_contents is None:
            host = engine.on_host(self)
            tensor_contents = "..." if host is None else contents(host, len("tensor("))
        return original(self, tensor_contents=tensor_contents)

    setattr(printer, "_str", _str)  # noqa: B010 (mypy knows the module's own function)
    try:
        yield
    finally:
        setattr(printer, "_str", original)  # noqa: B010
