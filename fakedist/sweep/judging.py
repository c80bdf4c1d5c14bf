"""How a rank of a point ended: it ran, does not fit, the layout is invalid, or it failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakedist.errors import JobError, RunDirectoryError, WorldError
from fakedist.launch.executors.task import TaskResult
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.results.stages import stages_of_job
from fakedist.run.directory import JOURNAL_NAME
from fakedist.run.journal import read_journal
from fakedist.run.outcome import Outcome
from fakedist.run.records import OutcomeRecord
from fakedist.run.summary import Summary
from fakedist.sweep.records import RankKind, RankResult
from fakedist.units import MIB, format_bytes

#: A process's CUDA context with PyTorch where nothing is published for the GPU: "around 400MB" with CUDA 11.7 or newer,
#: which load kernels lazily (ptrblck of NVIDIA, pytorch/pytorch#109888).
CONTEXT_BYTES = 400 * MIB
#: By these errors a script or a framework refuses a layout. A subclass, such as JSONDecodeError, says something else.
_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError")
_OUTPUT_CHARACTERS = 2_000
_PACKAGE = str(Path(__file__).parents[1])


def judge(result: TaskResult, rank: int, run_directory: Path, sweep: Path, context_bytes: int | None) -> RankResult:
    """How a rank ended.

    Args:
        result: What the executor says.
        rank: The rank.
        run_directory: Its run directory, which may be missing.
        sweep: The sweep's directory.
        context_bytes: Memory of the CUDA context; None for what is published.
    """
    found = RankResult(
        rank=rank,
        kind=RankKind.FAILED,
        outcome=result.outcome,
        reason=result.failure,
        output="" if result.ended_well else result.output[-_OUTPUT_CHARACTERS:],
        directory=str(run_directory.relative_to(sweep)),
        host=result.host,
        worker=result.worker,
        wall_s=result.wall_s,
        peak_rss_bytes=result.peak_rss_bytes,
    )
    if result.outcome is Outcome.ERROR:
        return found  # any files there are of an earlier run, or none
    try:
        run = open_run_directory(run_directory)
    except RunDirectoryError as error:
        return found if found.reason else replace(found, reason=error.message)
    return _with_run(found, run, context_bytes)


def _with_run(found: RankResult, run: Run, context_bytes: int | None) -> RankResult:
    summary = run.summary
    found = _with_memory(found, summary, context_bytes)
    if summary.exit.outcome is Outcome.OUT_OF_MEMORY:
        asked = summary.out_of_memory
        where = f" in {asked.layer}" if asked is not None and asked.layer else ""
        size = f": {format_bytes(asked.requested_bytes)} were asked for" if asked is not None else ""
        return replace(
            found,
            kind=RankKind.OUT_OF_MEMORY,
            reason=f"out of memory{where}{size}",
            layer="" if asked is None else asked.layer,
            line="" if asked is None else asked.line,
        )
    if summary.exit.ended_well:
        if not summary.peak_allocated_bytes and summary.left_during_init is None:
            return replace(found, reason="the script allocated nothing on the GPU")
        return replace(found, kind=RankKind.RAN, reason="", pipeline=_pipeline(run))
    told = next((each for each in read_journal(run.path / JOURNAL_NAME) if isinstance(each, OutcomeRecord)), None)
    reason = summary.exit.message or found.reason
    if reason.startswith(f"{WorldError.__name__}:"):
        reason += " (--rank stages:all or --with-peers runs more ranks)"
    line = "" if told is None or told.line.startswith(_PACKAGE) else told.line
    found = replace(found, reason=reason, line=line)
    is_refusal = (
        summary.exit.outcome is Outcome.EXCEPTION
        and summary.exit.message.partition(":")[0] in _REFUSALS
        and told is not None
        and told.last_step == 0
        and not summary.invented_values
        and not told.line.startswith(_PACKAGE)
    )
    return replace(found, kind=RankKind.INVALID) if is_refusal else found


def _with_memory(found: RankResult, summary: Summary, context_bytes: int | None) -> RankResult:
    outside = summary.estimated_outside
    published = (outside.context_bytes if outside is not None else None) or 0
    return replace(
        found,
        peak_allocated_bytes=summary.peak_allocated_bytes,
        peak_reserved_bytes=summary.peak_reserved_bytes,
        nccl_low_bytes=0 if outside is None else outside.low_bytes - published,
        nccl_high_bytes=0 if outside is None else outside.high_bytes - published,
        context_bytes=context_bytes if context_bytes is not None else published or CONTEXT_BYTES,
        capacity_bytes=summary.capacity_bytes,
    )


def _pipeline(run: Run) -> tuple[int, ...]:
    """One rank of each stage; empty if the groups show no pipeline, or it is not certain which it is."""
    try:
        return stages_of_job(run.path).ranks
    except (JobError, RunDirectoryError):
        return ()
