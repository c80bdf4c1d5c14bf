"""Which measured kernel stands for one that was not measured, how much slower it is, and how unsure that makes it."""

import math
from typing import Any

import numpy as np
import pytest

from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.kernels.rules import memory_rule
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.launch_records import WorkRow
from tests.unit.cost_model.work_by_hand import attention, moving, product, work


@pytest.fixture(scope="module")
def h100() -> KernelTimes:
    return KernelTimes(GPUS["h100-80g"])


@pytest.mark.parametrize(
    ("family", "name", "operation", "kind", "slower"),
    [
        ("norm", "vectorized_layer_norm_kernel", "aten.native_layer_norm.default", "layer_norm.forward", 1.0),
        ("norm", "GammaBetaBackwardCUDAKernel", "aten.native_layer_norm_backward.default", "layer_norm.backward", 1.0),
        ("norm", "vectorized_layer_norm_kernel", "aten._fused_rms_norm.default", "rms_norm.forward", 1.0),
        ("norm", "layer_norm_grad_input_kernel", "aten._fused_rms_norm_backward.default", "rms_norm.backward", 1.0),
        ("norm", "ln_bwd_kernel", "", "layer_norm.backward", 1.0),
        ("norm", "triton_red_fused_native_layer_norm_0", "", "layer_norm.forward.compiled", 1.0),
        ("norm", "triton_per_fused__fused_rms_norm_backward_1", "", "rms_norm.backward.compiled", 1.0),
        ("norm", "batch_norm_collect_statistics_kernel", "aten.native_batch_norm.default", "layer_norm.forward", 1.0),
        ("norm", "transformer_engine::rmsnorm_fwd", "", "rms_norm.forward.compiled", 1.0),
        ("norm", "softmax_warp_forward", "aten._softmax.default", "elementwise", 1.2),
        ("norm", "triton_red_fused_nll_loss_forward_2", "", "elementwise", 1.2),
        ("norm", "vectorized_layer_norm_kernel", "apex.aten.layer_norm", "layer_norm.forward", 1.0),
        ("other", "triton_red_fused_sum_0", "", "rms_norm.forward.compiled", 1.0),
        ("other", "triton_poi_fused_sum_0", "", "elementwise", 1.1),
        ("other", "reduce_kernel", "aten.sum.dim_IntList", "elementwise", 1.1),
        ("other", "DeviceRadixSortOnesweepKernel", "aten.sort.stable", "elementwise", 3.0),
        ("other", "sbtopk::gatherTopK", "aten.topk.default", "elementwise", 3.0),
        ("other", "_chunk_scan_bwd_dz_kernel", "", "elementwise", 1.1),
        ("other", "_chunk_cumsum_fwd_kernel", "", "elementwise", 1.1),
        ("other", "tensor_kernel_scan_innermost_dim", "aten.cumsum.default", "elementwise", 3.0),
        ("copy", "sum_and_scatter", "aten.embedding_dense_backward.default", "elementwise", 2.0),
        ("copy", "elementwise_kernel", "aten.index_put_.default", "elementwise", 2.0),
        ("copy", "elementwise_kernel", "aten.scatter_add_.default", "elementwise", 2.0),
        ("copy", "vectorized_gather_kernel", "aten.embedding.default", "elementwise", 1.25),
        ("copy", "elementwise_kernel", "aten.scatter_.value", "elementwise", 1.25),
        ("copy", "multi_tensor_apply_kernel", "fsdp.all_gather_copy_in.default", "elementwise", 1.0),
        ("copy", "chunk_cat_cuda_kernel", "fsdp.reduce_scatter_copy_in.default", "elementwise", 2.02),
        ("copy", "triton_red_fused_0", "", "elementwise", 1.0),
        ("optimizer", "multi_tensor_apply_kernel", "aten.sort.stable", "elementwise", 1.0),
        ("gemm", "splitKreduce_kernel", "aten.mm.default", "elementwise", 1.2),
        ("attention", "flash_bwd_dot_do_o_kernel", "", "elementwise", 1.2),
        ("a family of tomorrow", "kernel", "", "elementwise", 1.0),
    ],
)
def test_each_kernel_that_memory_limits_is_taken_for_a_measured_one(
    family: str, name: str, operation: str, kind: str, slower: float
) -> None:
    rule = memory_rule(family, name, operation)
    assert (rule.kind, rule.slower) == (kind, slower)


def widths(times: KernelTimes, *rows: WorkRow) -> list[float]:
    """Half the intervals' widths, in logarithms."""
    priced = times.price(work(*rows), np.zeros(len(rows)))
    return [math.log(high / time) for high, time in zip(priced["high_us"], priced["time_us"], strict=True)]


@pytest.mark.parametrize(
    ("plain", "changed", "adds"),
    [
        (product(8192, 4096, 4096), {"layout": "NN"}, [0.08]),
        (product(8192, 4096, 4096), {"accumulates": True}, [0.05]),
        (product(8192, 4096, 4096), {"layout": "NT", "accumulates": True}, [0.08, 0.05]),
        (product(8192, 4096, 4096, dtype="fp8"), {"scaling": "row"}, [0.10]),
        (attention(4096, causal=False), {"dropout": True}, [0.12]),
        (attention(4096, "backward"), {"deterministic": True}, [0.15]),
        (attention(4096, library="flash2"), {"library": ""}, [0.25]),
        (attention(4096, library="cudnn"), {"library": "flash3"}, []),
        (attention(4096), {"dtype": "fp8"}, [0.35]),
    ],
)
def test_independent_assumptions_add_in_squares(
    h100: KernelTimes, plain: WorkRow, changed: dict[str, Any], adds: list[float]
) -> None:
    before, after = widths(h100, plain, plain._replace(**changed))
    assert after == pytest.approx(math.sqrt(before**2 + sum(width**2 for width in adds)), rel=0.03)


def test_copies_over_the_link_reach_the_fraction_of_it_that_their_memory_allows(h100: KernelTimes) -> None:
    rows = [moving(size, "copy", "Memcpy HtoD")._replace(over_host_link=True) for size in (0.0, 1e5, 1e9)]
    link = GPUS["h100-80g"].host_bandwidth
    for pinned, fraction in ((True, 0.85), (False, 0.3)):
        priced = h100.price(work(*(row._replace(pinned=pinned) for row in rows)), np.zeros(3))
        moved_us = [size / (fraction * link) * 1e6 for size in (0.0, 1e5, 1e9)]
        assert priced["time_us"].tolist() == pytest.approx([8 + moved for moved in moved_us])
        assert priced["bound"].tolist() == ["launch", "launch", "memory"]


def test_attention_of_which_only_the_flops_are_known_reaches_half_of_the_peak(h100: KernelTimes) -> None:
    row = attention(4096)._replace(heads=0, flops=1e12, moved_bytes=1.0)
    (priced,) = h100.price(work(row), np.zeros(1)).to_dict("records")
    assert priced["time_us"] == pytest.approx(4 + 1e12 / (0.5 * GPUS["h100-80g"].peak_flops["bf16"]) * 1e6)
    assert math.log(priced["high_us"] / priced["time_us"]) == pytest.approx(0.45)
