"""What holds for all elements of a host tensor. For each question, the kernel that answers it in one pass.

The plain ways, ``torch.isfinite(values).all()`` and ``(values >= 0).all()``, write a mask first, and reducing a mask is
slow: for half a million floats they take 20 and 10 times as long. The engine asks such questions for most operations.
"""

from __future__ import annotations

import math

import torch
from torch import broadcast_tensors


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view with each element of an expanded tensor once."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [min(size, 1) if not stride else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


def is_finite(values: torch.Tensor) -> bool:
    """Whether there is no NaN and no infinity. If there is, the sum is one too."""
    values = distinct(values)
    if values.dtype.itemsize == 1:  # eight-bit floats have no sums, and torch 2.8 asks them nothing
        values = values.float()
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())  # the sum may overflow


def has_no_negative(values: torch.Tensor) -> bool:
    """Whether every value is at least zero. NaN is not. Complex values have no order."""
    if values.is_complex():
        return False
    if not values.dtype.is_signed or not values.numel():
        return True
    values = distinct(values)
    return bool((values.float() if values.dtype.itemsize == 1 else values).min() >= 0)


def all_true(mask: torch.Tensor) -> bool:
    """Whether no element of a mask, bools or bytes, is zero."""
    return not mask.numel() or bool(mask.view(torch.uint8).min())


def any_true(mask: torch.Tensor) -> bool:
    """Whether any element of a mask, bools or bytes, is not zero."""
    return bool(mask.numel()) and bool(mask.view(torch.uint8).max())


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``masked_select`` with a bool mask. For expanded values torch's own takes two copies of the mask as int64."""
    values, mask = broadcast_tensors(values, mask)
    return values[mask]
