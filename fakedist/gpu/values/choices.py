"""Indices that an operation picks by values that no kernel computed, and masks of them: each index equally often.

A router sends each token to the experts that ``topk`` of its logits picks. If the logits hold no values, each row picks
the indices after those of the row before it. All experts then get the same number of tokens, as a trained router's
experts do on average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import arange, zeros

from fakedist.gpu.values.kinds import Kind

CHOOSING = {"topk", "argmax", "argmin", "sort", "argsort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}


def choose(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], indices: torch.Tensor) -> torch.Tensor:
    """Return an operation's index result as a host tensor. Indices are distinct along the dimension picked from."""
    source: torch.Tensor = args[0]
    dim: int | None = kind.argument("dim", args, kwargs)
    if dim is None or not source.dim():
        return zeros(indices.shape, dtype=torch.int64)
    num_choices: int = source.shape[dim]
    keeps_dim = indices.dim() == source.dim()
    picked = indices.shape[dim] if keeps_dim else 1
    if picked == num_choices:  # a sort: every index once
        order = arange(picked).view([-1 if axis == dim % source.dim() else 1 for axis in range(source.dim())])
        return order.expand(indices.shape)
    flat = arange(indices.numel()) % max(1, num_choices)
    if not keeps_dim:
        return flat.view(indices.shape)
    rows_first = [size for axis, size in enumerate(indices.shape) if axis != dim % source.dim()]
    return flat.view([*rows_first, picked]).movedim(-1, dim)


def spread(shape: torch.Size, share: float) -> torch.Tensor:
    """Return a host mask of which ``share`` is true: as many in every row, each row's after those of the previous."""
    columns = shape[-1]
    rows = arange(shape.numel() // columns)
    ends = torch.round((rows + 1) * share * columns).long()
    begins = torch.round(rows * share * columns).long()
    places = (arange(columns) - begins[:, None]) % columns
    return (places < (ends - begins)[:, None]).view(shape)
