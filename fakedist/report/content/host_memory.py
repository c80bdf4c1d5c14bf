"""The host's memory as tables: of the rank, of its node, by phase and line, and what was saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fakedist.analysis.blocks import node_memory
from fakedist.options import Job
from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Chapter,
    Fact,
    Facts,
    Remark,
    Sheet,
    SheetColumn,
    bytes_column,
)
from fakedist.results.run import Run
from fakedist.results.verdict import short_line
from fakedist.rundir.host_memory import HostMemory, HostPhase, NodeMemory, Save
from fakedist.rundir.notes import counted, listed
from fakedist.units import format_bytes, format_us

#: From here on a short report has it.
_MUCH_BYTES = 32 << 30
_NUM_LINES, _NUM_PHASES, _NUM_SAVES = 8, 12, 8


def node_text(node: NodeMemory) -> str:
    """Where a node needs most, and what its other ranks are taken to do."""
    others = node.num_ranks - len(node.recorded)
    at = f"step {node.step}, {node.phase}"
    if not others:
        return f"{at}: its ranks, all of which ran"
    as_one = f"if the other {others} hold" if others > 1 else "if the other one holds"
    most = f"{as_one} what rank {node.recorded[-1]} holds"
    if node.low_bytes == node.high_bytes:
        return f"{at}: {most}"
    return f"{at}: at most, {most}; {format_bytes(node.low_bytes)} at least, as it may save alone"


def short_figures(node: NodeMemory) -> list[Fact]:
    """The node's need on one line, where it is much or where it was said what the node has."""
    if node.limit_bytes is None and node.high_bytes < _MUCH_BYTES:
        return []
    has = "" if node.limit_bytes is None else f" that has {format_bytes(node.limit_bytes)}"
    at = f"in step {node.step}, {node.phase}"
    return [Fact("host", format_bytes(node.high_bytes), f"{at}, for a node of {counted(node.num_ranks, 'rank')}{has}")]


def node_remarks(runs: Iterable[Run]) -> list[str]:
    """For each node of which several ranks ran: the host memory that it needs."""
    nodes: dict[int, dict[int, Sequence[HostPhase]]] = {}
    jobs: dict[int, Job] = {}
    for run in runs:
        job, memory = run.manifest.job, run.summary.host_memory
        if job is not None and memory is not None:
            jobs[job.node_rank] = job
            nodes.setdefault(job.node_rank, {})[job.rank] = memory.phases
    remarks = []
    for number, ranks in nodes.items():
        if len(ranks) > 1:
            node = node_memory(ranks, jobs[number])
            limit = "" if node.limit_bytes is None else f"; it has {format_bytes(node.limit_bytes)}: {limit_text(node)}"
            needs = f"needs {format_bytes(node.high_bytes)} of host memory in {node_text(node)}"
            remarks.append(f"node {number} of {counted(node.num_ranks, 'rank')} {needs}{limit}")
    return remarks


def host_figures(memory: HostMemory) -> list[Fact]:
    """The rank's peak, its node's, and what is not part of either."""
    peak, node = memory.peak, memory.node
    kinds = (("pageable", peak.pageable_bytes), ("pinned", peak.pinned_bytes), ("/dev/shm", peak.shared_bytes))
    parts = listed([f"{format_bytes(size)} {kind}" for kind, size in kinds if size])
    rows = [Fact("this rank", format_bytes(peak.peak_bytes), f"step {peak.step}, {peak.phase}: {parts}")]
    if memory.pinned_used_bytes is not None and peak.pinned_bytes > memory.pinned_used_bytes:
        rest = format_bytes(peak.pinned_bytes - memory.pinned_used_bytes)
        rows.append(Fact("of it", rest, "in torch's cache of pinned memory, or added by its rounding to powers of two"))
    rows.append(Fact(f"a node of {node.num_ranks}", format_bytes(node.high_bytes), node_text(node)))
    if node.limit_bytes is not None:
        rows.append(Fact("the node has", format_bytes(node.limit_bytes), limit_text(node)))
    most = _most(memory.phases)
    if most.prefetched_bytes:
        rows.append(
            Fact("ahead, at most", format_bytes(most.prefetched_bytes), "batches that workers have in /dev/shm")
        )
    if most.mapped_bytes:
        own = f", {format_bytes(most.private_bytes)} of them its own where it writes" if most.private_bytes else ""
        rows.append(Fact("files in memory", format_bytes(most.mapped_bytes), f"pages that the kernel can drop{own}"))
    if most.other_bytes is not None:
        what = "of a rank: smaller tensors, Python's and NumPy's objects, libraries and this recording"
        rows.append(Fact("untracked, at most", format_bytes(most.other_bytes), what))
    return rows


def limit_text(node: NodeMemory) -> str:
    """Whether the node has enough."""
    assert node.limit_bytes is not None
    if node.low_bytes > node.limit_bytes:
        return f"too little: {format_bytes(node.low_bytes - node.limit_bytes)} are missing at least"
    if node.high_bytes > node.limit_bytes:
        return f"may be too little: up to {format_bytes(node.high_bytes - node.limit_bytes)} are missing"
    return f"{format_bytes(node.limit_bytes - node.high_bytes)} to spare"


