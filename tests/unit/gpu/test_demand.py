"""FLOPs and bytes of operations, on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakedist.gpu.demand import Demand, DemandCounter, tensor_bytes

aten = torch.ops.aten


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def demand_of(func: Any, *args: Any, result: Any = None, **kwargs: Any) -> Demand:
    return DemandCounter(func).demand(args, kwargs, func(*args, **kwargs) if result is None else result)


def test_an_addition_reads_two_tensors_and_writes_one() -> None:
    demand = demand_of(aten.add.Tensor, made(4, 1000), made(4, 1000))
    assert (demand.flops, demand.moved_bytes) == (0.0, 3 * 4 * 1000 * 2)


def test_an_expanded_tensor_is_read_once() -> None:
    assert demand_of(aten.add.Tensor, made(4, 1000), made(1, 1000).expand(4, 1000)).moved_bytes == (4 + 1 + 4) * 2000


def test_in_place_reads_and_writes_and_a_fill_only_writes() -> None:
    tensor = made(1000)
    assert demand_of(aten.mul_.Tensor, tensor, made(1000)).moved_bytes == 3 * 2000
    assert demand_of(aten.zero_.default, tensor).moved_bytes == 2000
    assert demand_of(aten.copy_.default, tensor, made(1000, dtype=torch.float32)).moved_bytes == 2000 + 4000


def test_an_out_argument_is_written_not_read() -> None:
    out = made(1000)
    assert demand_of(aten.add.out, made(1000), made(1000), out=out).moved_bytes == 3 * 2000


def test_of_an_embedding_only_the_rows_that_are_picked_are_read() -> None:
    indices = made(8, dtype=torch.int64)
    assert demand_of(aten.embedding.default, made(50_000, 128), indices).moved_bytes == 2 * 8 * 128 * 2 + 8 * 8


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


def test_a_causal_attention_meets_half_of_the_keys() -> None:
    query, key = made(2, 8, 1024, 64), made(2, 8, 1024, 64)
    func = aten._scaled_dot_product_cudnn_attention.default
    whole, causal = (
        DemandCounter(func).demand((query, key, key, None, True, 0.0, masked), {}, (query,)) for masked in (False, True)
    )
    assert whole.flops == 2 * 2 * 8 * 1024 * 1024 * 128
    assert causal.flops == pytest.approx(whole.flops / 2, rel=1e-3)
    assert (whole.attention, whole.keys, whole.dtype) == ("forward.cudnn", 1024, "bf16")


def test_fewer_heads_of_keys_leave_the_arithmetic_as_it_is() -> None:
    query, key = made(1, 32, 512, 128), made(1, 8, 512, 128)
    demand = DemandCounter(aten._scaled_dot_product_flash_attention.default).demand((query, key, key), {}, (query,))
    assert demand.flops == 2 * 32 * 512 * 512 * 256
    assert demand.attention == "forward"


def test_backward_of_an_attention_is_five_products() -> None:
    query = made(1, 8, 512, 64)
    func = aten._scaled_dot_product_flash_attention_backward.default
    none = made(0)
    args = (query, query, query, query, query, none, none, none, 512, 512, 0.0, False, none, none)
    demand = DemandCounter(func).demand(args, {}, (query, query, query))
    assert demand.flops == 5 * 2 * 8 * 512 * 512 * 64
    assert demand.attention == "backward"


def test_groups_of_rows_have_the_arithmetic_of_all_rows() -> None:
    demand = DemandCounter(aten._grouped_mm.default).demand((made(64, 128), made(4, 128, 256)), {}, made(64, 256))
    assert demand.flops == 2 * 64 * 128 * 256


def test_a_convolution_counts_as_torch_counts_it() -> None:
    image, kernel = made(2, 3, 32, 32, dtype=torch.float32), made(8, 3, 3, 3, dtype=torch.float32)
    args = (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    demand = demand_of(aten.convolution.default, *args)
    assert demand.flops == 2 * 2 * 8 * 32 * 32 * 3 * 9
    assert demand.dtype == "tf32"


def test_what_comes_to_the_host_makes_it_wait() -> None:
    on_device, on_host = made(1000, dtype=torch.float32), torch.empty(1000)
    assert DemandCounter(aten.copy_.default).read_bytes((on_host, on_device), on_host) == 4000
    assert DemandCounter(aten.copy_.default).read_bytes((on_device, on_device), on_device) == 0
    assert DemandCounter(aten._local_scalar_dense.default).read_bytes((on_device,), 1.0) == 8
    assert DemandCounter(aten.add.Tensor).read_bytes((on_device, on_device), on_device) == 0


def test_of_an_argument_that_is_given_twice_a_kernel_moves_one() -> None:
    tensor = torch.empty(10, device="meta")
    assert tensor_bytes((tensor, tensor, 3, None)) == 40
