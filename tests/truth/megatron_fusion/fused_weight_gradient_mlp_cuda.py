"""Stands for Apex's extension of this name, which megatron-core imports: a product that adds to a gradient.

Apex calls cuBLAS for it, and so does Transformer Engine.
"""

from __future__ import annotations

import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the gradient of a weight, shape (outputs, inputs), to ``main_grad``.

    Args:
        inputs: Inputs of the layer, shape (tokens, inputs).
        grad_output: Gradients of its outputs, shape (tokens, outputs).
        main_grad: What is added to.
    """
    general_gemm(inputs, grad_output, out_dtype=main_grad.dtype, layout="NT", accumulate=True, out=main_grad)


#: The same where gradients are summed in the type of training.
wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
