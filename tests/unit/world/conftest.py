"""Being one rank of a job whose other ranks do not exist."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakedist.options import Job
from fakedist.rundir.rows import NO_TERMS, CallTerms
from fakedist.world.reroute import fake_world


class Notes:
    def __init__(self) -> None:
        self.groups: list[tuple[str, str, list[int], int, str]] = []
        self.other_groups: list[list[int]] = []
        self.bound: list[int] = []
        self.calls: list[tuple[str, int, int, int, tuple[bool, int]]] = []
        self.exchanged: list[tuple[int, int]] = []
        self.terms: list[CallTerms] = []
        self.waits: list[list[int]] = []

    def add_other_group(self, description: str, ranks: Sequence[int]) -> None:
        del description
        self.other_groups.append(list(ranks))

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        self.groups.append((name, description, list(ranks), group_rank, backend))
        return len(self.groups) - 1

    def bind(self, group: int) -> None:
        self.bound.append(group)

    def write(
        self,
        operation: str,
        group: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        is_async: bool = False,
        peer: int = -1,
        exchanged: tuple[int, int] = (0, 0),
        terms: CallTerms = NO_TERMS,
    ) -> int:
        given, got = (sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, outputs))
        self.calls.append((operation, group, given, got, (is_async, peer)))
        self.exchanged.append(exchanged)
        self.terms.append(terms)
        return len(self.calls) - 1

    def awaited(self, calls: Sequence[int], device: torch.device | None) -> None:
        del device
        self.waits.append(list(calls))


Enter = Callable[..., Notes]


@pytest.fixture
def enter_world() -> Iterator[Enter]:
    """Call it to be a rank with its default group; the world ends with the test."""
    with ExitStack() as stack:

        def enter(world_size: int = 8, rank: int = 0, backend: str | None = "gloo", **job: Any) -> Notes:
            notes = Notes()
            stack.enter_context(fake_world(Job(world_size=world_size, rank=rank, target="x", **job), notes))
            dist.init_process_group(backend)
            return notes

        yield enter
