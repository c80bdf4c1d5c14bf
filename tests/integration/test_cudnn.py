"""cuDNN on the virtual GPU: it runs, and takes the memory that cuDNN itself asks for; nothing is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.virtual import on_virtual_gpu as in_a_process
from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine

_SIZES = """
def sizes(run):
    "Sizes that the caching allocator was asked for while `run` ran, in order."
    torch.cuda.memory._record_memory_history(context=None)
    result = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    return result, [event["size"] for event in trace if event["action"] == "alloc"]
"""


def _found(body: str, gpu: str = "h100-80g") -> dict[str, Any]:
    """Results of ``body`` on one virtual GPU, with ``sizes`` defined; no function may have been refused."""
    found = in_a_process(_SIZES + body + '\nfound["refused"] = gpu.refused()', devices=1, gpu=gpu)
    assert found.pop("refused") == []
    return found


# ---- attention

BATCH, HEADS, QUERIES, WIDTH = 2, 16, 1024, 128
OUT_BYTES = BATCH * HEADS * QUERIES * WIDTH * 2
ROWS_BYTES = BATCH * HEADS * QUERIES * 4  # one float32 for each query

ATTENTION = """
from torch.nn.attention import SDPBackend, sdpa_kernel
attention = torch.nn.functional.scaled_dot_product_attention
q, k, v = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    out, found["forward"] = sizes(lambda: attention(q, k, v, is_causal=True))
gradient = torch.empty_like(out)
_, found["backward"] = sizes(lambda: out.backward(gradient))
"""


@functools.cache
def _attention() -> dict[str, Any]:
    return _found(ATTENTION)


def test_attention_forward_takes_the_output_the_logsumexp_and_cudnns_workspace() -> None:
    """MHA.cpp of PyTorch: a seed and an offset, the output, the logsumexp in float32, then what the plan asks for."""
    assert sorted(_attention()["forward"]) == sorted([8, 8, OUT_BYTES, ROWS_BYTES, 256])


def test_attention_backward_takes_three_gradients_and_a_float32_accumulator_of_dq() -> None:
    assert _attention()["backward"] == [OUT_BYTES, OUT_BYTES, OUT_BYTES, 2 * OUT_BYTES + ROWS_BYTES + 256]


@pytest.mark.nightly
def test_a_plan_is_kept_for_later_processes_and_for_no_other_plan(tmp_path: Path) -> None:
    """cuDNN compiles a kernel for a plan, which takes it half a second."""
    body = f"from pathlib import Path\ngpu.keep_plans(Path({str(tmp_path)!r}))\n{ATTENTION}"
    first = _found(body)
    assert first == _attention()
    kept, cut = sorted(tmp_path.iterdir())
    assert kept.read_text() == cut.read_text() == "workspace 256 bytes\n"
    kept.write_text("workspace 4096 bytes\n")
    cut.write_text("workspace 4096")
    second = _found(body)
    taken = [sum(found["forward"]) + sum(found["backward"]) for found in (first, second)]
    assert taken[1] - taken[0] == 4096 - 256
    assert cut.read_text() == "workspace 256 bytes\n"
    _found(body.replace("1024", "2048").replace("is_causal=True", "is_causal=False"))
    assert len(list(tmp_path.iterdir())) == 4
    _found(body, "b200")
    assert len(list(tmp_path.iterdir())) == 6


BACKENDS = """
from torch.nn.attention import SDPBackend, sdpa_kernel
attention = torch.nn.functional.scaled_dot_product_attention

def run(backend, width=64, kv_heads=8, dtype=torch.bfloat16, value_width=None, **how):
    q = torch.randn(2, 8, 256, width, device="cuda", dtype=dtype, requires_grad=True)
    k = torch.randn(2, kv_heads, 256, width, device="cuda", dtype=dtype, requires_grad=True)
    v = torch.randn(2, kv_heads, 256, value_width or width, device="cuda", dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend or list(SDPBackend.__members__.values())):
        attention(q, k, v, **how).sum().backward()
    return q.grad is not None and k.grad.shape == k.shape and v.grad.shape == v.shape

def choice(dtype=torch.bfloat16, **how):
    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=dtype)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, **how)).name

