"""Stands for apex's extension of this name, which megatron-core imports: a causal softmax in 16 bits.

Transformer Engine has taken apex's kernels over: forward allocates the result, backward writes over its gradients.
"""

from __future__ import annotations

import torch
import transformer_engine_torch as kernels


def forward(inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The softmax of scaled scores, shape (batch x heads, queries, keys), over keys up to the query's own."""
    results: torch.Tensor = kernels.scaled_upper_triang_masked_softmax_forward(inputs, scale.item())
    return results


def backward(gradients: torch.Tensor, results: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradients of the scores, in the memory of ``gradients``."""
    written: torch.Tensor = kernels.scaled_upper_triang_masked_softmax_backward(
        gradients.contiguous(), results, scale.item()
    )
    return written
