"""FLOPs and bytes of operations, on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakedist.gpu.demand.operation_demand import Demand, DemandCounter, tensor_bytes
from fakedist.gpu.demand.work_shapes import AttentionShape, ProductShape

aten = torch.ops.aten


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def demand_of(func: Any, *args: Any, result: Any = None, **kwargs: Any) -> Demand:
    return DemandCounter(func).demand(args, kwargs, func(*args, **kwargs) if result is None else result)


@pytest.mark.parametrize(
    ("func", "args", "more", "moved"),
    [
        (aten.add.Tensor, (made(4, 1000), made(4, 1000)), {}, 3 * 4 * 1000 * 2),
        (aten.add.Tensor, (made(4, 1000), made(1, 1000).expand(4, 1000)), {}, (4 + 1 + 4) * 2000),  # expanded: once
        (aten.mul_.Tensor, (made(1000), made(1000)), {}, 3 * 2000),
        (aten.zero_.default, (made(1000),), {}, 2000),
        (aten.copy_.default, (made(1000), made(1000, dtype=torch.float32)), {}, 2000 + 4000),
        (aten.add.out, (made(1000), made(1000)), {"out": made(1000)}, 3 * 2000),  # written, not read
        (aten.view.default, (made(4, 1000), [4000]), {}, 0),
        # Of rows that are picked, only those are moved.
        (aten.embedding.default, (made(50_000, 128), made(8, dtype=torch.int64)), {}, 2 * 8 * 128 * 2 + 8 * 8),
    ],
)
def test_what_is_read_and_written_is_moved_once(func: Any, args: Any, more: dict[str, Any], moved: int) -> None:
    demand = demand_of(func, *args, **more)
    assert (demand.flops, demand.moved_bytes) == (0.0, moved)


def test_an_update_of_some_rows_does_not_move_the_others() -> None:
    table, rows, values = made(50_000, 128), made(8, dtype=torch.int64), made(8, 128)
    moved = demand_of(aten.index_add_.default, table, 0, rows, values).moved_bytes
    assert moved < 5 * 8 * 128 * 2


def test_fsdp_moves_its_shards_and_not_the_whole_buffer_that_they_are_copied_into() -> None:
    import torch.distributed.fsdp

    shards, buffer = [made(1000), made(500)], made(128, 1500)
    demand = DemandCounter(torch.ops.fsdp.all_gather_copy_in.default).demand(
        (shards, buffer, [1000, 500], 1500, 3), {}, (buffer[3], buffer)
    )
    assert demand.moved_bytes == 2 * 1500 * 2


def test_a_fused_optimizer_reads_four_lists_and_writes_three() -> None:
    lists = [[made(1000, dtype=torch.float32)] for _ in range(4)]
    steps = [made(1, dtype=torch.float32)]
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    demand = DemandCounter(aten._fused_adamw_.default).demand(
        (*lists, [], steps), settings | {"amsgrad": False, "maximize": False}, None
    )
    assert demand.moved_bytes == pytest.approx(7 * 4000, rel=0.01)


def attention(func: Any, *args: Any, known: Any = None, **kwargs: Any) -> tuple[AttentionShape, float]:
    counter = DemandCounter(func) if known is None else DemandCounter(func, known)
    demand = counter.demand(args, kwargs, (args[0],))
    assert demand.attention is not None
    return demand.attention, demand.flops


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("_scaled_dot_product_cudnn_attention", "cudnn"),
        ("_scaled_dot_product_flash_attention", "flash2"),
        ("_scaled_dot_product_efficient_attention", "efficient"),
    ],
)
def test_an_attentions_sizes_are_those_of_its_tensors(name: str, library: str, causal: bool) -> None:
    query, key, value = made(2, 8, 512, 64), made(2, 2, 512, 64), made(2, 2, 512, 32)
    middle = () if library == "flash2" else (None, True)
    found, flops = attention(getattr(aten, name).default, query, key, value, *middle, 0.0, causal)
    assert found == AttentionShape("forward", library, 2, 8, 2, 512, 512, 64, 32, causal=causal)
    assert flops == 2 * 2 * 8 * 512 * (513 / 2 if causal else 512) * (64 + 32)


def backward_of(library: str, dropout: float = 0.0) -> tuple[AttentionShape, float]:
    query, none = made(1, 8, 512, 64), made(0)
    func = getattr(aten, f"_scaled_dot_product_{library}_attention_backward").default
    given = {argument.name: query for argument in func._schema.arguments if str(argument.type) == "Tensor"}
    given |= {"is_causal": False, "dropout_p": dropout, "max_q": 512, "max_k": 512}
    given |= {"cum_seq_q": none, "cum_seq_k": none}
    return attention(func, *(given.get(each.name) for each in func._schema.arguments if not each.kwarg_only))


@pytest.mark.parametrize(("library", "can"), [("flash", True), ("cudnn", True), ("efficient", False)])
def test_backward_of_an_attention_is_five_products_and_deterministic_if_torch_wants_that_and_the_kernel_can(
    library: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, forward = made(2, 8, 1024, 64), aten._scaled_dot_product_flash_attention.default
    found, flops = backward_of(library)
    assert flops == 5 * 2 * 8 * 512 * 512 * 64
    assert (found.direction, found.heads, found.queries) == ("backward", 8, 512)
    assert (found.dropout, found.deterministic) == (False, False)
    assert backward_of("cudnn", 0.1)[0].dropout
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backward_of(library)[0].deterministic == can
    shapes = [attention(forward, query, query, query, dropout)[0] for dropout in (0.0, 0.1)]
    assert [(shape.dropout, shape.deterministic) for shape in shapes] == [(False, False), (True, False)]


def packed(*more: Any, known: Any = None, window: int | None = None) -> tuple[AttentionShape, float]:
    query, key, ends = made(1000, 8, 64), made(1000, 2, 64), made(4, dtype=torch.int32)
    args = (query, key, key, ends, ends, 600, 600, 0.0, True, False)
    return attention(aten._flash_attention_forward.default, *args, known=known, window_size_left=window)


def test_packed_sequences_whose_lengths_are_known_are_counted_one_by_one() -> None:
    found, flops = packed(known=lambda tensor: torch.tensor([0, 100, 400, 1000], dtype=torch.int32))
    pairs = sum(length * (length + 1) / 2 for length in (100, 300, 600))
    assert flops == 2 * 8 * pairs * 128
    assert (found.heads, found.kv_heads, found.causal) == (8, 2, True)
    assert found.batch * found.queries == pytest.approx(1000, rel=0.01)
    assert found.keys == round((100**2 + 300**2 + 600**2) / 1000)


def test_packed_sequences_of_unknown_lengths_count_as_long_as_the_longest() -> None:
    found, flops = packed()
    assert (found.batch, found.queries, found.keys) == (2, 600, 600)
    assert flops == 2 * 2 * 8 * 600 * (601 / 2) * 128


def test_a_window_spares_the_keys_before_it() -> None:
    found, flops = packed(known=lambda tensor: torch.tensor([0, 1000], dtype=torch.int32), window=99)
    assert found.window == 100
    assert flops == 2 * 8 * (100 * 101 / 2 + 900 * 100) * 128


def test_flash_attns_own_operations_are_attentions() -> None:
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_test_backward(Tensor dout, Tensor q, Tensor k, Tensor v, float dropout_p, bool causal, "
        "int window_size_left, int window_size_right) -> Tensor"
    )
    query, key = made(2, 256, 16, 128), made(2, 512, 4, 128)
    func = torch.ops.flash_attn._flash_attn_test_backward.default
    found, flops = attention(func, query, query, key, key, 0.0, True, -1, -1)
    assert found == AttentionShape("backward", "flash2", 2, 16, 4, 256, 512, 128, 128, causal=True)
    met = 512 - (256 - 1) / 2  # the last query meets the last key
    assert flops == 5 * 2 * 2 * 16 * 256 * met * 128


@pytest.mark.parametrize(
    ("a", "b", "result", "shape"),
    [
        (made(64, 128), made(4, 256, 128).transpose(1, 2), made(64, 256), ProductShape(64, 256, 128, 1, 4, "TN")),
        (made(64, 256), made(4, 256, 128), made(64, 128), ProductShape(64, 128, 256, 1, 4, "NN")),
        (made(64, 256).t(), made(64, 128), made(4, 256, 128), ProductShape(4 * 256, 128, 16, 1, 4, "NT")),
        (made(4, 16, 128), made(4, 128, 256), made(4, 16, 256), ProductShape(4 * 16, 256, 128, 1, 4, "NN")),
    ],
)
def test_a_grouped_product_has_its_groups_rows_and_layout(a: Any, b: Any, result: Any, shape: ProductShape) -> None:
    demand = demand_of(aten._grouped_mm.default, a, b, result=result)
    assert demand.product == shape._replace(a_bytes=2, b_bytes=2, d_bytes=2)
    assert demand.flops == 2 * 64 * 128 * 256


@pytest.mark.parametrize(("scale", "scaling"), [((1,), "tensor"), ((64,), "row"), ((64, 1), "row"), ((64, 4), "block")])
def test_a_grouped_product_in_eight_bits_has_its_scaling(scale: tuple[int, ...], scaling: str) -> None:
    a, b = made(64, 128, dtype=torch.float8_e4m3fn), made(4, 256, 128, dtype=torch.float8_e4m3fn).transpose(1, 2)
    scales = made(*scale, dtype=torch.float32)
    demand = demand_of(aten._scaled_grouped_mm.default, a, b, scales, scales, result=made(64, 256))
    assert demand.product is not None
    assert (demand.product.scaling, demand.product.a_bytes, demand.product.d_bytes, demand.dtype) == (
        scaling, 1, 2, "fp8",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("func", "args", "width"),
    [
        (aten.native_layer_norm.default, (made(8, 4, 96), [4, 96], None, None, 1e-5), 384),
        (aten._fused_rms_norm.default, (made(8, 4, 96), [96], None, None), 96),
        (aten._softmax.default, (made(8, 500, 3), 1, False), 500),
        (aten._log_softmax.default, (made(8, 500), -1, False), 500),
        (aten.sum.dim_IntList, (made(8, 500), [0]), 8),
        (aten.mean.default, (made(8, 500),), 4000),
        (aten.linalg_vector_norm.default, (made(8, 500),), 4000),
        (aten.native_group_norm.default, (made(2, 6, 5), None, None, 2, 6, 5, 3, 1e-5), 10),
        (aten.add.Tensor, (made(8, 500), made(8, 500)), 0),
        (aten.nll_loss_forward.default, (made(16, 1000), made(16, dtype=torch.int64), None, 1, -100), 1000),
    ],
)
def test_the_length_of_the_rows_that_are_reduced_is_known(func: Any, args: Any, width: int) -> None:
    assert demand_of(func, *args).width == width


def test_a_conversion_to_eight_bits_has_the_sizes_of_its_matrix() -> None:
    source = made(4, 16, 128)
    func, eight = aten._to_copy.default, torch.float8_e4m3fn
    demand = demand_of(func, source, dtype=eight)
    assert (demand.quantized, demand.dtype, demand.moved_bytes) == ((64, 128), "fp8", 64 * 128 * 3)
    assert demand_of(aten.copy_.default, made(64, 128, dtype=eight), made(64, 128), False).quantized == (64, 128)
    assert demand_of(func, made(64, 128, dtype=eight), dtype=torch.bfloat16).quantized == (0, 0)
    assert demand_of(func, source, dtype=torch.float32).quantized == (0, 0)


@pytest.mark.parametrize(
    ("func", "shapes", "flops"),
    [
        (aten.mm.default, [(64, 32), (32, 16)], 2 * 64 * 32 * 16),
        (aten.bmm.default, [(3, 64, 32), (3, 32, 16)], 3 * 2 * 64 * 32 * 16),
        (aten.addmm.default, [(16,), (64, 32), (32, 16)], 2 * 64 * 32 * 16),
        (aten.baddbmm.default, [(3, 64, 16), (3, 64, 32), (3, 32, 16)], 3 * 2 * 64 * 32 * 16),
    ],
)
def test_a_products_arithmetic_is_torchs_count(func: Any, shapes: list[tuple[int, ...]], flops: float) -> None:
    from torch.utils.flop_counter import flop_registry

    tensors = [made(*shape) for shape in shapes]
    assert demand_of(func, *tensors).flops == flops == flop_registry[func._overloadpacket](*tensors, out_val=None)


def test_long_rows_of_a_softmax_are_read_three_times() -> None:
    def parts(func: Any, columns: int, *more: Any) -> dict[str, float]:
        rows = made(4, columns, dtype=torch.float32)
        args = (rows, *more) if "backward" not in str(func) else (rows, rows, *more)
        demand = DemandCounter(func).demand(args, {}, rows)
        return {part.words[0]: part.moved_bytes / rows.nbytes for part in demand.parts}

    assert parts(aten._log_softmax.default, 100_000, -1, False) == {"cunn_SoftMaxForward<": 4}
    assert parts(aten._log_softmax.default, 4096, -1, False) == {}
    assert parts(aten._log_softmax_backward_data.default, 100_000, -1, torch.float32) == {"cunn_SoftMaxBackward<": 4}
    assert parts(aten._softmax_backward_data.default, 4096, -1, torch.float32) == {"elementwise_kernel": 3}


def test_the_gradient_of_an_embedding_sums_its_rows_in_fp32() -> None:
    grad, indices = made(64, 128), made(64, dtype=torch.int64)
    demand = DemandCounter(aten.embedding_dense_backward.default).demand(
        (grad, indices, 50_000, -1, False), {}, made(50_000, 128)
    )
    bytes_of = {part.words[0]: part.moved_bytes for part in demand.parts}
    assert bytes_of == {"radix_sort": 4 * 64 * 8, "compute_grad_weight": 64 * 128 * 6, "sum_and_scatter": 64 * 128 * 6}


def test_what_comes_to_the_host_makes_it_wait() -> None:
    on_device, on_host = made(1000, dtype=torch.float32), torch.empty(1000)
    copy = DemandCounter(aten.copy_.default)
    assert copy.read_bytes((on_host, on_device), {}, on_host) == 4000
    assert copy.read_bytes((on_device, on_device), {}, on_device) == 0
    assert DemandCounter(aten._local_scalar_dense.default).read_bytes((on_device,), {}, 1.0) == 8
    assert DemandCounter(aten.add.Tensor).read_bytes((on_device, on_device), {}, on_device) == 0


def test_a_copy_to_pinned_memory_that_need_not_be_done_makes_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device, on_host = made(1000, dtype=torch.float32), torch.empty(1000)
    counters = DemandCounter(aten.copy_.default), DemandCounter(aten._to_copy.default)

    def reads() -> list[int]:
        return [
            counters[0].read_bytes((on_host, on_device, True), {}, on_host),
            counters[0].read_bytes((on_host, on_device), {"non_blocking": True}, on_host),
            counters[1].read_bytes((on_device,), {"non_blocking": True}, on_host),
        ]

    assert reads() == [4000, 4000, 4000], "the driver copies to pageable memory before it returns"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is on_host)
    assert reads() == [0, 0, 0]
    assert counters[0].read_bytes((on_host, on_device, False), {}, on_host) == 4000
    assert counters[0].may_read((on_host, on_device, True), on_host), "another copy of this size may wait"


def test_only_an_index_that_is_a_mask_makes_the_host_wait_for_its_positions() -> None:
    values, positions, mask = made(1000), made(10, dtype=torch.int64), made(1000, dtype=torch.bool)
    index = DemandCounter(aten.index.Tensor)
    assert index.read_bytes((values, [positions]), {}, made(10)) == 0
    assert index.read_bytes((values, [None, mask]), {}, made(10)) == 8
    put = DemandCounter(aten.index_put_.default)
    assert put.read_bytes((values, [positions], made(10)), {}, values) == 0
    assert put.read_bytes((values, [mask], made(10)), {}, values) == 8
    assert put.read_bytes((values, [mask], torch.tensor(0.0)), {}, values) == 0, "that is masked_fill"


def test_of_an_argument_that_is_given_twice_a_kernel_moves_one() -> None:
    tensor = torch.empty(10, device="meta")
    assert tensor_bytes((tensor, tensor, 3, None)) == 40