mask = torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
found["choices"] = [choice(), choice(torch.float32), choice(attn_mask=mask)]
ran = found["ran"] = []
for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
    backend = getattr(SDPBackend, name)
    widest = 256 if name != "CUDNN_ATTENTION" or torch.cuda.get_device_capability() == (9, 0) else 128
    ran += [run(backend, width, is_causal=True) for width in (64, 128, widest)]
    ran.append(run(backend, dtype=torch.float16))
    if name != "EFFICIENT_ATTENTION":  # torch 2.11 has no grouped queries there
        ran.append(run(backend, kv_heads=2, enable_gqa=True))
    if name != "FLASH_ATTENTION":
        ran.append(run(backend, attn_mask=mask))
    if name != "CUDNN_ATTENTION":
        ran.append(run(backend, dropout_p=0.1))
ran.append(run(None, 192, value_width=128, is_causal=True))
lengths = 128, 64, 200
nested = torch.nested.nested_tensor([torch.randn(n, 512) for n in lengths], layout=torch.jagged, device="cuda",
                                    dtype=torch.bfloat16, requires_grad=True)
heads = nested.unflatten(-1, [8, 64]).transpose(1, 2)
attention(heads, heads, heads).values().sum().backward()
ran.append(nested.grad is not None)
from torch.nn.attention.varlen import varlen_attn
ends = torch.tensor([0, 128, 192, 392], dtype=torch.int32).cuda()
packed = torch.randn(392, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
varlen_attn(packed, packed, packed, ends, ends, 200, 200).sum().backward()
ran.append(packed.grad is not None)
"""


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("gpu", "choices"),
    [
        ("h100-80g", ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]),
        pytest.param("b200", ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"], marks=NIGHTLY),
        ("a100-80g", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"]),
        pytest.param("rtx4090", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"], marks=NIGHTLY),
    ],
)
def test_attention_runs_with_every_backend_and_torch_chooses_as_on_that_gpu(gpu: str, choices: list[str]) -> None:
    found = _found(BACKENDS, gpu)
    assert found["choices"] == choices
    assert len(found["ran"]) > 20
    assert all(found["ran"])


# ---- convolutions

CONVOLUTION = """
torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = {benchmark}, {deterministic}
model = torch.nn.Sequential(
    torch.nn.Conv2d(64, 128, 3, padding=1, bias=False), torch.nn.ReLU(), torch.nn.ConvTranspose2d(128, 64, 2, stride=2),
    torch.nn.Conv2d(64, 64, 5, groups=64), torch.nn.Conv2d(64, 8, 1, dilation=2),
).cuda().to(torch.{dtype})
x = torch.randn(4, 64, 56, 56, device="cuda", dtype=torch.{dtype}, requires_grad=True)
model(x).sum().backward()
_, found["sizes"] = sizes(lambda: model(x).sum().backward())
found["grads"] = [list(p.grad.shape) == list(p.shape) for p in (x, *model.parameters())]
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=NIGHTLY)])
def test_convolutions_train_and_trials_keep_the_plan_that_cudnn_puts_first(dtype: str) -> None:
    plain = _found(CONVOLUTION.format(benchmark=False, deterministic=False, dtype=dtype))
    tried = _found(CONVOLUTION.format(benchmark=True, deterministic=False, dtype=dtype))
    assert len(plain["grads"]) == 8
    assert all(plain["grads"])
    assert tried == plain


@NIGHTLY
def test_deterministic_convolutions_train() -> None:
    assert all(_found(CONVOLUTION.format(benchmark=False, deterministic=True, dtype="float32"))["grads"])


POINTWISE = """
layer = torch.nn.Conv2d(256, 64, 1, bias=False).cuda()
x = torch.randn(32, 256, 56, 56, device="cuda", requires_grad=True)
out, found["forward"] = sizes(lambda: layer(x))
_, found["backward"] = sizes(lambda: out.backward(out.detach()))
"""


def test_a_convolution_of_1x1_is_a_product_of_cublaslts() -> None:
    """cuDNN's first engine for it; the next one would copy input and output to another layout, 128 MB."""
    found = _found(POINTWISE)
    assert found["forward"] == [32 * 64 * 56 * 56 * 4]
    one_gradient_of_the_weight_for_each_image = 32 * 64 * 256 * 4
    assert found["backward"] == [32 * 256 * 56 * 56 * 4, 64 * 256 * 4, one_gradient_of_the_weight_for_each_image]


