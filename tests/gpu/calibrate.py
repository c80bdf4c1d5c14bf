"""Measure what kernels achieve on the GPU of this machine: ``make calibrate``.

    python -m tests.gpu.calibrate [--out FILE] [--rehearse]

Times products by size and dtype, attention, and kernels that move memory, and writes the curves of that GPU's compute
capability, and the fixed times, into fakedist/gpu/efficiency.json, with the machine, driver and torch that they were
measured on. Curves of other GPUs stay. Operands are random: zeros are multiplied at a higher clock.

Without a GPU it refuses. ``--rehearse`` runs the same on the virtual GPU, whose kernels take no time: the figures mean
nothing, are written to --out alone, and are marked so that no estimate can be made from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fakedist.errors import FakedistError, JobError
from fakedist.gpu.launch_demand import product_work
from fakedist.gpu.pricing import DATA, Efficiency, arithmetic, load_efficiency
from fakedist.gpu.work_shapes import ProductShape
from fakedist.gpu_models.known import GPUS, find_gpu
from fakedist.gpu_models.spec import GpuSpec
from fakedist.launch.machine import count_real_gpus
from fakedist.run.launch_records import WorkRow

REHEARSAL_GPU = "h100-80g"
_REPEATS, _TRIALS = 10, 5
_SQUARES = (256, 512, 1024, 2048, 4096, 8192)
#: (tokens, out, in) of layers of models from 1B to 70B, some of them sharded.
_LAYERS = (
    (4096, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 1024, 8192),
    (4096, 3584, 8192),
    (2048, 8192, 28672),
    (512, 4096, 4096),
)
_KEYS = (512, 1024, 2048, 4096, 8192, 16384)
_TOKENS, _HEAD_WIDTH, _HEADS = 16384, 128, 16
_MOVED_BYTES = (1e5, 1e6, 1e7, 1e8, 1e9)
_LEAST_FLOPS, _LEAST_BYTES = 1e7, 1e5


def main() -> int:
    """Measure and write; the exit code."""
    parser = argparse.ArgumentParser(description="Measure what kernels achieve on this machine's GPU.")
    parser.add_argument("--out", type=Path, help=f"file to write  [default: {DATA}]")
    parser.add_argument("--rehearse", action="store_true", help="on the virtual GPU; figures mean nothing")
    options = parser.parse_args()
    try:
        written = calibrate(options.out, options.rehearse)
    except FakedistError as error:
        print(f"calibrate: {error.message}: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"written: {written}")
    return 0


def calibrate(out: Path | None, rehearse: bool) -> Path:
    """Measure, and write the data.

    Raises:
        JobError: There is no GPU, or one whose peaks are not known; a rehearsal would overwrite real data.
    """
    if not rehearse and not count_real_gpus():
        raise JobError("there is no GPU here to measure", "--rehearse --out FILE runs it on the virtual GPU")
    if rehearse and (out is None or out.resolve() == DATA.resolve()):
        raise JobError("a rehearsal's figures are not measured", "give --out FILE that is not the package's own")
    with ExitStack() as stack:
        if rehearse:
            from fakedist.gpu.virtual import virtual_gpu

            stack.enter_context(virtual_gpu(find_gpu(REHEARSAL_GPU)))
        import torch

        product = torch.cuda.get_device_name()
        spec = next((spec for spec in GPUS.values() if spec.product == product), None)
        if spec is None:
            raise JobError(f"the peaks of {product} are not known", "add a file to fakedist/gpu_models/models")
        data = merged(
            load_efficiency(),
            Measured(spec, rehearse).all(),
            spec,
            machine("no GPU: a rehearsal" if rehearse else product),
        )
    path = out or DATA
    path.write_text(json.dumps(data | ({"rehearsal": True} if rehearse else {}), indent=1) + "\n")
    return path


def machine(product: str) -> dict[str, str]:
    """What the figures were measured on."""
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    today = datetime.date.today().isoformat()
    return {"gpu": product, "driver": driver, "torch": str(torch.__version__), "date": today} | {
        "machine": platform.platform()
    }


def merged(data: Efficiency, found: dict[str, Any], spec: GpuSpec, measured_on: dict[str, str]) -> Efficiency:
    """The data with what was found in place of that GPU's."""
    major, minor = spec.compute_capability
    key = f"{major}.{minor}"
    curves = {name: {"source": "measured", "points": points} for name, points in found["curves"].items()}
    fixed = {name: {"value": value, "source": "measured"} for name, value in found["fixed_us"].items()}
    sources = data["sources"] | {"measured": f"make calibrate on {measured_on['gpu']}, {measured_on['date']}"}
    known = data["curves"] | {key: data["curves"].get(key, {}) | curves}
    return data | {"measured_on": measured_on, "sources": sources, "fixed_us": fixed, "curves": known}


