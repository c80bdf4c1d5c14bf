"""Transformer Engine's fused attention on the virtual GPU: cuDNN's, through its front end, in bf16 and fp8.

Runs where Transformer Engine is installed; ``tests/clients/build_transformer_engine.sh`` builds it from PyPI.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="transformer_engine_torch")),
    reason="Transformer Engine is not installed: tests/clients/build_transformer_engine.sh builds it from PyPI",
)
BATCH, TOKENS, HEADS, WIDTH = 2, 1024, 16, 128
OUT_BYTES = BATCH * TOKENS * HEADS * WIDTH * 2
ROWS_BYTES = BATCH * TOKENS * HEADS * 4  # one float32 for each query and head

BODY = """
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
attention = te.DotProductAttention(16, 128, attention_dropout=0.0)

def sizes(shape, recipe=None, **how):
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.memory._record_memory_history(context=None)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = attention(q, k, v, **how)
    out.backward(out.detach())
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    assert q.grad is not None
    return [event["size"] for event in trace if event["action"] == "alloc" and event["size"] >= 100_000]

found["dense"] = sizes((2, 1024, 16, 128), qkv_format="bshd", attn_mask_type="causal")
ends = torch.tensor([0, 800, 2048], dtype=torch.int32).cuda()
packed = dict(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=1248, max_seqlen_kv=1248)
found["packed"] = sizes((2048, 16, 128), qkv_format="thd", attn_mask_type="padding_causal", **packed)
how = dict(qkv_format="bshd", attn_mask_type="causal")
found["fp8"] = sizes((2, 1024, 16, 128), recipe=DelayedScaling(fp8_dpa=True), **how)
found["refused"] = gpu.refused()
"""


@functools.cache
def _found(gpu: str) -> dict[str, Any]:
    return on_virtual_gpu(BODY, devices=1, gpu=gpu, NVTE_FLASH_ATTN="0", NVTE_UNFUSED_ATTN="0")


@pytest.mark.parametrize("gpu", ["h100-80g", "b200"])
def test_fused_attention_takes_its_output_its_statistics_and_a_float32_accumulator(gpu: str) -> None:
    out, rows, *backward = _found(gpu)["dense"]
    assert (out, rows) == (OUT_BYTES, ROWS_BYTES)
    *gradients, workspace = backward
    assert gradients == [OUT_BYTES] * 3
    assert 0 <= workspace - 2 * OUT_BYTES - ROWS_BYTES <= 256
    assert _found(gpu)["refused"] == []


@pytest.mark.parametrize("gpu", ["h100-80g", "b200"])
def test_packed_sequences_and_fp8_run_too(gpu: str) -> None:
    assert _found(gpu)["packed"][:2] == [OUT_BYTES, ROWS_BYTES]
    assert ROWS_BYTES in _found(gpu)["fp8"]
