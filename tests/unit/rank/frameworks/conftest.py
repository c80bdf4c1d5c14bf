"""Being one rank of a job whose other ranks do not exist, with the adapters of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from fakedist.options import Job
from fakedist.rank.frameworks.adapting import adapted_frameworks
from fakedist.world.reroute import fake_world

Enter = Callable[..., None]


@pytest.fixture
def enter_world() -> Iterator[Enter]:
    """Call it to be a rank with its default group; the world ends with the test."""
    with ExitStack() as stack:

        def enter(world_size: int, rank: int) -> None:
            stack.enter_context(fake_world(Job(world_size=world_size, rank=rank, target="x")))
            stack.enter_context(adapted_frameworks())
            dist.init_process_group("gloo")

        yield enter
