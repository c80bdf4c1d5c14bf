"""Small runs that differ as told, for comparisons and judgements."""

import shutil
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fakedist.rundir.trace_records import KernelsRecord
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.cost_model.times_by_hand import NAN, kernel, record
from tests.unit.report.handmade import built

#: Runs that were made once, each in a directory of its own, until the tests end.
_MADE = TemporaryDirectory(prefix="two-runs-")


def run_of(directory: Path, *arguments: Any, **options: Any) -> Path:
    """A copy of the run of :func:`_make`, whose arguments follow."""
    return Path(shutil.copytree(_made(*arguments, **options), directory))


@cache
def _made(*arguments: Any, **options: Any) -> Path:
    with chdir(_MADE.name):  # a run names the commit of the directory that it began in
        return _make(Path(_MADE.name) / str(_made.cache_info().misses), *arguments, **options)


def _make(
    directory: Path,
    activation: int = 8 * MIB,
    mlp: str = "mlp",
    num_layers: int = 3,
    line: int = 12,
    ended: str = "stopped",
    num_steps: int = 2,
    **more: Any,
) -> Path:
    """A run with `num_layers` blocks whose feed-forwards save `activation` bytes each, made at model.py:`line`.

    With ``gemm_us`` its second step is timed, from ``source``: each feed-forward takes so long, each norm 5 µs.
    Further settings are the job's.
    """
    gemm_us, source, job = more.pop("gemm_us", 0), more.pop("source", "estimated"), more
    made = HandMade()
    root = made.layer("(Net)", "Net")
    container = made.layer("layers", "ModuleList", root)
    mlps = []
    for number in range(num_layers):
        block = made.layer(f"layers.{number}", "Block", container)
        mlps.append(made.layer(f"layers.{number}.{mlp}", "MLP", block))
    stack = made.stack(("/site/torch/nn/linear.py", 5, "forward"), ("/job/model.py", line, "forward"))
    made.op("init", 0)
    for number, layer in enumerate(mlps):
        made.alloc((100 + 20 * number) * MIB, 16 * MIB)
        made.mark((100 + 20 * number) * MIB, "parameter", layer, 16 * MIB)
    for step in range(1, num_steps + 1):
        ops = []
        for number, layer in enumerate(mlps):
            ops.append(made.op("forward", step, layer, name="aten.addmm.default"))
            made.alloc((300 + 40 * number) * MIB, activation, stack=stack)
        made.op("backward", step, root)
        made.region(ops[0], ops[-1])
        made.alloc(600 * MIB, MIB)
        for number in range(num_layers):
            made.free((300 + 40 * number) * MIB, activation)
        made.op("optimizer", step)
        made.free(600 * MIB, MIB)
        made.step(step)
    made.record("groups", rows=[(0, "0", "tp", (0, 1), 0, 1, "nccl")])
    made.record("calls", rows=[(0, "all_reduce", 0, activation, activation, "float32", False, 0, 1, 0, -1, 0, 0)])
    made.record("call_lines", lines=[f"/job/model.py:{line} (forward)"])
    made.record("call_terms", rows=[("SUM", -1, 0, 0, (), (), False, 0)])
    if gemm_us:
        made.others.append(_timed(mlps, gemm_us, source))
    made.ended(ended)
    return built(made, directory, ended, **job)


def _timed(mlps: list[int], gemm_us: float, source: str) -> KernelsRecord:
    rows = []
    for number, layer in enumerate(mlps):
        at = number * (gemm_us + 10)
        rows.append(kernel(at, gemm_us, name="big_gemm", layer=layer, flops=1e9))
        rows.append(kernel(at + gemm_us + 2, 5, "norm", layer=layer - 1))
    end = len(mlps) * (gemm_us + 10)
    rows.append(kernel(1, NAN if source == "estimated" else 2, "communication", stream=7, call=0))
    return record(*rows, source=source, tool="model" if source == "estimated" else "cupti", step_us=end)
