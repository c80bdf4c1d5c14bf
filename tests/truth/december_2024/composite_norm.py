"""RMSNorm as PyTorch computed it until 2.8: a sequence of operations, each with a gradient of its own."""

from __future__ import annotations

import torch
from torch import nn


def rms_norm(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """The operations of ``rms_norm_symint`` (aten/src/ATen/native/layer_norm.cpp of December 2024), in their order.

    Newer releases launch one kernel for all of them, and one for the gradient.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(norm.eps or torch.finfo(torch.float32).eps))
    return wide.mul(scale).mul(norm.weight).type_as(x)
