"""Routers whose kernels the dispatcher does not see: which share of the mask they write is true."""

from __future__ import annotations

import sys
from types import FrameType

import torch

_MODULE = "transformer_engine.pytorch.router"
_DEPTH = 32


def routed_share(mask: torch.Tensor) -> float | None:
    """Experts per token as a share of all experts, if Transformer Engine's fused router is about to write the mask.

    Its autograd functions have the number in a local variable, next to the logits, which are as large as the mask.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name == "forward":
            top_k, logits = frame.f_locals.get("topk"), frame.f_locals.get("logits")
            if isinstance(top_k, int) and isinstance(logits, torch.Tensor) and logits.numel() == mask.numel():
                return top_k / logits.shape[-1]
        frame = frame.f_back
    return None
