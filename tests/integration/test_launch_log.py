"""The driver's log of launches under PyTorch: products as cuBLAS got them, streams, graphs, nothing when it is off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu

_BODY = """
import torch.nn.functional as F
from fakedist.gpu.launch_log import SCALINGS, LaunchKind, LaunchLog

log = LaunchLog()

def logged(run):
    log.begin()
    log.tag(7)
    run()
    return [
        {
            "kind": LaunchKind(each.kind).name, "name": log.name(each), "stream": each.stream, "tag": each.tag,
            "product": [each.m, each.n, each.k, each.batch], "types": [each.a_type, each.b_type, each.d_type],
            "grid": list(each.grid), "block": list(each.block), "bytes": each.bytes, "event": each.event,
            "graph": each.graph, "direction": each.direction, "added": bool(each.accumulates),
            "compute": each.compute,
            "layout": "NT"[each.transposed_a] + "NT"[each.transposed_b], "scaling": SCALINGS[each.scaling],
        }
        for each in log.end()
    ]

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="cuda", dtype=dtype)

a, b, bias, many = tensor(64, 128), tensor(128, 256), tensor(256), tensor(8, 96, 32)
a8, b8, one = a.to(torch.float8_e4m3fn), tensor(256, 128).to(torch.float8_e4m3fn).t(), torch.ones((), device="cuda")
rows, columns = torch.ones(64, 1, device="cuda"), torch.ones(1, 256, device="cuda")
groups = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
found["mm"] = logged(lambda: torch.mm(a, b))
found["transposed"] = logged(lambda: torch.mm(b.t(), a.t()))
found["addmm"] = logged(lambda: torch.addmm(bias, a, b))
found["linear"] = logged(lambda: F.linear(a, b.t(), bias))
found["activation"] = logged(lambda: torch._addmm_activation(bias, a, b))
found["bmm"] = logged(lambda: torch.bmm(many, many.transpose(1, 2)))
found["single"] = logged(lambda: torch.mm(a.float(), b.float()))
found["scaled"] = logged(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16))
found["scaled by row"] = logged(lambda: torch._scaled_mm(a8, b8, rows, columns, out_dtype=torch.bfloat16))
found["added"] = logged(lambda: torch.addmm(tensor(64, 256), a, b))
found["added batch"] = logged(lambda: torch.baddbmm(tensor(8, 96, 96), many, many.transpose(1, 2)))
found["added to nothing"] = logged(lambda: torch.addmm(tensor(64, 256), a, b, beta=0))
found["added in place"] = logged(lambda: tensor(64, 256, dtype=torch.float32).addmm_(a.float(), b.float()))
x, weight = tensor(64, 128).requires_grad_(), tensor(256, 128).requires_grad_()
found["forward"] = logged(lambda: globals().update(y=F.linear(x, weight)))
found["backward"] = logged(lambda: y.backward(tensor(64, 256)))
found["grouped"] = logged(lambda: torch._grouped_mm(a, tensor(4, 128, 256), offs=groups))
found["vector"] = logged(lambda: torch.mv(a.float(), bias.float()[:128]))
found["elementwise"] = logged(lambda: tensor(1 << 20).mul_(2))
found["attention"] = logged(lambda: F.scaled_dot_product_attention(*[tensor(1, 4, 512, 64)] * 3, is_causal=True))

singles = torch.empty(8, 64, 64, device="cuda"), torch.empty(64, device="cuda")
complexes = torch.empty(64, 64, device="cuda", dtype=torch.complex64)
def in_single():
    one, bias = singles[0][0], singles[1]
    weight = one.clone().requires_grad_()
    y = F.linear(one, weight, bias)
    calls = {
        "mm": lambda: torch.mm(one, one), "bmm": lambda: torch.bmm(*[singles[0]] * 2),
        "addmm": lambda: torch.addmm(bias, one, one), "baddbmm": lambda: torch.baddbmm(*[singles[0]] * 3),
        "mv": lambda: torch.mv(one, bias), "complex": lambda: torch.mm(complexes, complexes),
        "linear": lambda: F.linear(one, weight, bias), "backward": lambda: y.backward(one),
    }
    return {name: sorted({each["compute"] for each in logged(call) if each["kind"] == "PRODUCT"})
            for name, call in calls.items()}
