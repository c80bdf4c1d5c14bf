"""A small run that has one of everything a report shows."""

import dataclasses
import os
import shutil
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fakedist.gpu.models.catalogue import find_gpu
from fakedist.results.building import build_tables
from fakedist.rundir.directory import JOURNAL_NAME
from fakedist.rundir.launch_records import RangeRow
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.summary import Summary
from tests.support.runs import made_once
from tests.unit.analysis.recorded import GIB, GPU, KIB, MIB, HandMade, new_run
from tests.unit.cost_model import launches_by_hand
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch
from tests.unit.cost_model.times_by_hand import H100, NAN, kernel, record

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"


#: Builds of a process of ``make mutants``, which asks which files run a line and changes what they run.
_FOLDER = TemporaryDirectory(prefix="built-")
_ANEW = "FAKEDIST_BUILD_ANEW"


def built(made: HandMade, directory: Path, outcome: str = "stopped", **job: Any) -> Path:
    """The run directory of what was made, with its tables; further settings are the job's.

    Tests that make the same run share one build: all of them, or under ``make mutants`` those of a file.
    """
    run = made.write(new_run(directory, outcome, **job))
    journal = sha256((run / JOURNAL_NAME).read_bytes()).hexdigest()
    made_of = repr((str(Path.cwd()), outcome, sorted(job.items()), journal))

    def build(folder: Path) -> None:
        build_tables(run)
        shutil.copytree(run, folder, dirs_exist_ok=True)

    if _ANEW not in os.environ:
        kept = made_once(made_of, build)
    else:
        file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        kept = Path(_FOLDER.name) / sha256(f"{file} {made_of}".encode()).hexdigest()
        if not kept.exists():
            build(kept)
    shutil.copytree(kept, run, dirs_exist_ok=True)
    return run


def recorded() -> HandMade:
    """Three equal blocks of a transformer, an embedding and a head; two steps; one tensor-parallel group."""
    made = HandMade()
    root = made.layer("(Transformer)", "Transformer")
    embed = made.layer("embed", "Embedding", root)
    container = made.layer("layers", "ModuleList", root)
    blocks = [made.layer(f"layers.{number}", "Block", container) for number in range(3)]
    mlps = [made.layer(f"layers.{number}.mlp", "Linear", block) for number, block in enumerate(blocks)]
    line = made.stack(("/site/torch/nn/linear.py", 5, "forward"), ("/job/model.py", 12, "forward"))
    made.op("init", 0)
    made.alloc(0, 96 * MIB)
    made.mark(0, "parameter", embed, 96 * MIB)
    for number, mlp in enumerate(mlps):
        made.alloc((100 + 20 * number) * MIB, 16 * MIB)
        made.mark((100 + 20 * number) * MIB, "parameter", mlp, 16 * MIB)
    for step in (1, 2):
        first = made.op("forward", step, embed, name="aten.embedding.default")
        made.alloc(200 * MIB, 2 * MIB, stack=line)
        for number, mlp in enumerate(mlps):
            last = made.op("forward", step, mlp, name="aten.addmm.default")
            made.alloc((210 + 10 * number) * MIB, 8 * MIB, stack=line)
        made.op("backward", step, blocks[0], name="aten.mm.default")
        made.region(first, last)
        made.alloc(300 * MIB, 32 * MIB)
        made.mark(300 * MIB, "gradient", mlps[0], 32 * MIB)
        made.alloc(340 * MIB, 500 * KIB)
        made.mark(340 * MIB, "communication")
        for number in range(3):
            made.free((210 + 10 * number) * MIB, 8 * MIB)
        made.free(200 * MIB, 2 * MIB)
        made.op("optimizer", step)
        made.free(300 * MIB, 32 * MIB)
        made.free(340 * MIB, 500 * KIB)
        made.step(step)
    return made


def talking(made: HandMade) -> HandMade:
    made.record(
        "groups", rows=[(0, "0", "default_pg", tuple(range(8)), 0, 1, "nccl"), (1, "3", "tp", (0, 1), 0, 1, "nccl")]
    )
    rows = [(0, "all_reduce", 0, 96 * MIB, 96 * MIB, "float32", False, 0, 1, 0, -1, 0, 0)]
    rows += [
        (n, "all_gather_into_tensor", 1, MIB, 2 * MIB, "bfloat16", True, 0, 1, 0, -1, 0, 0) for n in range(1, 1235)
    ]
    made.record("calls", rows=rows)
    made.record("note", note={"code": "told", "text": "a word that a reader of these figures must know"})
    made.ended()
    return made


