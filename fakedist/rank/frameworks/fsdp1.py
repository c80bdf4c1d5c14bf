"""FSDP1's flat parameters: which elements of this rank's shard are of which module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def parts_of(flat: Tensor) -> Iterator[tuple[nn.Module, int, int]]:
    """A module, its first element and how many it has, for each parameter in a flat one; nothing for any other."""
    infos, shards = getattr(flat, "_param_infos", ()), getattr(flat, "_shard_param_infos", ())
    for info, shard in zip(infos, shards, strict=False):
        if shard.in_shard:
            yield info.module, shard.offset_in_shard, shard.numel_in_shard
