"""What a kernel does, by its name and the operation that launched it: one of ``run.schema.FAMILIES``."""

from __future__ import annotations

import re

_BY_NAME = tuple(
    (family, re.compile(words, re.IGNORECASE))
    for family, words in (
        ("communication", r"nccl|nvshmem|rccl|all_?reduce_kernel|reduce_?scatter_kernel|all_?gather_kernel"),
        ("attention", r"flash|fmha|attention|sdpa|fused_attn|\bmha|_mha_|flex_attn"),
        ("norm", r"(layer|rms|batch|group|instance|skip)_?norm|\bbn_|ln_(fwd|bwd|parallel)|gammabeta|rsqrt_triton"),
        (
            "gemm",
            r"gemm|nvjet|xmma|gemv|splitk|cublas|dot_kernel|reduce_1block|[dw]grad|fprop|conv(?!ert)|winograd|_mm\b|triton_tem",
        ),
        ("copy", r"^mem(cpy|set)|copy|catarray|transpose|chunk_cat|permute|scatter_gather_elementwise"),
        ("elementwise", r"elementwise|vectorized|unrolled|pointwise|triton_poi|multi_tensor|dropout|distribution|fill"),
    )
)
_BY_OPERATION = tuple(
    (family, re.compile(words, re.IGNORECASE))
    for family, words in (
        ("communication", r"fakedist::|c10d\b|nccl"),
        ("attention", r"attention|flash|sdp|fused_attn"),
        ("norm", r"(layer|rms|batch|group|instance)_?norm"),
        ("gemm", r"\b(add)?[mb]*mm\b|\b(addmm|bmm|baddbmm|mm|mv|addmv|dot|linear)\b|_scaled_mm|grouped_mm|gemm|conv"),
        ("copy", r"\b(copy_|_to_copy|clone|contiguous|cat|_chunk_cat|split_with_sizes_copy|fill_|zero_)\b"),
    )
)


def kernel_family(name: str, operation: str = "", phase: str = "") -> str:
    """The family of a kernel.

    Args:
        name: The kernel's, demangled.
        operation: What launched it, as ``aten.mm.default`` or ``aten::mm``; empty if unknown.
        phase: Elementwise work of an optimizer's step is the optimizer's.
    """
    found = next((family for family, words in _BY_NAME if words.search(name)), "")
    if found in ("", "elementwise"):
        found = next((family for family, words in _BY_OPERATION if words.search(operation)), "") or found or "other"
    return "optimizer" if phase == "optimizer" and found in ("elementwise", "other") else found
