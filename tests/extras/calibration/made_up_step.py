"""A recorded step of a small transformer, and traces of it as torch.profiler writes them on a GPU."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.rundir.launch_records import WorkRow

GPU = "NVIDIA H100 80GB HBM3"
_ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, {}>"
_FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>, true>(flash::Flash_fwd_params)"


def product(m: int, n: int, k: int, operation: str = "aten.mm.default") -> WorkRow:
    flops, moved = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
    work = WorkRow("cublasGemmEx", "product", "gemm", operation, flops, moved, "bf16", batch=1, m=m, n=n, k=k)
    return work._replace(layout="TN", a_bytes=2.0, b_bytes=2.0, d_bytes=2.0)


def kernel(name: str, operation: str, moved: float, family: str = "elementwise") -> WorkRow:
    return WorkRow(name, "kernel", family, operation, 0.0, moved, "bf16")


@dataclass(frozen=True)
class Launched:
    """A launch: its work, its grid, how long a GPU takes for it, and the name that the GPU's kernel has."""

    work: WorkRow
    grid: str
    duration_us: float
    name: str
    operations: tuple[str, ...]


def layer(number: int) -> list[Launched]:
    """The launches of one layer. Its sizes are those of every other layer, but its norm's name counts layers."""
    names = ("aten::mm", "aten::matmul")
    wide, narrow = product(512, 3072, 1024), product(512, 1024, 1024)
    up, down = product(512, 4096, 1024), product(512, 1024, 4096)
    add = kernel(_ADD.format("std::array<char*, 3ul>"), "aten.add.Tensor", 6.0 * 512 * 1024)
    attention = kernel(_FLASH, "aten._flash_attention_forward.default", 4e6, "attention")
    return [
        Launched(wide, "", 50.0, "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", names),
        Launched(attention, "8,1,16", 33.0, _FLASH, ("aten::_flash_attention_forward", "aten::_scaled_dot_product")),
        Launched(narrow, "", 20.0, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", names),
        Launched(add, "256,1,1", 5.0, add.name, ("aten::add",)),
        Launched(up, "", 70.0, "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", names),
        Launched(down, "", 66.0, "nvjet_tst_128x256_64x4_1x2_h_bz_splitK_TNT", names),
        Launched(add, "256,1,1", 5.0, add.name, ("aten::add",)),
    ]


def step(num_layers: int = 6) -> list[Launched]:
    """The launches of a step: a batch copied to the GPU, layers, a loss, an optimizer, a zeroed buffer."""
    batch = WorkRow("Memcpy HtoD", "copy", "copy", "aten._to_copy.default", 0.0, 4096.0, "", over_host_link=True)
    loss = kernel("void cunn_SoftMaxForward<4, float>(float*)", "aten._log_softmax.default", 1e6, "norm")
    adam = kernel(
        "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "aten._fused_adamw_", 9e6, "optimizer"
    )
    zero = WorkRow("Memset (Device)", "fill", "copy", "aten.zero_.default", 0.0, 1024.0, "")
    return [
        Launched(batch, "", 9.0, "Memcpy HtoD (Pinned -> Device)", ("aten::copy_", "aten::_to_copy")),
        *(each for number in range(num_layers) for each in layer(number)),
        Launched(loss, "512,1,1", 12.0, loss.name, ("aten::_log_softmax",)),
        Launched(adam, "900,1,1", 120.0, adam.name, ("aten::_fused_adamw_",)),
        Launched(zero, "", 1.5, "Memset (Device)", ("aten::zero_",)),
    ]


def tables(launched: list[Launched]) -> tuple[pd.DataFrame, pd.DataFrame]:
    places: dict[WorkRow, int] = {}
    rows = [
        {"what": each.work.kind, "work": places.setdefault(each.work, len(places)), "grid": each.grid}
        for each in launched
    ]
    rows.insert(3, {"what": "stream_waits", "work": -1, "grid": ""})
    collective = WorkRow("all_reduce", "collective", "communication", "c10d.allreduce_.default")
    rows.insert(5, {"what": "collective", "work": places.setdefault(collective, len(places)), "grid": ""})
    return pd.DataFrame(rows), pd.DataFrame(list(places), columns=list(WorkRow._fields))


@dataclass
class Tracing:
    """Writes launches as a Chrome trace.

    Attributes:
        changed: Changes a launch, or drops it (None), by its place in the trace.
        with_inputs: Traces the sizes of operands (``record_shapes=True``).
        with_operations: Traces the host's operations.
        nccl_every: A kernel of NCCL follows every so many launches.
    """

    changed: Callable[[int, Launched], Launched | None] = lambda place, launch: launch
    with_inputs: bool = False
    with_operations: bool = True
    nccl_every: int = 5
    pid: int = 4711

    def events(self, launched: list[Launched]) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        host, device, number = 1e6, 1e6 + 50, 0
        for place, each in enumerate(launched):
            launch = self.changed(place, each)
            if launch is not None:
                number += 1
                found += self._launch(launch, host, device, number)
            host, device = host + 10, max(device, host) + each.duration_us + 1
            if self.nccl_every and place % self.nccl_every == 0:
                number += 1
                nccl = Launched(each.work, "16,1,1", 400.0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", ("nccl:all",))
                found += self._launch(nccl, host, device, number)
                host += 10
        return found

    def write(self, path: Path, launched: list[Launched], **header: object) -> Path:
        devices = [{"id": 0, "name": GPU}]
        path.write_text(
            json.dumps({"deviceProperties": devices, **header, "traceEvents": self.events(launched)}, indent=1)
        )
        return path

    def _launch(self, launch: Launched, host: float, device: float, number: int) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        more: dict[str, object] = {"External id": number}
        if self.with_inputs and launch.work.m:
            more["Input Dims"] = [[launch.work.m, launch.work.k], [launch.work.k, launch.work.n], []]
        for depth, name in enumerate(reversed(launch.operations if self.with_operations else ())):
            is_innermost = depth == len(launch.operations) - 1
            args = more if is_innermost else {"External id": 100_000 + 10 * number + depth}
            times = {"ts": host + depth / 10, "dur": 8 - depth / 5}
            found.append({"ph": "X", "cat": "cpu_op", "name": name, "pid": self.pid, "tid": 1, "args": args, **times})
        call = {"External id": number, "correlation": number}
        found.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": self.pid, "tid": 1, "ts": host + 4,
             "dur": 2, "args": call}
        )  # fmt: skip
        category = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(launch.name[:6], "kernel")
        args = {**call, "device": 0, "stream": 7}
        if category == "kernel":
            args |= {"grid": [int(side) for side in (launch.grid or "132,1,1").split(",")], "block": [128, 1, 1]}
        else:
            args["bytes"] = int(launch.work.moved_bytes)
        times = {"ts": device, "dur": launch.duration_us}
        found.append({"ph": "X", "cat": category, "name": launch.name, "pid": 0, "tid": 7, "args": args, **times})
        return found


def renamed(launch: Launched, name: str, **changes: object) -> Launched:
    return dataclasses.replace(launch, name=name, **changes)  # type: ignore[arg-type]
