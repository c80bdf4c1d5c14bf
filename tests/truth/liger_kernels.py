"""The kernels of Liger-Kernel's benchmark, and what they replace: set up, then forward and backward three times.

    python liger_kernels.py KERNEL PROVIDER SIZE

Sizes and what is kept are those of benchmark/scripts of linkedin/Liger-Kernel; SIZE is the one that its table varies.
Its peak is of an iteration after the set-up, and the median of ten: of one that finds the gradients of the one before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fakedist

Run = Callable[[], None]
NAMES = {
    "kl_div": "LigerKLDivLossFunction", "jsd": "LigerJSDFunction", "tvd": "LigerTVDLossFunction",
    "layer_norm": "LigerLayerNormFunction", "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "rms_norm": "LigerRMSNormFunction", "llama4_rope": "LigerLlama4RopeFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
}  # fmt: skip


def liger(kernel: str) -> Callable[..., Any]:
    """Liger's function of a kernel."""
    apply: Callable[..., Any] = getattr(import_module(f"liger_kernel.ops.{kernel}"), NAMES[kernel]).apply
    return apply


def _jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence of logarithms of probabilities, shape (rows, words), by operations of torch."""
    student, teacher = student.float(), teacher.float()
    mean = torch.lerp(student.exp(), teacher.exp(), 0.5)
    one = 0.5 * F.kl_div(mean.log(), teacher, reduction="none", log_target=True).sum(dim=-1)
    other = 0.5 * F.kl_div(mean.log(), student, reduction="none", log_target=True).sum(dim=-1)
    return ((one + other) / student.shape[0]).sum()


def divergence(kernel: str, provider: str, words: int) -> Run:
    """Losses of two distributions, rows of ``words``."""
    rows = 8192 if kernel == "jsd" else 16384
    of_input = torch.softmax if kernel == "tvd" else torch.log_softmax
    inputs = of_input(torch.randn(rows, words, requires_grad=True, device="cuda"), dim=-1)
    of_target = torch.log_softmax if kernel == "jsd" else torch.softmax
    target = of_target(torch.randn(rows, words, device="cuda"), dim=-1)
    by_torch: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "kl_div": torch.nn.KLDivLoss(reduction="batchmean"),
        "jsd": _jsd,
        "tvd": lambda one, other: torch.sum(torch.abs(one - other) / 2.0) / one.size(0),
    }
    loss = by_torch[kernel] if provider == "torch" else liger(kernel)

    def run() -> None:
        result = loss(inputs, target)
        result.backward(retain_graph=True)

    return run


def layer_norm(kernel: str, provider: str, width: int) -> Run:
    """LayerNorm of 4,096 rows in fp32; the layers of both providers are there."""
    layers = [torch.nn.LayerNorm(width, device="cuda") for _ in range(2)]
    inputs = torch.randn(4096, width, device="cuda")
    gradient = torch.randn_like(inputs)
    inputs.requires_grad_()

    def run() -> None:
        layer = layers[0]
        result = liger(kernel)(inputs, layer.weight, layer.bias, 1e-6) if provider == "liger" else layer(inputs)
        result.backward(gradient, retain_graph=True)

    return run


def fused_add_rms_norm(kernel: str, provider: str, width: int) -> Run:
    """RMSNorm of the sum of 2,048 rows and their residuals in fp32; the layers of all providers are there."""
    weights = [torch.nn.Parameter(torch.ones(width, device="cuda")) for _ in range(4)]
    inputs, residual = (torch.randn(2048, width, device="cuda") for _ in range(2))
    gradients = [torch.randn_like(inputs) for _ in range(2)]
    inputs.requires_grad_()
    residual.requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        if provider == "liger":
            both: tuple[Tensor, Tensor] = liger(kernel)(inputs, residual, weights[0], 1e-6, 0.0, "llama", False)
            return both
        total = inputs + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weights[1] * normed, total

    def run() -> None:
        results = forward()
        torch.autograd.backward(results, gradients)

    return run


def megatron_rms_norm(kernel: str, provider: str, width: int) -> Run:
    """RMSNorm of 4,096 tokens in bf16."""
    layer = torch.nn.RMSNorm(width, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    inputs = torch.randn(4096, 1, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        if provider == "liger":
            result = liger("rms_norm")(inputs, layer.weight, 1e-6, 0.0, "llama", False)
        else:
            result = layer(inputs)
        result.sum().backward()

    return run


def megatron_swiglu(kernel: str, provider: str, width: int) -> Run:
    """SwiGLU of 8,192 tokens in bf16."""
    inputs = torch.randn(2048, 4, 2 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        inputs.grad = None
        gate, up = torch.chunk(inputs, 2, -1)
        result = F.silu(gate) * up
        result.sum().backward()

    return run


def llama4_rope(kernel: str, provider: str, tokens: int) -> Run:
    """Rotation of 32 heads of queries and 8 of keys, each of 256, in bf16."""
    positions = torch.arange(tokens, device="cuda").unsqueeze(0)
    frequencies = torch.randn(1, 128, 1, device="cuda")
    angles = (frequencies @ positions[:, None, :].float()).transpose(1, 2)
    rotations = torch.polar(torch.ones_like(angles), angles)
    del angles
    queries, keys = (
        torch.randn(1, tokens, heads, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (32, 8)
    )
    gradients = [torch.randn_like(queries), torch.randn_like(keys)]

    def run() -> None:
        results = liger(kernel)(queries, keys, rotations)
        torch.autograd.grad(results, (queries, keys), gradients, retain_graph=True)
        assert positions.shape[1] == tokens  # the set-up keeps them

    return run


def fused_linear_jsd(kernel: str, provider: str, tokens: int) -> Run:
    """Divergence of the logits of two output layers of 4,096 by 128,256 in bf16."""
    student, teacher = (
        torch.nn.Linear(4096, 128_256, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    inputs = torch.rand(tokens, 4096, requires_grad=True, device="cuda", dtype=torch.bfloat16)
    others = torch.rand(tokens, 4096, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        if provider == "liger":
            loss = liger(kernel)(inputs, student.weight, others, teacher.weight)
        else:
            logits = [layer(each) for layer, each in ((student, inputs), (teacher, others))]
            loss = _jsd(*(torch.log_softmax(each, dim=-1) for each in logits))
        loss.backward()

    return run


SETUPS: dict[str, Callable[[str, str, int], Run]] = {
    "kl_div": divergence, "jsd": divergence, "tvd": divergence, "layer_norm": layer_norm,
    "fused_add_rms_norm": fused_add_rms_norm, "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu, "llama4_rope": llama4_rope, "fused_linear_jsd": fused_linear_jsd,
}  # fmt: skip


def main() -> None:
    """Set a kernel up and run it."""
    kernel, provider, size = sys.argv[1:]
    run = SETUPS[kernel](kernel, provider, int(size))
    fakedist.step()
    for _ in range(3):
        run()
        fakedist.step()


if __name__ == "__main__":
    main()
