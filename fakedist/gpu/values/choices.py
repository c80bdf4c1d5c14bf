"""Indices that an operation picks by values that no kernel computed, and masks of them: each index equally often.

A router sends each token to the experts that ``topk`` of its logits picks. If the logits hold no values, each row picks
the indices after those of the row before it. All experts then get the same number of tokens, as a trained router's
experts do on average.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType

import torch
from torch import arange, zeros

from fakedist.gpu.values.arguments import Arguments, Keywords, tensor_at
from fakedist.gpu.values.operators import Operator

#: Operators that return indices.
CHOOSING = {"topk", "argmax", "argmin", "sort", "argsort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}
#: Its kernels write a router's mask, and the dispatcher does not see them.
_FUSED_ROUTER = "transformer_engine.pytorch.router"
_MAX_FRAMES = 32


def choose(operator: Operator, args: Arguments, kwargs: Keywords, indices: torch.Tensor) -> torch.Tensor:
    """Return an operation's index result as a host tensor. Indices are distinct along the dimension picked from.

    Do not write to it.
    """
    source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
    if not isinstance(dim, int) or not source.dim():
        return zeros(indices.shape, dtype=torch.int64)
    return _evenly(source.shape, dim, indices.shape)


@functools.lru_cache(maxsize=8)  # a router makes the same choice and the same mask for each layer and microbatch
def _evenly(source: torch.Size, dim: int, wanted: torch.Size) -> torch.Tensor:
    num_choices = source[dim]
    keeps_dim = len(wanted) == len(source)
    picked = wanted[dim] if keeps_dim else 1
    if picked == num_choices:  # a sort: every index once
        order = arange(picked).view([-1 if axis == dim % len(source) else 1 for axis in range(len(source))])
        return order.expand(wanted)
    flat = arange(wanted.numel()) % max(1, num_choices)
    if not keeps_dim:
        return flat.view(wanted)
    rows_first = [size for axis, size in enumerate(wanted) if axis != dim % len(source)]
    return flat.view([*rows_first, picked]).movedim(-1, dim)


@functools.lru_cache(maxsize=8)
def spread(shape: torch.Size, share: float) -> torch.Tensor:
    """Return a host mask of which ``share`` is true: as many in every row, each row's after those of the previous.

    Do not write to it.
    """
    columns = shape[-1]
    rows = arange(shape.numel() // columns)
    ends = torch.round((rows + 1) * share * columns).long()
    begins = torch.round(rows * share * columns).long()
    places = (arange(columns) - begins[:, None]) % columns
    return (places < (ends - begins)[:, None]).view(shape)


def routed_share(mask: torch.Tensor) -> float | None:
    """Experts per token as a share of all experts, if Transformer Engine's fused router is about to write the mask.

    Its autograd functions have the number in a local variable, next to the logits, which are as large as the mask.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _FUSED_ROUTER and frame.f_code.co_name == "forward":
            top_k, logits = frame.f_locals.get("topk"), frame.f_locals.get("logits")
            if isinstance(top_k, int) and isinstance(logits, torch.Tensor) and logits.numel() == mask.numel():
                return top_k / logits.shape[-1]
        frame = frame.f_back
    return None
