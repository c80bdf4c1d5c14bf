"""Cases of PyTorch's tests: each is a function of a rank, which asserts what PyTorch's test asserts.

If PyTorch's test gives each rank different numbers, the case gives all ranks the same ones, so what it asserts is true
in a real job too. If it looks at what only another rank holds, the case states that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Rank:
    """The rank that runs.

    Attributes:
        rank: Its number.
        size: Ranks in the job.
        device: Where tensors are.
    """

    rank: int
    size: int
    device: torch.device

    def full(self, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape or (3,), float(value), device=self.device)

    def mesh(self, shape: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape or (self.size,), mesh_dim_names=names or None)


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: Its name here.
        subject: The file it is in.
        source: PyTorch's file and test.
        asserts: What it asserts, in words.
        adapted: How it differs from PyTorch's; empty where it does not.
        why: Why it does not pass here; empty where it should.
        run: The case.
    """

    name: str
    subject: str
    source: str
    asserts: str
    adapted: str
    why: str
    run: Callable[[Rank], None] = field(compare=False)


CASES: list[Case] = []
Function = Callable[[Rank], None]


def case(source: str, asserts: str, adapted: str = "", why: str = "") -> Callable[[Function], Function]:
    """A case of PyTorch's ``test/distributed/`` + source, or ``test/`` + source if it needs no other rank."""

    def note(function: Function) -> Function:
        subject = function.__module__.rpartition(".")[2]
        CASES.append(Case(function.__name__, subject, source, asserts, adapted, why, function))
        return function

    return note


def raises(call: Callable[[], Any], *words: str) -> None:
    """Assert that a call fails, with one of these words in what it says."""
    found: Exception | None = None
    try:
        call()
    except Exception as error:
        found = error
    assert found is not None, "nothing was raised"
    assert not words or any(word in str(found) for word in words), f"{type(found).__name__}: {found}"


def same(found: torch.Tensor, wanted: torch.Tensor | float) -> None:
    wanted = wanted if isinstance(wanted, torch.Tensor) else torch.full_like(found, wanted)
    torch.testing.assert_close(found.detach().cpu(), wanted.detach().cpu(), rtol=1e-4, atol=1e-5)
