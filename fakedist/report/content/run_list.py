"""The runs in the current directory and in its ``.fakedist/``, and those that may be pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fakedist.errors import RunDirectoryError
from fakedist.report.content.report_blocks import KEY, Block, Remark, Report, Sheet, SheetColumn, bytes_column
from fakedist.results.verdict import verdict
from fakedist.rundir.directory import (
    HOME,
    MANIFEST_NAME,
    Manifest,
    is_in_use,
    load_manifest,
    rank_directories,
    why_kept,
)
from fakedist.rundir.notes import counted
from fakedist.rundir.outcome import Outcome
from fakedist.units import format_age, format_bytes, format_rank_list


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run, several ranks' runs in one directory, or a sweep.

    Attributes:
        created: When it began; None if that cannot be read.
        job: The script with its arguments, and the ranks.
        verdict: Whether it fits, and how it ended, in a few words.
        kept: Why ``fakedist runs --prune`` leaves it; empty if it goes.
    """

    path: Path
    created: datetime | None
    job: str
    verdict: str
    size_bytes: int
    kept: str


def list_runs() -> list[ListedRun]:
    """Every directory of one run or several in the current directory and in ``.fakedist/``, the newest first."""
    found: set[Path] = set()
    for folder in (HOME, Path()):  # glob passes over directories that may not be read
        found.update(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
        ranks = {path.parents[1] for path in folder.glob(f"*/rank*/{MANIFEST_NAME}")} - {HOME}
        found.update(filter(rank_directories, ranks))
    return newest_first([_listed(path) for path in found])


def newest_first(runs: list[ListedRun]) -> list[ListedRun]:
    """The runs by age; those of unknown age at the end."""
    return sorted(runs, key=lambda run: -run.created.timestamp() if run.created else 0.0)


def size_of(path: Path) -> int:
    """The bytes of a directory's files, links left aside."""
    return sum(entry.lstat().st_size for entry in path.rglob("*") if entry.is_file() and not entry.is_symlink())


def _listed(path: Path) -> ListedRun:
    manifests = {}
    for run in rank_directories(path) or [path]:
        with suppress(RunDirectoryError):
            manifests[run] = load_manifest(run)
    words = Counter(_word(run, manifest) for run, manifest in manifests.items())
    counts = ", ".join(word if len(words) == 1 else f"{count} {word}" for word, count in words.most_common())
    created = [datetime.fromisoformat(manifest.created) for manifest in manifests.values()]
    return ListedRun(
        path=path,
        created=max(created, default=None),
        job=_job([*manifests.values()]),
        verdict=counts or "cannot be read",
        size_bytes=size_of(path),
        kept=why_kept(path),
    )


def _job(manifests: list[Manifest]) -> str:
    jobs = [manifest.job for manifest in manifests if manifest.job is not None]
    if not jobs:
        return next((Path(manifest.imported.report).name for manifest in manifests if manifest.imported), "-")
    first = jobs[0]
    ranks = [job.rank for job in jobs]
    which = f"rank{'s' * (len(ranks) > 1)} {format_rank_list(ranks)} of {first.world_size:,}"
    return f"{' '.join([Path(first.target).name, *first.arguments])}, {which}"


def _word(run: Path, manifest: Manifest) -> str:
    """The verdict on one run, and its end if that was not a good one."""
    ending = manifest.exit
    if ending.outcome is Outcome.RUNNING:
        return "running" if is_in_use(run) else "broke off"
    fit = None if manifest.summary is None else verdict(manifest.summary, manifest.cwd)
    how = "" if ending.ended_well or ending.outcome is Outcome.OUT_OF_MEMORY else str(ending.outcome)
    how = f"exit {ending.code}" if how and ending.outcome is Outcome.EXIT else how
    return ", ".join(filter(None, (fit.word if fit is not None else "", how))) or "no memory of a GPU"


def list_report(runs: Sequence[ListedRun], *, is_pruning: bool = False, is_pruned: bool = False) -> Report:
    """The list; with ``is_pruning`` what goes, or after it what went, and why the rest stays."""
    going = [run for run in runs if not run.kept]
    blocks: list[Block] = (
        [_sheet(runs, is_pruning, is_pruned)] if runs else [Remark("no runs here: fakedist profile makes one")]
    )
    if is_pruning and runs:
        amount = (
            f"{counted(len(going), 'directory', 'directories')}, {format_bytes(sum(run.size_bytes for run in going))}"
        )
        blocks.append(Remark(f"deleted: {amount}" if is_pruned else f"to delete {amount}: fakedist runs --prune --yes"))
    rows = [
        {
            "path": str(run.path),
            "created": None if run.created is None else run.created.isoformat(),
            "job": run.job,
            "verdict": run.verdict,
            "size_bytes": run.size_bytes,
            "kept": run.kept or None,
        }
        for run in runs
    ]
    return Report("runs", blocks, lambda: {"runs": rows, "pruned": is_pruned})


def _sheet(runs: Sequence[ListedRun], is_pruning: bool, is_pruned: bool) -> Sheet:
    now = datetime.now().astimezone()
    ages = ["-" if run.created is None else format_age((now - run.created).total_seconds()) for run in runs]
    columns = [
        SheetColumn("run", [run.path.name if run.path.parent == HOME else str(run.path) for run in runs], is_text=True),
        SheetColumn("age", ages, rank=2),
        SheetColumn("job", [run.job for run in runs], is_text=True, rank=3),
        SheetColumn("verdict", [run.verdict for run in runs], is_text=True, rank=1),
        bytes_column("size", [run.size_bytes for run in runs], rank=2),
    ]
    if is_pruning:
        goes = "deleted" if is_pruned else "goes"
        texts = [f"stays: {run.kept}" if run.kept else goes for run in runs]
        columns.insert(1, SheetColumn("prune", texts, is_text=True, rank=KEY))
    return Sheet(f"Runs here and in {HOME}/", columns)