def ended_well(directory: Path) -> Path:
    return built(talking(recorded()), directory, arguments=("--layers", "3"))


def out_of_memory(directory: Path) -> Path:
    """The run of a rank that asked for more than there was in its second step."""
    made = recorded()
    op = made.op("forward", 3, 6, name="aten.addmm.default")
    made.event("oom", 0, 90 * GIB)
    line = "/job/model.py:12 (forward)"
    made.record("oom", device=0, requested_bytes=90 * GIB, op=op, layer="layers.2.mlp", line=line, message="")
    made.ended("out_of_memory", 4, "CUDA out of memory. Tried to allocate 90.00 GiB.")
    return built(made, directory, "out_of_memory")


def timed(directory: Path, source: str = "estimated") -> Path:
    """The run of :func:`recorded` with a timed step: three blocks forward, again and backward, two collectives."""
    made = talking(recorded())
    tool = "model" if source == "estimated" else "cupti"
    made.gpu = dataclasses.replace(GPU, peaks=H100)
    mlps = (7, 8, 9)
    rows = []
    for number, layer in enumerate(mlps):
        known = ("compute", "launch") if tool == "model" else ("", "")
        work = {"layer": layer, "flops": 4e9, "moved_bytes": 2e8, "bound": known[0]}
        small = {"layer": layer, "moved_bytes": 4e6, "bound": known[1], "family": "elementwise"}
        for start, phase, again in ((20, "forward", False), (320, "backward", True), (620, "backward", False)):
            at = start + 100.0 * number
            rows.append(kernel(at, 60.0 + number, launch_us=at - 15, phase=phase, recompute=again, name=GEMM, **work))
            rows.append(kernel(at + 70, 4, launch_us=at + 66, phase=phase, recompute=again, name=GELU, **small))
    rows.append(kernel(150, NAN if tool == "model" else 8, "communication", stream=9, call=0, layer=1))
    rows.append(kernel(700, NAN if tool == "model" else 8, "communication", stream=9, call=1, layer=1))
    rows.append(kernel(930, 20, "optimizer", phase="optimizer", launch_us=900, name="multi_tensor_apply_kernel<Adam>"))
    made.others.append(record(*rows, source=source, tool=tool, step_us=1000.0, step=3))
    return built(made, directory)


def measured(directory: Path) -> Path:
    return timed(directory, "measured")


def summary_of_nothing() -> Summary:
    """The figures of a run in which nothing was allocated; ``dataclasses.replace`` fills in what a test is about."""
    return Summary(
        world_size=8,
        rank=0,
        device="virtual",
        gpu="NVIDIA H100 80GB HBM3",
        torch="2.15.0",
        exit=Ending(Outcome.FINISHED, 0),
        left_during_init=None,
        fits=True,
        capacity_bytes=80 << 30,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        peak_step=0,
        peak_phase="init",
        estimated_outside=None,
        by_phase=[],
        by_category={},
        layers=[],
        largest_blocks=[],
        collectives=[],
        steps=[],
        kernels=None,
        time=None,
        out_of_memory=None,
        advice=[],
        invented_values=0,
    )


def overlapping(directory: Path) -> Path:
    """A step of two kernels, and a collective of 100 µs during which the second computes for 40 µs."""
    made = recorded()
    made.record("groups", rows=[(0, "0", "default_pg", (0, 1), 0, 0, "nccl")])
    made.record("calls", rows=[(0, "all_reduce", 0, MIB, MIB, "float32", False, 2, 1, 0, -1, 0, 0)])
    rows = [kernel(0, 5, layer=7), kernel(20, 40, layer=7), kernel(20, 100, "communication", stream=9, call=0)]
    made.others.append(record(*rows, source="measured", tool="cupti", step_us=150.0))
    made.ended()
    return built(made, directory)


def ranged(directory: Path) -> Path:
    """A step of two products on a virtual H100, in a range that contains another around the first of them."""
    made = recorded()
    made.gpu = dataclasses.replace(GPU, model=find_gpu("h100-80g"))
    launches = launches_by_hand.record([launch(PRODUCT, layer=7), launch(PRODUCT, layer=8)])
    ranges = [RangeRow("<b>outer</b>", 0, 0, 0, 2), RangeRow("inner", 0, 1, 0, 1)]
    made.others.append(dataclasses.replace(launches, ranges=ranges))
    made.ended()
    return built(made, directory)