found["ieee"] = in_single()
torch.set_float32_matmul_precision("high")
found["high"] = in_single()
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_tf32 = True
found["allow_tf32"] = in_single()
torch.backends.cuda.matmul.allow_tf32 = False
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    found["matmul"] = in_single()
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    found["all"] = in_single()
    torch.backends.fp32_precision = "none"
found["ieee again"] = in_single()

side = torch.cuda.Stream()
def streams():
    tensor(256).mul_(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor(256).mul_(2)
    torch.cuda.synchronize()
found["streams"] = logged(streams)
found["side"] = side.cuda_stream

host = torch.empty(1 << 20)
target, small = tensor(1 << 20, dtype=torch.float32), tensor(64)
found["copies"] = logged(lambda: (target.copy_(host), small.zero_(), small.cpu()))

graph, x = torch.cuda.CUDAGraph(), tensor(1 << 20)
log.tag(3)
with torch.cuda.graph(graph):
    y = torch.mm(a, b).relu()
found["captured"] = logged(lambda: None)
found["replayed"] = logged(lambda: (graph.replay(), graph.replay()))

torch.mm(a, b)
found["off"] = len(log.end())
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_virtual_gpu(_BODY)


def products(launches: list[dict[str, Any]]) -> list[list[int]]:
    return [each["product"] for each in launches if each["kind"] == "PRODUCT"]


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        # cuBLAS is column-major: (M, K) x (K, N) of PyTorch comes as m = N, n = M.
        ("mm", [256, 64, 128, 1]),
        ("transposed", [64, 256, 128, 1]),
        ("addmm", [256, 64, 128, 1]),
        ("linear", [256, 64, 128, 1]),
        ("activation", [256, 64, 128, 1]),
        ("bmm", [96, 96, 32, 8]),
        ("single", [256, 64, 128, 1]),
        ("scaled", [256, 64, 128, 1]),
        ("vector", [64, 1, 128, 1]),
    ],
)
def test_a_product_is_seen_with_the_sizes_that_cublas_gets(found: dict[str, Any], call: str, sizes: list[int]) -> None:
    assert products(found[call]) == [sizes]
    assert {each["tag"] for each in found[call]} == {7}


def test_a_product_is_seen_with_its_types(found: dict[str, Any]) -> None:
    single, bf16, fp8 = 0, 14, 28  # cudaDataType_t
    of = {call: next(each["types"] for each in found[call] if each["kind"] == "PRODUCT") for call in found if call in
          ("mm", "single", "scaled")}  # fmt: skip
    assert of == {"mm": [bf16] * 3, "single": [single] * 3, "scaled": [fp8, fp8, bf16]}


@pytest.mark.parametrize("setting", ["high", "allow_tf32", "matmul", "all"])
def test_products_of_single_precision_are_in_tf32_where_torch_allows_it(found: dict[str, Any], setting: str) -> None:
    """cublasGemmEx and its batched form take the handle's math mode, as cublasSgemm does."""
    single, tf32 = 68, 77  # cublasComputeType_t
    if setting not in found:
        pytest.skip("this torch has no precision of its own for each backend")
    expected = {call: [single] if call == "mv" else [tf32] for call in found["ieee"]}
    assert found[setting] == expected, "torch keeps products with vectors in fp32"
    for name in ("ieee", "ieee again"):
        assert all(types == [single] for types in found[name].values()), found[name]


