"""Random numbers drawn on the host instead of the device, at the position of the device's generator.

A CUDA generator is a seed and an offset that each kernel advances. Both are real on the virtual GPU, so a host
generator seeded from the two repeats its numbers wherever a real GPU would: after ``manual_seed``, after
``set_rng_state``, in a checkpointed region that runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: The state of a CUDA generator.
SeedAndOffset = tuple[int, int]


class Randoms:
    """Supplies operations with random numbers.

    Args:
        seed: Seed of devices that the script does not seed. There, real runs differ from one another.
    """

    def __init__(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)
        self._generators = threading.local()
        self._default = threading.Lock()

    def seed_and_offset(self, device: torch.device, generator: torch.Generator | None) -> SeedAndOffset:
        """Seed and offset of the generator that an operation on ``device`` draws from."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError:  # unavailable while the stream captures a graph
            return generator.initial_seed(), 0

    def generator(self, state: SeedAndOffset) -> torch.Generator:
        """Return a host generator for that seed and offset. Each thread has one."""
        found: torch.Generator | None = getattr(self._generators, "own", None)
        if found is None:
            found = self._generators.own = torch.Generator()
        return found.manual_seed(_mixed(state))

    @contextmanager
    def as_default(self, state: SeedAndOffset) -> Iterator[None]:
        """For operations without a generator argument: seed the host's default generator, and restore it afterwards."""
        default = torch.default_generator
        with self._default:
            before = default.get_state()
            default.manual_seed(_mixed(state))
            try:
                yield
            finally:
                default.set_state(before)

    def advance(self, device: torch.device, generator: torch.Generator | None) -> None:
        """Advance the generator for an operation that drew on the host alone, by four: the least that a kernel does."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        generator.set_offset(generator.get_offset() + 4)


def _default_generator(device: torch.device) -> torch.Generator:
    """The device's own generator. Python has it once ``torch.cuda`` is initialised, which C++ does not need."""
    if not torch.cuda.default_generators:
        torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


def _mixed(state: SeedAndOffset) -> int:
    """Mix two numbers into one seed with splitmix64's finisher, so that neighbours get unrelated seeds."""
    seed, offset = state
    mixed = (seed ^ (offset * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF
