"""cuDNN on the virtual GPU: attention and convolutions run, and take the memory that cuDNN itself asks for."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.integration.virtual import on_virtual_gpu

BATCH, HEADS, QUERIES, WIDTH = 2, 16, 1024, 128

_SIZES = """
def sizes(run):
    "Sizes that the caching allocator was asked for while `run` ran, in order."
    torch.cuda.memory._record_memory_history(context=None)
    result = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    return result, [event["size"] for event in trace if event["action"] == "alloc"]
"""

ATTENTION = (
    _SIZES
    + """
from torch.nn.attention import SDPBackend, sdpa_kernel
attention = torch.nn.functional.scaled_dot_product_attention
q, k, v = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
found["choice"] = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    out, found["forward"] = sizes(lambda: attention(q, k, v, is_causal=True))
gradient = torch.empty_like(out)
_, found["backward"] = sizes(lambda: out.backward(gradient))
found["launches"], found["refused"] = gpu.counters()["launches"], gpu.refused()
"""
)


@functools.cache
def _attention() -> dict[str, Any]:
    return on_virtual_gpu(ATTENTION, devices=1)


def test_attention_takes_cudnn_where_torch_does() -> None:
    assert _attention()["choice"] == "CUDNN_ATTENTION"
    assert _attention()["refused"] == []


def test_attention_forward_takes_the_output_the_logsumexp_and_cudnns_workspace() -> None:
    """MHA.cpp of PyTorch: the output, then (training) the logsumexp in float32, then what the plan asks for."""
    out = BATCH * HEADS * QUERIES * WIDTH * 2
    logsumexp = BATCH * HEADS * QUERIES * 4
    seed_and_offset = [8, 8]
    assert [size for size in _attention()["forward"] if size > 256] == [out, logsumexp]
    assert sorted(_attention()["forward"]) == sorted([*seed_and_offset, out, logsumexp, 256])


def test_attention_backward_takes_three_gradients_and_a_float32_accumulator_of_dq() -> None:
    gradient = BATCH * HEADS * QUERIES * WIDTH * 2
    accumulator = BATCH * HEADS * QUERIES * WIDTH * 4
    row_sums = BATCH * HEADS * QUERIES * 4
    assert _attention()["backward"] == [gradient, gradient, gradient, accumulator + row_sums + 256]


CONVOLUTION = (
    _SIZES
    + """
torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = {benchmark}, {deterministic}
model = torch.nn.Sequential(
    torch.nn.Conv2d(64, 128, 3, padding=1, bias=False), torch.nn.ReLU(), torch.nn.ConvTranspose2d(128, 64, 2, stride=2),
    torch.nn.Conv2d(64, 64, 5, groups=64), torch.nn.Conv2d(64, 8, 1, dilation=2),
).cuda().to(torch.{dtype})
x = torch.randn(4, 64, 56, 56, device="cuda", dtype=torch.{dtype}, requires_grad=True)
_, found["sizes"] = sizes(lambda: model(x).sum().backward())
found["grads"] = [list(p.grad.shape) == list(p.shape) for p in (x, *model.parameters())]
found["refused"] = gpu.refused()
"""
)


@pytest.mark.parametrize(("benchmark", "deterministic"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_train(benchmark: bool, deterministic: bool, dtype: str) -> None:
    body = CONVOLUTION.format(benchmark=benchmark, deterministic=deterministic, dtype=dtype)
    found = on_virtual_gpu(body, devices=1)
    assert found["refused"] == []
    assert found["grads"]
    assert all(found["grads"])
