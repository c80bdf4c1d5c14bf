"""Parts of the virtual GPU for the stand-ins of DeepEP and HybridEP: memory outside the allocator, and routes."""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

import numpy as np
import torch
from torch import empty

from fakedist.extras.experts.deep_ep_sizes import NODE, Layout
from fakedist.world.process_group import RankGroup
from fakedist.world.reroute import Device


def layout_of(device: Device, indices: torch.Tensor, num_experts: int, group: RankGroup, node: int = NODE) -> Layout:
    """Where a group's tokens go, of which this rank's have these experts. ``node``: ranks that share NVLink."""
    experts = device.routes(indices, num_experts).numpy().astype(np.int64, copy=False)
    others = device.experts_of_ranks
    theirs = None if others is None else others(torch.from_numpy(experts), group.ranks)
    every = None if theirs is None else [each.numpy() for each in theirs]
    return Layout(experts, num_experts, group.rank(), group.size(), every, node=node)


class OutsideMemory:
    """Memory that a buffer takes outside the caching allocator; freed with it."""

    def __init__(self, device: Device, library: str) -> None:
        self._device, self._library = device, library
        self._addresses: list[int] = []
        self.free = finalize(self, _free, device.free, self._addresses)
        self.free.atexit = False  # the driver is gone by then

    def take(self, owner: str, num_bytes: int) -> int:
        """Take memory and return its address. OutOfMemoryError if the GPU has no more."""
        if not (address := self._device.take(owner, num_bytes)):
            raise torch.OutOfMemoryError(f"{self._library}: CUDA out of memory: tried to allocate {num_bytes} bytes")
        self._addresses.append(address)
        return address


def _free(free: Callable[[int], None], addresses: list[int]) -> None:
    for address in addresses:
        free(address)


def tensor_at(address: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor of memory outside the caching allocator."""
    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return empty(0, dtype=dtype, device=device).set_(storage)
