"""Stands for apex's extension of this name, which megatron-core imports: a softmax in 16 bits with a mask.

Transformer Engine has taken apex's kernels over: forward allocates the result, backward writes over its gradients.
"""

from __future__ import annotations

import torch
import transformer_engine_torch as kernels


def forward(inputs: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The softmax of scaled scores, shape (batch, heads, queries, keys), over the keys that ``mask`` leaves."""
    results: torch.Tensor = kernels.scaled_masked_softmax_forward(inputs, mask, scale.item())
    return results


def backward(gradients: torch.Tensor, results: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradients of the scores, in the memory of ``gradients``."""
    written: torch.Tensor = kernels.scaled_masked_softmax_backward(gradients.contiguous(), results, scale.item())
    return written


def get_batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
    """Rows that one block of 128 threads takes: apex's rule, by the keys alone."""
    padded = 1 << (keys - 1).bit_length()
    return 128 // min(padded, 32) * (2 if padded <= 128 else 1)