class Measured:
    """What was measured.

    Args:
        spec: The GPU.
        rehearse: Whether nothing is true of it.
    """

    def __init__(self, spec: GpuSpec, rehearse: bool) -> None:
        self._spec = spec
        self._rehearse = rehearse
        self._points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._kernel_us = 0.0

    def all(self) -> dict[str, Any]:
        """``fixed_us`` and ``curves``: name -> [size, achieved fraction of the peak] by size."""
        fixed = self._fixed()
        self._kernel_us = fixed["kernel"]
        for measure in (self._products, self._attention, self._memory, self._host_link):
            measure()
        curves = {
            name: [[size, round(statistics.median(found), 4)] for size, found in sorted(sizes.items())]
            for name, sizes in self._points.items()
        }
        return {"fixed_us": fixed, "curves": curves}

    def _fixed(self) -> dict[str, float]:
        import torch

        tiny = torch.zeros(32, device="cuda")
        kernel = _device_us(lambda: tiny.add_(1))
        operation = _host_us(lambda: tiny.view(-1))
        launch = max(_host_us(lambda: tiny.add_(1)) - operation, 0.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tiny.add_(1)
        found = {"kernel": kernel, "launch": launch, "operation": operation, "graph": _host_us(graph.replay)}
        return {name: round(max(value, 0.1), 2) for name, value in found.items()}

    def _products(self) -> None:
        import torch

        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
        if "fp8" in self._spec.peak_flops:
            dtypes["fp8"] = torch.float8_e4m3fn
        for name, dtype in dtypes.items():
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            for m, n, k in (*((size,) * 3 for size in _SQUARES), *_LAYERS):
                if name in ("fp32", "fp64") and m * n * k > 4096**3:
                    continue
                a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((m, k), (n, k)))
                size = float(a.element_size())
                work = product_work(
                    ProductShape(n, m, k, a_bytes=size, b_bytes=size, d_bytes=2.0 if name == "fp8" else size), name
                )
                one = torch.ones((), device="cuda")
                multiply: Callable[[], Any] = lambda a=a, b=b: a @ b.t()  # noqa: E731
                if name == "fp8":
                    multiply = lambda a=a, b=b, one=one: torch._scaled_mm(  # noqa: E731
                        a, b.t(), one, one, out_dtype=torch.bfloat16
                    )
                self._add(work, _device_us(multiply))
        torch.backends.cuda.matmul.allow_tf32 = False

    def _attention(self) -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for backend, library in ((SDPBackend.FLASH_ATTENTION, ""), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
            for keys in _KEYS:
                shape = (_TOKENS // keys, _HEADS, keys, _HEAD_WIDTH)
                made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
                flops = 4.0 * _TOKENS * _HEADS * keys * _HEAD_WIDTH
                moved = 4.0 * made[0].nbytes
                try:
                    with sdpa_kernel(backend):
                        out = torch.nn.functional.scaled_dot_product_attention(*made)
                        forward = _device_us(lambda made=made: torch.nn.functional.scaled_dot_product_attention(*made))
                except RuntimeError:  # not on this GPU
                    break
                grad = torch.randn_like(out)
                backward = _device_us(
                    lambda out=out, made=made, grad=grad: torch.autograd.grad(out, made, grad, retain_graph=True),
                    graphed=False,
                )
                for name, duration, times in (("forward", forward, 1.0), ("backward", backward, 2.5)):
                    work = WorkRow("", "library", "attention", "", flops * times, moved, "bf16")
                    self._add(work._replace(attention=name, library=library, keys=keys), duration)

    def _memory(self) -> None:
        for family, num_bytes, run, moved in _movers():
            if moved >= _LEAST_BYTES:
                self._add(WorkRow("", "kernel", family, "", 0.0, moved), _device_us(run), at=num_bytes)

    def _host_link(self) -> None:
        import torch

        for num_bytes in (1e4, 1e5, 1e6, 1e7, 1e8):
            host = torch.zeros(int(num_bytes), dtype=torch.uint8, pin_memory=True)
            target = torch.empty_like(host, device="cuda")
            duration = _device_us(lambda host=host, target=target: target.copy_(host, non_blocking=True))
            self._put("host", num_bytes, num_bytes / self._spec.host_bandwidth * 1e6 / self._without_fixed(duration))

    def _add(self, work: WorkRow, duration_us: float, at: float | None = None) -> None:
        """Add a measurement to the curve of what limits it, by these peaks."""
        duration = self._without_fixed(duration_us)
        flops, curve, size = arithmetic(work)
        memory = work.moved_bytes / self._spec.memory_bandwidth * 1e6
        compute = flops / self._spec.peak_flops[work.dtype] * 1e6 if curve else 0.0
        if compute > memory:
            if size >= _LEAST_FLOPS or work.attention:
                self._put(curve, size if work.attention else _rounded(size), compute / duration)
        elif not work.attention:
            self._put(f"memory.{work.family}", at or _rounded(work.moved_bytes), memory / duration)

    def _put(self, curve: str, size: float, fraction: float) -> None:
        if fraction > 1.0 and not self._rehearse and size > _MOVED_BYTES[2]:
            raise JobError(
                f"{curve} at {size:g} achieves {fraction:.0%} of {self._spec.product}'s peak", "are the peaks right?"
            )
        self._points[curve][size].append(min(fraction, 1.0))

    def _without_fixed(self, duration_us: float) -> float:
        return max(duration_us - self._kernel_us, 0.05)


def _movers() -> Iterator[tuple[str, float, Callable[[], Any], float]]:
    """Family, nominal bytes, what to run, bytes that it moves."""
    import torch

    for num_bytes in _MOVED_BYTES:
        numbers = max(int(num_bytes) // 6 // 4096, 1) * 4096
        x, y = (torch.zeros(numbers, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        rows, weight = x.view(-1, 4096), torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        yield "elementwise", num_bytes, lambda x=x, y=y: x + y, 6.0 * numbers
        yield "copy", num_bytes, lambda x=x, y=y: x.copy_(y), 4.0 * numbers
        yield "norm", num_bytes, lambda r=rows, w=weight: torch.nn.functional.rms_norm(r, (4096,), w), 4.0 * numbers
        yield "norm", num_bytes, lambda r=rows: torch.softmax(r, 1), 4.0 * numbers
        yield "other", num_bytes, lambda r=rows: torch.sum(r, 1), 2.0 * numbers
        lists = [[torch.zeros(max(numbers // 4, 1024), device="cuda")] for _ in range(4)]
        steps = [torch.ones((), device="cuda")]
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}

        def update(lists: Any = lists, steps: Any = steps, settings: Any = settings) -> None:
            torch._fused_adamw_(*lists, [], steps, maximize=False, **settings)

        yield "optimizer", num_bytes, update, 7.0 * lists[0][0].nbytes


def _device_us(run: Callable[[], Any], *, graphed: bool = True) -> float:
    """Microseconds that the device takes for one run: many in a CUDA graph, so that launches do not count."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()

    def many() -> None:
        for _ in range(_REPEATS):
            run()

    again: Callable[[], Any] = many
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            many()
        again = graph.replay
        again()
    times = []
    for _ in range(_TRIALS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        again()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _REPEATS)
    return statistics.median(times)


def _host_us(run: Callable[[], Any]) -> float:
    """Microseconds that the host takes for one run."""
    import torch

    times = []
    for _ in range(_TRIALS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            run()
        times.append((time.perf_counter() - start) * 1e4)
    torch.cuda.synchronize()
    return statistics.median(times)


def _rounded(size: float) -> float:
    """A size to half a power of ten, so that measurements of about one size are one point."""
    return float(f"{10 ** (round(2 * math.log10(size)) / 2):.2g}")


if __name__ == "__main__":
    sys.exit(main())
