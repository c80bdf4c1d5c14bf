"""GPU models, fabrics and hosts as text: those that fakedist knows, and a step priced for several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.cost_model.breakdown import PEAK_DTYPE
from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.estimated import faster_gpus
from fakedist.cost_model.hosts import HOSTS, REFERENCE
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec
from fakedist.report.content.report_blocks import EMPTY_RANK, KEY, Report, Sheet, SheetColumn
from fakedist.report.content.wording import MFU_BASIS, clock_text, rate_of
from fakedist.results.verdict import lifting_option, limit_names, limit_text, relative_time, step_text, tied_limits
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import KernelSource, StepTime
from fakedist.units import format_bytes, format_us

_TERA, _GIGA = 1e12, 1e9
#: A step that is not this much shorter is not faster.
_FASTER = 0.99


def gpu_list() -> Sheet:
    """Every known GPU model: memory, dense peaks, bandwidths and power limit."""
    models = list(GPUS.values())

    def peak(dtype: str) -> list[str]:
        return [f"{spec.peak_flops[dtype] / _TERA:,.0f}" if dtype in spec.peak_flops else "-" for spec in models]

    return Sheet(
        "GPU models: TFLOP/s dense, GB/s one way",
        [
            SheetColumn("--gpu", [spec.name for spec in models], is_text=True),
            SheetColumn("product", [spec.product for spec in models], is_text=True, rank=4),
            SheetColumn("memory", [format_bytes(spec.memory_bytes) for spec in models], rank=KEY),
            *(SheetColumn(dtype, peak(dtype), rank=rank) for dtype, rank in (("fp8", 2), ("bf16", KEY), ("tf32", 3))),
            SheetColumn("memory GB/s", [f"{spec.memory_bandwidth / _GIGA:,.0f}" for spec in models]),
            SheetColumn(
                "NVLink GB/s",
                [f"{one / _GIGA:,.0f}" if one else "none" for one in (spec.nvlink_bandwidth for spec in models)],
            ),
            SheetColumn("host GB/s", [f"{spec.host_bandwidth / _GIGA:,.0f}" for spec in models], rank=2),
            SheetColumn("limit", [f"{spec.watts:,.0f} W" for spec in models], rank=1),
        ],
        ["for any other, write a GPU file: --gpu my_gpu.toml"],
        has_json=False,
    )


def fabric_list() -> Sheet:
    """Every known fabric: its domains, NICs and bandwidths."""
    fabrics = list(FABRICS.values())
    return Sheet(
        "Fabrics: GB/s one way",
        [
            SheetColumn("--fabric", [fabric.name for fabric in fabrics], is_text=True),
            SheetColumn("GPUs a domain", [str(fabric.gpus_per_node) for fabric in fabrics]),
            SheetColumn("NICs", [str(fabric.nics_per_node) for fabric in fabrics]),
            SheetColumn("GB/s of one", [f"{fabric.nic_bandwidth / _GIGA:,.0f}" for fabric in fabrics]),
            SheetColumn("reached", [f"{fabric.achieved:.0%}" for fabric in fabrics], rank=2),
            SheetColumn("hop", [f"{fabric.hop_us:g} µs" for fabric in fabrics], rank=1),
            SheetColumn("from", [fabric.source for fabric in fabrics], is_text=True, rank=3),
        ],
        ["for any other, write a fabric file: --fabric my_fabric.toml"],
        has_json=False,
    )


def host_list() -> Sheet:
    """Every known host: its processor, a forward of Linear, CUDA's own calls, and its interval."""
    hosts = list(HOSTS.values())

    def us(name: str) -> list[str]:
        return [f"{getattr(host.calls, name):g} µs" for host in hosts]

    return Sheet(
        "Hosts",
        [
            SheetColumn("--host", [host.name for host in hosts], is_text=True),
            SheetColumn("processor", [host.cpu for host in hosts], is_text=True, rank=2),
            SheetColumn("forward of Linear", [f"{host.linear_us:g} µs" for host in hosts], rank=KEY),
            SheetColumn("launch", us("launch_us")),
            SheetColumn("product", us("product_us"), rank=1),
            SheetColumn("copy", us("copy_us"), rank=2),
            SheetColumn("collective", us("collective_us"), rank=1),
            SheetColumn("calls in a step", [f"x {host.calls_scale:g}" for host in hosts], rank=1),
            SheetColumn("true time", [f"{host.least:g} to {host.most:g} times" for host in hosts], rank=1),
        ],
        ["this: the machine that records; 1.5: so many times its time; for any other, write a host file"],
        has_json=False,
    )


@dataclass(frozen=True)
class GpuStep:
    """A step priced for a GPU and a fabric, and ``lifted`` with an option that lifts its limit; "" if there is none."""

    gpu: GpuSpec
    time: StepTime
    source: KernelSource
    lifted_by: str = ""
    lifted: StepTime | None = None


def lifting(step: GpuStep) -> tuple[str, str]:
    """The option of ``fakedist time`` that would lift the limit of a step, and its value; empty if none is known."""
    kind = step.time.limits[0].kind if step.time.limits else ""
    if kind == "kernels":
        return next((("--gpu", spec.name) for spec in faster_gpus(step.gpu)), ("", ""))
    if kind == "host" and _other_host(step):
        return "--host", REFERENCE
    return lifting_option(step.time.limits[0]) if kind else ("", "")


def _other_host(step: GpuStep) -> str:
    """The name of a step's host; empty if it is the reference, or not known."""
    name = "" if step.source.host is None else step.source.host.model
    return "" if name == REFERENCE else name


