"""Classifies a kernel by its name and the operation that launched it, as one of ``run.schema.FAMILIES``."""

from __future__ import annotations

import re

#: The first match counts. A norm is any kernel that reduces each row of a matrix and writes a matrix again, so softmax
#: and the losses built on it too. A copy is any kernel that only moves values, even if it gathers, scatters, transposes
#: or casts them.
_BY_NAME = tuple(
    (family, re.compile(words, re.IGNORECASE))
    for family, words in (
        # Inductor's names list what was fused, so a single word says little. Its templates compute matrix products.
        ("attention", r"^triton_tem_\w*(flex_attention|flex_decoding|sdpa)"),
        ("gemm", r"^triton_tem_"),
        ("copy", r"^triton_poi_fused_(_?(to_copy|clone|cat|copy|transpose|permute|view|t|slice|stack|expand))+_\d+$"),
        ("elementwise", r"^triton_poi_"),
        ("norm", r"^triton_(red|per|spl)_\w*(rsqrt|softmax|norm|nll_loss)"),
        ("other", r"^triton_(red|per|spl)_"),
        ("communication", r"nccl|nvshmem|rccl|all_?reduce_kernel|reduce_?scatter_kernel|all_?gather_kernel"),
        ("communication", r"userbuffers|multimem|symm_mem|symmetric_memory|(one|two)_shot_|(deep|hybrid)_ep"),
        (
            "attention",
            r"flash|fmha|attention|sdpa|fused_attn|\bmha|_mha_|flex_attn|scaled_\w*softmax|\bthd_(lse|out|grad)_",
        ),
        ("attention", r"\battn_(fwd|bwd)|\bbwd_kernel_d[kqv]"),
        ("norm", r"(layer|rms|batch|group|instance|skip)_?norm|\bbn_|ln_(fwd|bwd|parallel)|gammabeta|rowwisemoments"),
        ("norm", r"softmax|nll_?loss|cross_?entropy"),
        ("copy", r"nchwtonhwc|nhwctonchw"),
        (
            "gemm",
            r"gemm|cijk_|nvjet|xmma|gemv|splitk|cublas|dot_kernel|reduce_1block|[dw]grad|fprop|conv(?!ert)|winograd|_mm\b|triton_tem",
        ),
        ("optimizer", r"adam(w|math|functor|_)|(adagrad|lamb|lion|sgd)_?\w*functor|fusedsgd|fusedadagrad"),
        (
            "copy",
            r"^mem(cpy|set)|copy|catarray|transpose|chunk_cat|permute|gather(?!topk)|scatter|indexselect|indexfunc",
        ),
        ("copy", r"embedding_|compute_grad_weight|krn_partial|swizzle|multi_tensor_(un)?pad"),
        ("elementwise", r"elementwise|vectorized|unrolled|pointwise|multi_tensor|dropout|distribution|fill"),
        ("elementwise", r"swiglu|geglu|silu|gelu|gated_|rope_|rotary|quantize|unary_kernel|triu_tril|non_finite"),
    )
)
_BY_OPERATION = tuple(
    (family, re.compile(words, re.IGNORECASE))
    for family, words in (
        ("communication", r"fakedist::|c10d\b|nccl"),
        ("attention", r"attention|flash|sdp|fused_attn"),
        ("norm", r"(layer|rms|batch|group|instance)_?norm|softmax|nll_loss|cross_entropy"),
        ("gemm", r"\b(add)?[mb]*mm\b|\b(addmm|bmm|baddbmm|mm|mv|addmv|dot|linear)\b|_scaled_mm|grouped_mm|gemm|conv"),
        ("copy", r"\b(copy_|_to_copy|clone|contiguous|cat|_chunk_cat|split_with_sizes_copy|fill_|zero_)\b"),
        ("copy", r"embedding|index_select|index_put|index_add|gather\b|scatter"),
    )
)


def kernel_family(name: str, operation: str = "", phase: str = "") -> str:
    """The family of a kernel, by its demangled name.

    ``operation`` is ``aten.mm.default`` or ``aten::mm``; empty if unknown. Elementwise work in phase ``optimizer``
    belongs to the family ``optimizer``.
    """
    matched = next((family for family, words in _BY_NAME if words.search(name)), "")
    if matched in ("", "elementwise"):
        matched = next((family for family, words in _BY_OPERATION if words.search(operation)), "") or matched or "other"
    return "optimizer" if phase == "optimizer" and matched in ("elementwise", "other") else matched