def _most(phases: Sequence[HostPhase]) -> HostPhase:
    known = [phase.other_bytes for phase in phases if phase.other_bytes is not None]
    return HostPhase(
        0,
        "",
        prefetched_bytes=max(phase.prefetched_bytes for phase in phases),
        mapped_bytes=max(phase.mapped_bytes for phase in phases),
        private_bytes=max(phase.private_bytes for phase in phases),
        other_bytes=max(known, default=None),
    )


def host_memory_blocks(memory: HostMemory, cwd: str) -> list[Block]:
    """The host's memory of the rank and its node, by phase and line, and checkpoints."""
    return [
        Chapter("host-memory", "Host", "Host memory", "measured"),
        Facts(host_figures(memory), "Host memory, measured"),
        *map(Remark, memory.unknown),
        *host_memory_sheets(memory, cwd),
    ]


def host_memory_sheets(memory: HostMemory, cwd: str) -> list[Sheet]:
    """Tables of the host's memory by phase and line, and of checkpoints."""
    sheets = [host_phase_sheet(memory), host_line_sheet(memory, cwd), save_sheet(memory, cwd)]
    return [sheet for sheet in sheets if sheet.columns[0].cells]


def host_phase_sheet(memory: HostMemory) -> Sheet:
    """The phases, of many those with the most."""
    ordered = sorted(memory.phases, key=lambda phase: -phase.peak_bytes)[:_NUM_PHASES]
    rows = [phase for phase in memory.phases if phase in ordered and phase.peak_bytes]
    left_out = sum(phase.peak_bytes > 0 for phase in memory.phases) - len(rows)
    return Sheet(
        "Host memory by phase",
        [
            SheetColumn("step", [str(row.step) for row in rows]),
            SheetColumn("phase", [row.phase for row in rows], is_text=True, rank=KEY),
            bytes_column("most", [row.peak_bytes for row in rows], rank=KEY),
            bytes_column("pageable", [row.pageable_bytes for row in rows], rank=1),
            bytes_column("pinned", [row.pinned_bytes for row in rows], rank=1),
            bytes_column("/dev/shm", [row.shared_bytes for row in rows], rank=2),
        ],
        [f"{left_out} more phases with less: table host_phases"] if left_out else [],
    )


def host_line_sheet(memory: HostMemory, cwd: str) -> Sheet:
    """Memory at the peak by line."""
    rows = memory.lines[:_NUM_LINES]
    whole = memory.peak.peak_bytes or 1
    return Sheet(
        "Host memory at its peak by line",
        [
            SheetColumn("line", [short_line(row.line, cwd) or "(no line)" for row in rows], is_text=True),
            bytes_column("bytes", [row.bytes for row in rows], rank=KEY),
            SheetColumn("share", [f"{row.bytes / whole:.1%}" for row in rows], rank=1),
            SheetColumn("kind", [row.kind for row in rows], is_text=True, rank=1),
            SheetColumn("blocks", [f"{row.num_blocks:,}" for row in rows], rank=2),
        ],
    )


def save_sheet(memory: HostMemory, cwd: str) -> Sheet:
    """Checkpoints that were written, with their time at the storage's rate."""
    rows = memory.saves[:_NUM_SAVES]
    rate = memory.storage_bytes_per_s
    columns = [
        SheetColumn("checkpoint", [_function(row) for row in rows], is_text=True),
        SheetColumn("step", [str(row.step) for row in rows]),
        SheetColumn("written", [_written(row) for row in rows], rank=KEY),
        SheetColumn("line", [short_line(row.line, cwd) for row in rows], is_text=True, rank=2),
    ]
    remarks = []
    if rate:
        columns.insert(
            3, SheetColumn("takes, estimated", [_takes(row, rate, memory.node.num_ranks) for row in rows], rank=KEY)
        )
        remarks.append(
            f"takes: at {rate / 1e9:g} GB/s of the node, from this rank's bytes alone to those of all "
            f"{counted(memory.node.num_ranks, 'rank')}"
        )
    if any(row.written_bytes < 0 for row in rows):
        remarks.append("not known: another process writes it, or it was not done when the run ended")
    if len(memory.saves) > len(rows):
        remarks.append(f"{len(memory.saves) - len(rows)} more: table saves")
    return Sheet("Checkpoints written by this rank: bytes, measured", columns, remarks)


def _function(save: Save) -> str:
    return save.function.replace("torch.distributed.checkpoint", "dcp") + (" (goes on)" if save.asynchronous else "")


def _written(save: Save) -> str:
    return "not known" if save.written_bytes < 0 else format_bytes(save.written_bytes)


def _takes(save: Save, rate: int, num_ranks: int) -> str:
    if save.written_bytes < 0:
        return "not known"
    least, most = (format_us(times * save.written_bytes / rate * 1e6) for times in (1, num_ranks))
    return least if least == most else f"{least} to {most}"
