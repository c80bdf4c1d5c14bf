"""What ran, in a few lines: the same on a terminal and on the page."""

from __future__ import annotations

from pathlib import Path

from fakedist.report.text.wording import ending, job_command
from fakedist.results.run import Run
from fakedist.run.directory import PAGE_NAME


def run_title(run: Run) -> str:
    """The script and its arguments; of an imported run its report, of a snapshot its file."""
    if run.manifest.job is not None:
        return job_command(run.manifest.job)
    return Path(run.manifest.imported.report).name if run.manifest.imported else run.path.name


def run_facts(run: Run) -> list[tuple[str, str]]:
    """Names and texts: the job, its rank, the device, how it ended and where the run is.

    A snapshot has its file, its device and the length of its history. An imported run has its report.
    """
    summary, manifest, page = run.summary, run.manifest, run.path / PAGE_NAME
    where = [("run", str(run.path)), *([("page", str(page))] if page.exists() else [])]
    if run.by_category is None:
        return [("file", str(run.path)), ("device", run.device), ("history", f"{run.num_rows('events'):,} events")]
    if manifest.imported is not None:
        return [("report", manifest.imported.report), ("device", summary.gpu or "unknown"), *where]
    assert manifest.job is not None
    return [
        ("job", job_command(manifest.job)),
        ("rank", f"{summary.rank:,} of {summary.world_size:,} ({manifest.job.gpus_per_node} GPUs a node)"),
        ("device", f"{summary.device}: {summary.gpu or 'never reached'}, torch {summary.torch or 'unknown'}"),
        ("ended", ending(summary, manifest.cwd)),
        *where,
    ]