def gpus_report(path: Path, own: GpuStep, rows: Sequence[GpuStep]) -> Report:
    """A run's step on several GPUs and fabrics."""
    data = {"run_directory": str(path), "priced": priced_objects(own, rows)}
    return Report("time", [priced_sheet(own, rows)], lambda: data)


def priced_sheet(own: GpuStep, rows: Sequence[GpuStep]) -> Sheet:
    """A step on several GPUs and fabrics, next to the run's own. A surprise has its cause below the table."""
    times = [row.time for row in rows]
    rates = [rate_of(time) for time in times]
    remarks = [
        f"MFU: {MFU_BASIS}",
        f"changes by: from {own.time.step_us / 1e3:,.1f} ms on {own.gpu.name} with {own.source.fabric}"
        + ("; =: the intervals overlap" if any(_is_tied(own, row) for row in rows) else ""),
    ]
    remarks += [cause for row in rows if (cause := _surprise(_alike(own, row, rows), row))]
    limits = [_limited_by(row) for row in rows]
    remarks += dict.fromkeys(
        f"next to {row.gpu.name}: the host {name}; --host replaces it"
        for row, limit in zip(rows, limits, strict=True)
        if (name := _other_host(row)) and name not in limit
    )
    return Sheet(
        "The step on each GPU and fabric, estimated",
        [
            SheetColumn("GPU", [row.gpu.name for row in rows], is_text=True),
            SheetColumn("fabric", [row.source.fabric for row in rows], is_text=True),
            SheetColumn("step", [step_text(time) for time in times], rank=KEY),
            SheetColumn("changes by", [_changes_by(own, row) for row in rows], rank=KEY),
            SheetColumn("computes", [f"{time.busy_us / (time.step_us or 1):.0%}" for time in times], rank=4),
            SheetColumn("MFU", [_percent(time.step_flops_utilisation) for time in times], rank=1),
            SheetColumn(rates[0][0], [f"{rate:,.0f}" if rate else "-" for _, rate in rates], rank=2),
            SheetColumn("clock", [_percent(row.source.clock, 0) for row in rows], rank=3),
            SheetColumn("then limited by", limits, is_text=True, rank=KEY if any(limits) else EMPTY_RANK),
        ],
        remarks,
    )


def _is_tied(own: GpuStep, row: GpuStep) -> bool:
    """Whether the intervals of two steps overlap; a step without one has only its estimate."""
    (low, high), (other_low, other_high) = (
        (step.step_us if us is None else us for us in (step.step_low_us, step.step_high_us))
        for step in (own.time, row.time)
    )
    return low <= other_high and other_low <= high


def _changes_by(own: GpuStep, row: GpuStep) -> str:
    if _is_tied(own, row):
        return f"= {relative_time(row.time.step_us, own.time.step_us, 0)}"
    return relative_time(row.time.step_us, own.time.step_us)


def _limited_by(row: GpuStep) -> str:
    """A limit, and the option that lifts it: "the host: grace launches at 1.8 x; --host dgx-h100: 1.27 s"."""
    limits = tied_limits(row.time)
    name = _other_host(row)
    words = limit_names(limits) if limits else ""
    slowness = _slowness(row)
    if name and slowness:
        words += f": {name} launches at {slowness:.1f} x"
    elif name and any(limit.kind == "host" for limit in limits):
        words += f" ({name})"
    is_shorter = row.lifted is not None and row.lifted.step_us < row.time.step_us
    return f"{words}; {row.lifted_by}: {format_us(row.lifted.step_us)}" if row.lifted and is_shorter else words


def _slowness(row: GpuStep) -> float:
    """How many times as long as the reference a step's host takes to launch it; 0 if that was not priced."""
    if row.lifted is None or not row.lifted_by.startswith("--host "):
        return 0.0
    own, other = (
        next((limit.step_us for limit in time.limits if limit.kind == "host"), 0.0) for time in (row.time, row.lifted)
    )
    return own / other if other else 0.0


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _alike(own: GpuStep, row: GpuStep, rows: Sequence[GpuStep]) -> GpuStep:
    """The run's own GPU on this row's fabric, if it was priced; else the run's own step."""
    alike = (other for other in rows if other.gpu.name == own.gpu.name and other.source.fabric == row.source.fabric)
    return next(alike, own)


def _surprise(own: GpuStep, row: GpuStep) -> str:
    """Why a GPU whose peaks are higher is not faster; empty if it is, or if its peaks are not."""
    peaks = [spec.peak_flops.get(PEAK_DTYPE, 0.0) + spec.memory_bandwidth for spec in (own.gpu, row.gpu)]
    is_better = row.gpu.name != own.gpu.name and peaks[1] > peaks[0]
    if not is_better or row.time.step_us < _FASTER * own.time.step_us:
        return ""
    other = f"on another fabric than {own.source.fabric}" if row.source.fabric != own.source.fabric else ""
    causes = [text for text in (other, clock_text(row.source), limit_text(row.time)) if text]
    return f"{row.gpu.name} with {row.source.fabric} is not faster: {'; '.join(causes)}"


def priced_objects(own: GpuStep, rows: Sequence[GpuStep]) -> list[dict[str, object]]:
    """The same for ``--json``: ``gpu``, ``fabric``; ``kernels`` and ``time`` as in the summary; what the table adds."""
    return [
        {
            "gpu": row.gpu.name,
            "fabric": row.source.fabric,
            "kernels": to_plain(row.source),
            "time": to_plain(row.time),
            "changes_by": row.time.step_us / own.time.step_us - 1 if own.time.step_us else None,
            "is_tied": _is_tied(own, row),
            "limited_by": to_plain(tied_limits(row.time)),
            "lifted_by": row.lifted_by or None,
            "lifted_us": None if row.lifted is None else row.lifted.step_us,
        }
        for row in rows
    ]
