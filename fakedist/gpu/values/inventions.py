"""Values that the script reads and no kernel computed: made up once, seeded, counted, told."""

from __future__ import annotations

import torch
from torch import randn, zeros

from fakedist.errors import InventedValueError
from fakedist.frames import script_frame


class Inventions:
    """Makes up values, and keeps the count by operation and line of the script.

    Args:
        seed: Of the values.
        strict: Whether to raise instead, at the first.
    """

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self._strict = strict
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: dict[tuple[str, str, int], list[int]] = {}

    def fill(self, host: torch.Tensor, missing: torch.Tensor, operation: str, *, non_negative: bool = False) -> None:
        """Make up the missing elements of a host tensor: floats normal, integers 0, bools a coin."""
        count = int(missing.sum())
        self.count(operation, count)
        host[missing] = _drawn(host.dtype, count, self._generator, non_negative=non_negative)

    def element(self, tensor: torch.Tensor, operation: str, *, non_negative: bool = False) -> torch.Tensor:
        """One element of a large tensor, on the host: no memory keeps it, so its address decides, each time alike."""
        self.count(operation, 1)
        return _drawn(tensor.dtype, 1, self._of(tensor), non_negative=non_negative).view(tensor.shape)

    def draw(self, host: torch.Tensor, source: torch.Tensor, operation: str, *, non_negative: bool = False) -> None:
        """Make up all of a host tensor that is a copy of a large one; as with an element, each time alike."""
        self.count(operation, host.numel())
        host.copy_(_drawn(host.dtype, host.numel(), self._of(source), non_negative=non_negative).view(host.shape))

    def _of(self, tensor: torch.Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed ^ tensor.data_ptr())

    def count(self, operation: str, num_values: int) -> None:
        """Write down that values were made up for the script's current line.

        Raises:
            InventedValueError: Nothing may be made up.
        """
        filename, line = script_line()
        if self._strict and num_values:
            where = f"{filename}:{line}" if filename else "a backward"
            raise InventedValueError(
                f"{operation} in {where} needs {num_values:,} {'value' if num_values == 1 else 'values'} that no kernel"
                " computed on the virtual GPU",
                "--values small makes such values up and counts them in the report",
            )
        entry = self._counts.setdefault((operation, filename, line), [0, 0])
        entry[0] += 1
        entry[1] += num_values

    def take(self) -> list[tuple[str, str, int, int, int]]:
        """Rows (operation, filename, line, calls, values) since the last call."""
        counts, self._counts = self._counts, {}
        return [(*key, calls, values) for key, (calls, values) in counts.items()]


def script_line() -> tuple[str, int]:
    """File and line of the innermost frame outside of torch and this package; nothing in autograd's own threads."""
    frame = script_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _drawn(dtype: torch.dtype, count: int, generator: torch.Generator, *, non_negative: bool) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        real = randn(count, generator=generator)
        return (real.abs() if non_negative else real).to(dtype)
    return zeros(count, dtype=dtype)
