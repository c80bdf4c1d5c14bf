"""Random numbers on the host in the place of a device's, drawn where the device's generator stands.

A CUDA generator is a seed and an offset that each kernel moves on. Both are real on the virtual GPU, so a generator of
the host seeded from the two gives the same numbers again wherever a real GPU would: after ``manual_seed``, after
``set_rng_state``, in a checkpointed region that runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Place = tuple[int, int]


class Randoms:
    """Gives operations their random numbers.

    Args:
        seed: Of devices that the script does not seed itself, where a real run differs from run to run.
    """

    def __init__(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)
        self._generators = threading.local()
        self._default = threading.Lock()

    def place(self, device: torch.device, generator: torch.Generator | None) -> _Place:
        """Seed and offset of the generator that an operation on ``device`` draws from."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError:  # a stream that captures a graph does not tell
            return generator.initial_seed(), 0

    def generator(self, place: _Place) -> torch.Generator:
        """A host generator at that place; each thread has one."""
        found: torch.Generator | None = getattr(self._generators, "own", None)
        if found is None:
            found = self._generators.own = torch.Generator()
        return found.manual_seed(_mixed(place))

    @contextmanager
    def as_default(self, place: _Place) -> Iterator[None]:
        """For operations that take no generator: the host's own is there, and as it was afterwards."""
        default: Any = torch.default_generator
        with self._default:
            before = default.get_state()
            default.manual_seed(_mixed(place))
            try:
                yield
            finally:
                default.set_state(before)

    def advance(self, device: torch.device, generator: torch.Generator | None) -> None:
        """An operation that ran on the host alone has drawn; four is the least that a kernel moves on."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        generator.set_offset(generator.get_offset() + 4)


def _default_generator(device: torch.device) -> torch.Generator:
    """The device's own; Python has it once ``torch.cuda`` is initialised, which C++ can do without."""
    if not torch.cuda.default_generators:
        torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


def _mixed(place: _Place) -> int:
    """One seed of two numbers; splitmix64's finisher, so that neighbours are not alike."""
    seed, offset = place
    mixed = (seed ^ (offset * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF
