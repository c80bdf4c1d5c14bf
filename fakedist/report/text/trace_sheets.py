"""Tables of a file of a real GPU: its processes, its steps, and its step's operations."""

from __future__ import annotations

from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn, us_column
from fakedist.results.run import Run
from fakedist.rundir.step_time import KernelSource

_NUM_OPERATIONS = 20


def file_sheets(source: KernelSource) -> list[Sheet]:
    """The work of each process on each GPU, and the steps; nothing for a run that fakedist recorded."""
    return [
        *([process_sheet(source)] if source.processes else []),
        *([step_sheet(source)] if source.steps else []),
    ]


def process_sheet(source: KernelSource) -> Sheet:
    """The whole file by process and GPU, whatever its steps."""
    rows = source.processes
    columns = [
        SheetColumn("process", [str(row.process) if row.process >= 0 else "-" for row in rows], is_text=True),
        SheetColumn("GPU", [" ".join(filter(None, (str(row.device), row.gpu))) for row in rows], is_text=True),
        SheetColumn("kernels", [f"{row.num_kernels:,}" for row in rows], rank=KEY),
        us_column("their time", [row.kernel_us for row in rows], KEY),
        SheetColumn("collectives", [f"{row.num_collectives:,}" for row in rows], rank=2),
        us_column("their time", [row.collective_us for row in rows], 2),
        SheetColumn("copies", [f"{row.num_copies:,}" for row in rows], rank=3),
        SheetColumn("fills", [f"{row.num_fills:,}" for row in rows], rank=4),
        SheetColumn("streams", [f"{row.num_streams:,}" for row in rows], rank=5),
        _shown([row.is_shown for row in rows]),
    ]
    return Sheet("The whole file, by process and GPU", columns, ["kernels: collectives among them"])


def step_sheet(source: KernelSource) -> Sheet:
    """The steps that ranges of the file mark."""
    rows = source.steps
    columns = [
        SheetColumn("step", [str(row.step) for row in rows], is_text=True),
        us_column("on the host", [row.range_us for row in rows], 2),
        us_column("on the GPU", [row.step_us for row in rows], KEY),
        us_column("GPU busy", [row.busy_us for row in rows], 1),
        SheetColumn("launches", [f"{row.num_kernels:,}" for row in rows], rank=3),
        _shown([row.is_shown for row in rows]),
    ]
    return Sheet("Steps of the file, measured", columns, ["on the GPU: from the end of the step before"])


def operation_sheet(run: Run, most: int = _NUM_OPERATIONS) -> Sheet:
    """The operations that launched most kernel time, collectives left out."""
    kernels = run.table("kernels", ["operation", "family", "duration_us"])
    kernels = kernels[kernels["family"].astype(str) != "communication"]
    names = kernels["operation"].astype(str).replace("", "(no operation traced)")
    sums = kernels["duration_us"].groupby(names).agg(["size", "sum"]).sort_values("sum", ascending=False)
    rows = sums.head(most)
    whole = float(sums["sum"].sum()) or 1.0
    columns = [
        SheetColumn("operation", [str(name) for name in rows.index], is_text=True),
        SheetColumn("kernels", [f"{count:,}" for count in rows["size"]], rank=2),
        us_column("time", rows["sum"].tolist(), KEY),
        SheetColumn("share", [f"{us / whole:.1%}" for us in rows["sum"]], rank=1),
    ]
    left = [f"not shown: {len(sums) - len(rows):,} more operations"] if len(sums) > len(rows) else []
    return Sheet("Time by operation, measured", columns, left)


def _shown(flags: list[bool]) -> SheetColumn:
    return SheetColumn("", ["shown" if flag and len(flags) > 1 else "" for flag in flags], is_text=True, rank=1)
