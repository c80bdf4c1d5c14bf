"""Train one module after another of Transformer Engine; prints what each held and took, as JSON, a line for each.

Runs as it is on a GPU too: ``python transformer_engine_features.py layernorm_linear fp8_delayed ...``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.router import fused_topk_with_score_function

TOKENS, HIDDEN, OUT, BATCH, HEADS, EXPERTS, TOP_K, TENSOR = 4096, 2048, 6144, 2, 16, 8, 2, 8
RECIPES: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


def requested(which: str = "current") -> int:
    """Bytes that the live tensors asked the allocator for, now or at the ``peak``."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def train(make: Callable[[], torch.nn.Module], scaling: str, *shape: int, fp8_weights: bool = False) -> dict[str, int]:
    """Two steps of a module in bf16 with FusedAdam. Gives bytes: of weights, held for backward, of states, the peak.

    The second step is the one that is looked at: weights that are kept in two precisions are then there.
    """
    recipe = RECIPES[scaling]()
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = requested()
    with te.quantized_model_init(enabled=fp8_weights, recipe=recipe):
        module = make()
    found = {"weights": requested() - before}
    optimizer = FusedAdam(module.parameters(), lr=1e-3, master_weights=fp8_weights)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        start = requested()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        found["held"] = requested() - start
        y.backward(torch.ones_like(y))
        found["peak"] = requested("peak") - start
        del y
        before = requested()
        optimizer.step()
        found.setdefault("states", requested() - before)
        optimizer.zero_grad()
        x.grad = None
    assert torch.isfinite(x).all()
    return found


def linear(**options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: te.LayerNormLinear(HIDDEN, OUT, bias=False, params_dtype=torch.bfloat16, **options)


def layer() -> torch.nn.Module:
    made: torch.nn.Module = te.TransformerLayer(
        HIDDEN,
        4 * HIDDEN,
        HEADS,
        num_gqa_groups=4,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        self_attn_mask_type="causal",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
    )
    return made


def parallel(**options: Any) -> torch.nn.Module:
    """A layer norm with a linear layer whose output is split over 8 ranks, its input over the sequence."""
    group, _ = torch.distributed.new_subgroups(TENSOR)
    return linear(parallel_mode="column", sequence_parallel=True, tp_group=group, tp_size=TENSOR, **options)()


def overlap() -> dict[str, int]:
    """The same, its communication overlapped with the products: the buffers for that lie outside of torch's memory."""
    os.environ["UB_SKIPMC"] = "1"  # buffers are shared by CUDA IPC, not by multicast
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    te.initialize_ub([TOKENS, HIDDEN], TENSOR, dtype=torch.bfloat16)
    buffers = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    flags = dict.fromkeys(("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad"), True)
    found = train(lambda: parallel(ub_name="qkv", **flags), "bf16", TOKENS // TENSOR, HIDDEN)
    te.destroy_ub()
    return {"buffers": buffers, **found}


class Experts(torch.nn.Module):
    """Grouped linear layers, tokens split evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = te.GroupedLinear(EXPERTS, HIDDEN, OUT, bias=False, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.grouped(x, [len(x) // EXPERTS] * EXPERTS)
        return out


def permutation(map_type: str) -> dict[str, int]:
    """Tokens to their experts and back, forward and backward."""
    tokens = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs, experts = torch.randn(TOKENS, EXPERTS, device="cuda").softmax(1).topk(TOP_K)
    routing = experts.int()
    if map_type == "mask":
        routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32, device="cuda").scatter_(1, experts, 1)
        probs = torch.zeros(TOKENS, EXPERTS, device="cuda").scatter_(1, experts, probs)
    probs.requires_grad_()
    start = requested()
    permuted, row_id_map = te.moe_permute(tokens, routing, TOKENS * TOP_K, map_type=map_type)
    found = {"permuted": permuted.numel() * permuted.element_size(), "held": requested() - start}
    back = te.moe_unpermute(permuted, row_id_map, probs, restore_shape=tokens.shape, map_type=map_type)
    back.backward(torch.ones_like(back))
    assert tokens.grad is not None
    assert tokens.grad.shape == tokens.shape
    assert probs.grad is not None
    assert probs.grad.shape == probs.shape
    return found


def router() -> dict[str, int]:
    """The fused router decides how many tokens each expert gets; the experts then take so many."""
    tokens = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(TOKENS, EXPERTS, device="cuda", requires_grad=True)
    probs, mask = fused_topk_with_score_function(logits, TOP_K, False, None, None, None, "softmax", None)
    counts = mask.sum(dim=0).tolist()
    permuted, row_id_map = te.moe_permute(tokens, mask, TOKENS * TOP_K, map_type="mask")
    out = Experts().grouped(permuted[: sum(counts)], counts)
    back = te.moe_unpermute(
        out[:, :HIDDEN].contiguous(), row_id_map, probs, restore_shape=tokens.shape, map_type="mask"
    )
    back.backward(torch.ones_like(back))
    assert logits.grad is not None
    return {"routed": sum(counts), "most": max(counts)}


def attention(kind: str) -> dict[str, int]:
    """cuDNN's attention, forward and backward: of packed sequences, with dropout, or in fp8."""
    rows, heads, keys, width = TOKENS, HEADS, 4, 128
    made = functools.partial(te.DotProductAttention, heads, width, num_gqa_groups=keys)
    shape, more = (rows // BATCH, BATCH), {}
    if kind == "packed":
        module = made(attn_mask_type="padding_causal", qkv_format="thd")
        ends = torch.tensor([0, rows // 4, rows // 2, rows], dtype=torch.int32, device="cuda")
        shape = (rows,)
        more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": rows // 2, "max_seqlen_kv": rows // 2}
    else:
        module = made(attn_mask_type="causal", attention_dropout=0.1 if kind == "dropout" else 0.0)
    numbers = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = numbers(*shape, heads, width), numbers(*shape, keys, width), numbers(*shape, keys, width)
    start = requested()
    with te.autocast(enabled=kind == "fp8", recipe=recipes.DelayedScaling(fp8_dpa=kind == "fp8")):
        out = module(q, k, v, **more)
    found = {"held": requested() - start}
    out.backward(torch.ones_like(out))
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
    return found


FEATURES: dict[str, Callable[[], dict[str, int]]] = {
    **{f"linear_{name}": lambda name=name: train(linear(), name, TOKENS, HIDDEN) for name in RECIPES},
    **{
        f"fp8_weights_{name}": lambda name=name: train(linear(), name, TOKENS, HIDDEN, fp8_weights=True)
        for name in list(RECIPES)[1:]
    },
    **{f"layer_{name}": lambda name=name: train(layer, name, TOKENS // BATCH, BATCH, HIDDEN) for name in RECIPES},
    **{f"grouped_{name}": lambda name=name: train(Experts, name, TOKENS, HIDDEN) for name in RECIPES},
    **{
        f"tensor_parallel_{name}": lambda name=name: train(parallel, name, TOKENS // TENSOR, HIDDEN) for name in RECIPES
    },
    **{f"attention_{name}": lambda name=name: attention(name) for name in ("packed", "dropout", "fp8")},
    "router": router,
    "overlap": overlap,
    **{f"permutation_{name}": lambda name=name: permutation(name) for name in ("index", "mask")},
}

torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))

for feature in sys.argv[1:]:
    found = FEATURES[feature]()
    torch.cuda.empty_cache()
    print("FEATURE", json.dumps({"name": feature, **found}), flush=True)
