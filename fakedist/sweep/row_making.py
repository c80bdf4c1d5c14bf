"""Makes the row of a point from how its ranks ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fakedist.sweep.command import PointRun
from fakedist.sweep.plan import SweepPlan
from fakedist.sweep.records import RankKind, RankResult, Row, Status
from fakedist.sweep.step import estimate_step
from fakedist.units import format_bytes

_OF_KINDS = {
    RankKind.OUT_OF_MEMORY: Status.DOES_NOT_FIT,
    RankKind.INVALID: Status.INVALID,
    RankKind.FAILED: Status.FAILED,
}


def make_row(run: PointRun, names: tuple[str, str], results: Sequence[RankResult], plan: SweepPlan, sweep: Path) -> Row:
    """The row of a point.

    Args:
        run: What it ran.
        names: The row's ID, and the key of its run.
        results: How its ranks ended, in the order in which they ran.
        plan: The sweep.
        sweep: The sweep's directory.
    """
    row_id, key = names
    failed = next((each for each in results if each.kind is not RankKind.RAN), None)
    every = set(results[0].pipeline) <= {each.rank for each in results}
    common = Row(
        id=row_id,
        key=key,
        values=run.point.values,
        pricing=run.pricing,
        status=Status.FITS,
        ranks=tuple(results),
        has_every_stage=every,
    )
    if failed is not None:
        reason = failed.reason if len(results) == 1 else f"rank {failed.rank}: {failed.reason}"
        return replace(common, status=_OF_KINDS[failed.kind], reason=reason, line=failed.line, layer=failed.layer)
    directories = [sweep / each.directory for each in results]
    step, why = estimate_step(directories, results, run.pricing, *plan.counts_at(run.point))
    status, reason = _fit(common)
    return replace(common, status=status, reason=reason, step=step, why_no_step=why)


def _fit(row: Row) -> tuple[Status, str]:
    """Whether the fullest rank fits: what is reserved, NCCL and the context together."""
    fullest = row.fullest
    if fullest is None or not fullest.capacity_bytes:
        return Status.FITS, ""
    free = fullest.capacity_bytes - fullest.total_bytes
    if free >= 0:
        return Status.FITS, ""
    short = f"rank {fullest.rank} lacks {format_bytes(-free)}"
    parts = (
        f"{format_bytes(fullest.peak_reserved_bytes)} reserved, up to {format_bytes(fullest.nccl_high_bytes)} of NCCL, "
        f"{format_bytes(fullest.context_bytes)} of CUDA context"
    )
    fits_least = free + fullest.nccl_high_bytes - fullest.nccl_low_bytes >= 0
    return Status.MAY_NOT_FIT if fits_least else Status.DOES_NOT_FIT, f"{short}: {parts}"