# ---- the older API

LAYERS = """
functional = torch.nn.functional
found["networks"] = []
for network in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
    for how in ({}, {"bidirectional": True, "dropout": 0.1}, {"bias": False, "batch_first": True}):
        layer = network(64, 128, 2, **how).cuda()
        x = torch.randn(30, 8, 64, device="cuda", requires_grad=True)
        layer(x)[0].sum().backward()
        first = "batch_first" in how
        lengths = torch.arange(8, 0, -1)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x[:8] if first else x, lengths, batch_first=first)
        layer(packed)[0].data.sum().backward()
        found["networks"].append(all(p.grad is not None for p in (x, *layer.parameters())))
flat = torch.nn.LSTM(64, 128, 1).cuda()
storage = flat.weight_ih_l0.untyped_storage()
one = [p for p in flat.parameters() if p.untyped_storage().data_ptr() == storage.data_ptr()]
found["offsets"] = [p.storage_offset() for p in one]
found["space"] = storage.nbytes()
lstm = torch.nn.LSTM(123, 320, 4).cuda()
_, found["lstm"] = sizes(lambda: lstm(torch.empty(250, 100, 123, device="cuda")))
gru = torch.nn.GRU(123, 320, 4).cuda()
_, found["gru"] = sizes(lambda: gru(torch.empty(250, 100, 123, device="cuda")))
for layout in (torch.contiguous_format, torch.channels_last):
    norm = torch.nn.BatchNorm2d(64).cuda()
    x = torch.randn(8, 64, 56, 56, device="cuda").to(memory_format=layout).requires_grad_()
    norm(x).sum().backward()
    norm.half()(x.half()).sum().backward()
    norm.eval()(x.half())
logits = torch.randn(50, 16, 20, device="cuda", requires_grad=True)
targets = torch.randint(1, 20, (160,), dtype=torch.int32)
run = lambda: functional.ctc_loss(logits.log_softmax(2), targets, (50,) * 16, (10,) * 16).backward()
_, found["ctc"] = sizes(run)
image = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
grid = functional.affine_grid(torch.randn(2, 2, 3, device="cuda", requires_grad=True), (2, 3, 8, 8), align_corners=True)
functional.grid_sample(image, grid, align_corners=True).sum().backward()
"""


@functools.cache
def _layers() -> dict[str, Any]:
    return _found(LAYERS)


def test_recurrent_networks_train() -> None:
    assert len(_layers()["networks"]) == 9
    assert all(_layers()["networks"])


def test_the_weights_of_a_recurrent_network_lie_in_one_space_matrices_first() -> None:
    matrices = [0, 512 * 64]
    biases = [512 * (64 + 128), 512 * (64 + 128) + 512]
    assert _layers()["offsets"] == [*matrices, *biases]
    assert _layers()["space"] == 4 * 512 * (64 + 128 + 2)


def test_recurrent_networks_take_the_reserve_and_workspace_that_the_formulas_give() -> None:
    """Sizes of https://github.com/pytorch/pytorch/issues/2895, and 8 MiB more workspace."""
    assert {736_000_000, 17_730_560 + (8 << 20)} <= set(_layers()["lstm"])
    assert {864_000_000, 13_169_920 + (8 << 20)} <= set(_layers()["gru"])


def test_ctc_loss_takes_the_workspace_that_cudnn_asks_for() -> None:
    assert 200_640 in _layers()["ctc"]  # 50 steps, 16 sequences, 20 classes, 10 labels each


# ---- values


@on_virtual_gpu
def test_a_small_convolution_holds_what_the_host_computes(engine: ValueEngine) -> None:
    import torch

    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    y = torch.nn.functional.conv2d(x.cuda(), weight.cuda(), padding=1)
    assert torch.allclose(y.cpu(), torch.nn.functional.conv2d(x, weight, padding=1), atol=1e-5)


@on_virtual_gpu
def test_what_no_host_kernel_computes_is_finite_where_it_is_read(engine: ValueEngine) -> None:
    import torch

    q = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    network = torch.nn.LSTM(8, 8).cuda()
    attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    loss = attended.sum() + network(torch.ones(4, 2, 8).cuda())[0].sum()
    loss.backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad.cpu()).all()
    assert torch.isfinite(loss).item()
