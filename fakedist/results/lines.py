"""Memory and time by line of source: what each line holds at the peak, and the kernels that it launches in the step.

A block or a kernel belongs to the innermost line outside of torch on its Python stack, and counts in the totals of
every line on that stack. In a backward, that is the line of the forward whose operation made the node that runs.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.stack_lines import frame_lines
from fakedist.results.run import Run
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.step_time import KernelSource

#: Sums of a line: of its own, and of these with all that it calls.
_OWN = ["allocated_bytes", "backward_bytes", "num_blocks", "kernel_us", "backward_us", "num_kernels", "num_unknown"]
_WITH_CALLS = ["allocated_bytes", "kernel_us"]


@dataclass(frozen=True)
class Lines:
    """Bytes at the peak and kernels of the timed step, by line.

    Attributes:
        table: A row for each line that holds or launches anything, itself or in what it calls; most bytes first, then
            most time. Columns: file, line, function; of its own, allocated_bytes (at the peak), backward_bytes (those
            that a backward allocated), num_blocks, kernel_us (kernels of the timed step, communication left out),
            backward_us (those of a backward, recomputation included), num_kernels, num_unknown (those of unknown
            duration); with what it calls, total_allocated_bytes, total_kernel_us.
        without_line: The same sums of what has no line.
        source: Source of the times; None if they are not known by line.
        why_no_time: Why not; else empty.
    """

    table: pd.DataFrame
    without_line: dict[str, float]
    source: KernelSource | None
    why_no_time: str


def lines_of(run: Run) -> Lines:
    """Memory and time of a run by line.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    held, (launched, source, why_no_time) = _held(run), _launched(run)
    amounts = pd.concat([held, launched], ignore_index=True).fillna(0.0)
    of_stack = amounts.groupby("stack")[_OWN].sum()
    calls = _calls(run, of_stack.index.to_numpy("i8"))
    own = calls[calls["is_innermost"]].set_index("stack")
    has_line = of_stack.index.isin(own.index)
    sums = of_stack[has_line].join(own[["file", "line"]]).groupby(["file", "line"])[_OWN].sum()
    totals = calls.join(of_stack[_WITH_CALLS], on="stack").groupby(["file", "line"])[_WITH_CALLS].sum()
    named = calls.drop_duplicates(["file", "line"]).set_index(["file", "line"])["function"]
    table = totals.add_prefix("total_").join(sums).fillna(0.0).join(named).reset_index()
    whole = [name for name in table.columns if name.endswith("_bytes") or name.startswith("num_")]
    table = table.astype(dict.fromkeys(whole, "int64"))
    order = ["allocated_bytes", "kernel_us", "total_allocated_bytes", "total_kernel_us"]
    table = table.sort_values([*order, "file", "line"], ascending=[False] * len(order) + [True, True], kind="stable")
    columns = ["file", "line", "function", *_OWN, *(f"total_{name}" for name in _WITH_CALLS)]
    without = {str(name): float(value) for name, value in of_stack[~has_line].sum().items()}
    return Lines(table[columns].reset_index(drop=True), without, source, why_no_time)


def _amounts(stack: object, **columns: object) -> pd.DataFrame:
    return pd.DataFrame({"stack": stack, **dict.fromkeys(_OWN, 0.0), **columns})


def _held(run: Run) -> pd.DataFrame:
    if run.memory is None:
        return _amounts(np.zeros(0, "i8"))
    blocks = run.table("blocks", ["bytes", "phase", "stack", "at_peak"])
    blocks = blocks[blocks["at_peak"]].reset_index(drop=True)
    in_backward = blocks["bytes"].where(blocks["phase"] == "backward", 0)
    return _amounts(blocks["stack"], allocated_bytes=blocks["bytes"], backward_bytes=in_backward, num_blocks=1)


def _launched(run: Run) -> tuple[pd.DataFrame, KernelSource | None, str]:
    nothing = _amounts(np.zeros(0, "i8"))
    if run.summary.timed is None:
        return nothing, None, "no step was timed"
    source = run.summary.timed[1]
    called = run.table("operation_stacks")
    if not len(called):
        return nothing, None, "the lines of a step's operations are recorded on the virtual GPU alone"
    kernels = run.table("kernels", ["op", "phase", "family", "duration_us"])
    kernels = kernels[kernels["family"] != "communication"].reset_index(drop=True)
    stack = kernels["op"].map(called.set_index("op")["stack"]).fillna(-1).astype("int64")
    known = kernels["duration_us"].fillna(0.0)
    amounts = _amounts(
        stack,
        kernel_us=known,
        backward_us=known.where(kernels["phase"] == "backward", 0.0),
        num_kernels=1,
        num_unknown=kernels["duration_us"].isna(),
    )
    return amounts, source, ""


def _calls(run: Run, stacks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pd.DataFrame:
    """The lines of stacks: stack, file, line, function, is_innermost. A line counts once in a stack."""
    frames = run.table("frames")
    lines = frame_lines([FrameRow(*row) for row in frames.itertuples(index=False)])
    has_line = np.array([bool(line) for line in lines], bool)
    wanted = run.table("stacks")["frames"].reindex(stacks[stacks >= 0])
    frame = wanted.explode().dropna().astype("int64")
    frame = frame[has_line[frame.to_numpy()]]
    files = {name: _absolute(name, run.manifest.cwd) for name in frames["filename"].unique()}
    rows = frames.assign(filename=frames["filename"].map(files)).iloc[frame.to_numpy()]
    calls = pd.DataFrame(
        {
            "stack": frame.index.to_numpy("i8"),
            "file": rows["filename"].to_numpy(object),
            "line": rows["line"].to_numpy("i8"),
            "function": rows["function"].to_numpy(object),
        }
    ).drop_duplicates(["stack", "file", "line"])
    return calls.assign(is_innermost=~calls["stack"].duplicated())


def _absolute(filename: str, cwd: str) -> str:
    return posixpath.normpath(posixpath.join(cwd, filename)) if cwd else filename