def test_a_linear_layer_has_the_three_layouts(found: dict[str, Any]) -> None:
    """y = x w^T of 64 rows, 256 outputs, 128 inputs; cuBLAS's m is the columns of PyTorch's result, n its rows."""
    (forward,) = (each for each in found["forward"] if each["kind"] == "PRODUCT")
    assert (forward["layout"], forward["product"]) == ("TN", [256, 64, 128, 1])
    backward = {each["layout"]: each["product"] for each in found["backward"] if each["kind"] == "PRODUCT"}
    assert backward == {"NN": [128, 64, 256, 1], "NT": [128, 256, 64, 1]}


@pytest.mark.parametrize(
    ("call", "added"),
    [
        ("mm", False),
        ("single", False),
        ("scaled", False),
        ("added", True),
        ("added batch", True),
        ("added in place", True),
        ("added to nothing", False),
    ],
)
def test_whether_a_product_is_added_to_its_result_is_seen(found: dict[str, Any], call: str, added: bool) -> None:
    assert [each["added"] for each in found[call] if each["kind"] == "PRODUCT"] == [added]


@pytest.mark.parametrize(("call", "scaling"), [("mm", ""), ("scaled", "tensor"), ("scaled by row", "row")])
def test_the_scales_of_eight_bit_operands_are_seen(found: dict[str, Any], call: str, scaling: str) -> None:
    assert [each["scaling"] for each in found[call] if each["kind"] == "PRODUCT"] == [scaling]


def test_a_grouped_product_is_a_kernel_of_torchs_own(found: dict[str, Any]) -> None:
    assert products(found["grouped"]) == []
    assert any("cutlass" in each["name"] for each in found["grouped"])


def test_a_kernel_is_seen_by_its_name_with_its_grid(found: dict[str, Any]) -> None:
    (kernel,) = found["elementwise"]
    assert kernel["name"].startswith("void at::native::vectorized_elementwise_kernel<")
    threads = kernel["grid"][0] * kernel["block"][0]
    assert (1 << 20) / 64 <= threads <= 1 << 20


def test_attention_is_one_call_of_cudnn(found: dict[str, Any]) -> None:
    assert [each["name"] for each in found["attention"] if each["kind"] == "LIBRARY"] == ["cudnnBackendExecute"]


def test_streams_and_what_they_wait_for_are_in_order(found: dict[str, Any]) -> None:
    kinds = [each["kind"] for each in found["streams"]]
    waited = ["KERNEL", "STREAM_RECORDS", "STREAM_WAITS"]
    assert kinds == [*waited, "ALLOCATOR_MALLOCS", "KERNEL", "HOST_WAITS_FOR_DEVICE"], "a stream has its own memory"
    _, recorded, waits, _, kernel, _ = found["streams"]
    assert recorded["event"] == waits["event"] > 0
    assert waits["stream"] == kernel["stream"] == found["side"]


def test_copies_and_fills_are_seen_with_their_bytes(found: dict[str, Any]) -> None:
    copies = [(each["kind"], each["direction"], each["bytes"]) for each in found["copies"] if each["kind"] == "COPY"]
    assert copies == [("COPY", 1, 4 << 20), ("COPY", 2, 128)]


def test_what_a_graph_captures_is_launched_when_it_is_replayed(found: dict[str, Any]) -> None:
    assert found["captured"] == []
    replayed = found["replayed"]
    assert [each["kind"] for each in replayed] == 2 * ["PRODUCT", "KERNEL"]
    assert {each["tag"] for each in replayed} == {3}, "the tag that it was captured with"
    graphs = [each["graph"] for each in replayed]
    assert graphs[0] == graphs[1] != graphs[2] == graphs[3]


def test_nothing_is_logged_unless_asked(found: dict[str, Any]) -> None:
    assert found["off"] == len(found["replayed"]), "the last log stays as it was"


def test_the_default_is_off() -> None:
    body = """
    from fakedist.gpu.launch_log import LaunchLog
    torch.empty(8, device="cuda").mul_(2)
    found["launches"] = len(LaunchLog().end())
    """
    assert on_virtual_gpu(body)["launches"] == 0
