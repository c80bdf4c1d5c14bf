"""Stands for causal-conv1d's extension of this name, whose wheels need a compiler: kernels that move the same tensors.

A convolution over four tokens reads its inputs once and writes its results once, as torch's SiLU does. Results are
those of SiLU alone: nothing here is to be trained.
"""

from __future__ import annotations

import torch


def causal_conv1d_fwd(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sequences: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    results: torch.Tensor,
    final_states: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Write ``results`` of ``inputs``, both of shape (batch, channels, tokens)."""
    torch.ops.aten.silu.out(inputs, out=results)


def causal_conv1d_bwd(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad_results: torch.Tensor,
    sequences: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    grad_final_states: torch.Tensor | None,
    grad_inputs: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor | None,
    grad_initial_states: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Write ``grad_inputs`` of ``inputs`` and ``grad_results``, all of shape (batch, channels, tokens)."""
    torch.ops.aten.silu_backward.grad_input(grad_results, inputs, grad_input=grad_inputs)


def causal_conv1d_update(*arguments: object) -> None:
    """Only inference asks for it.

    Raises:
        NotImplementedError: Always.
    """
    raise RuntimeError("causal_conv1d_cuda of tests/truth has the kernels of training alone")
