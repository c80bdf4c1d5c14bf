"""``print(tensor)`` on the virtual GPU: torch prints below its dispatch modes, where no values can be made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fakedist.gpu.values.engine import ValueEngine
from fakedist.patch import patched, present


@contextmanager
def printed_values(engine: ValueEngine) -> Iterator[None]:
    """Print device tensors with the engine's values. Those too large to hold any print as ``tensor(..., device=...)``.

    Raises:
        RecordingError: This torch prints in another way.
    """
    import torch._tensor_str as printer

    original, contents = present(printer, "_str"), present(printer, "_tensor_str")

    def _str(self: torch.Tensor, *, tensor_contents: Any = None) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.is_cuda and tensor_contents is None:
            host = engine.on_host(self)
            tensor_contents = "..." if host is None else contents(host, len("tensor("))
        return original(self, tensor_contents=tensor_contents)

    with patched(printer, "_str", _str):
        yield
