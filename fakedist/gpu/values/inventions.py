"""Values that the script reads and no kernel computed: made up once, seeded, counted, told."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PASSES_ON = {"__torch_dispatch__", "__torch_function__"}


class Inventions:
    """Makes up values, and keeps the count by operation and line of the script.

    Args:
        seed: Of the values.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: dict[tuple[str, str, int], list[int]] = {}

    def fill(self, host: torch.Tensor, missing: torch.Tensor, operation: str, *, non_negative: bool = False) -> None:
        """Make up the missing elements of a host tensor: floats normal, integers 0, bools a coin."""
        count = int(missing.sum())
        self.count(operation, count)
        if host.dtype == torch.bool:
            drawn = torch.randint(0, 2, (count,), generator=self._generator).bool()
        elif host.is_floating_point() or host.dtype.is_complex:
            real = torch.randn(count, generator=self._generator)
            drawn = (real.abs() if non_negative else real).to(host.dtype)
        else:
            drawn = torch.zeros(count, dtype=host.dtype)
        host[missing] = drawn

    def count(self, operation: str, num_values: int) -> None:
        """Write down that values were made up for the script's current line."""
        filename, line = script_line()
        entry = self._counts.setdefault((operation, filename, line), [0, 0])
        entry[0] += 1
        entry[1] += num_values

    def take(self) -> list[tuple[str, str, int, int, int]]:
        """Rows (operation, filename, line, calls, values) since the last call."""
        rows = [(*key, calls, values) for key, (calls, values) in self._counts.items()]
        self._counts = {}
        return rows


def script_line() -> tuple[str, int]:
    """File and line of the innermost frame outside of torch and this package; nothing in autograd's own threads.

    A script's own dispatch modes (a counter of FLOPs) pass operations on: they are not the line that asked.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_OURS, _TORCH, "<")) and frame.f_code.co_name not in _PASSES_ON:
            return filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
