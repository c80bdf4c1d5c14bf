"""Rebuild published peaks and steps, and write docs/truth.md: ``make truth``.

    python -m tests.truth [--only PATTERNS] [--again] [--record] [--price] [--jobs N] [--on WHERE] [--fast] [--page]

Runs the rows of catalogue.toml that have no result. A peak is the published rank's; a step's launches are recorded,
kept in tests/data/steps and priced for the GPU that it was published for. Jobs run as ``fakedist sweep`` runs its
points: on this machine, or on a Ray cluster with ``--on ray``. Results are written as they come, so an interrupted call
goes on where it was. Rows whose packages are not installed are named and left out.

After a recording, or with ``--price``, every recorded step is priced by today's model, but a step of a row that came
later alone, since no parameter depends on it; the page is made of the results.

``--fast`` runs no job and prices some recorded steps: it fails if the estimates are others than those that are kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from fakedist.check.running import RankToRun, run_ranks
from fakedist.gpu.driver.build import torch_build
from fakedist.launcher.executors.choosing import make_executor
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.summary import PhasePeak
from tests.truth import page, steps
from tests.truth.catalogue import Made, Peak, Results, Row, catalogue, results
from tests.truth.jobs import ROOT, Liger, Titan, prepare_liger, prepare_titan

#: The rows of --fast: each source, GPU and layout, without those whose launches take seconds to price.
FAST = "eager-8 compiled-8* compiled-32-batch-1 *-a100 compiled-64-*tp8 gpt-7b-* nemotron-15b gpt-tiny-tp2*"


@dataclass(frozen=True)
class Run:
    """A rank that a row needs: for its peak, or for its step."""

    row: Row
    rank: int
    is_timed: bool

    @property
    def name(self) -> str:
        """The rank's, unique among all."""
        return f"{self.row.name}-{'step' if self.is_timed else 'peak'}-{self.rank}"

    def to_run(self, directory: Path) -> RankToRun:
        """The rank for an executor."""
        job = catalogue().script(self.row).job(self.rank, self.row.gpu_model, is_timed=self.is_timed)
        return RankToRun(self.name, job, directory / self.name)


def peak_of(phases: Sequence[PhasePeak], reserved_bytes: int, made: Made, fits: bool) -> Peak:
    """The allocated peaks by the end of the first iteration and of the last, and the reserved one."""
    first = max(phase.peak_allocated_bytes for phase in phases if phase.step <= 1)
    return Peak((first, max(phase.peak_allocated_bytes for phase in phases)), reserved_bytes, made, fits)


def needed(rows: Sequence[Row], peaks: Mapping[str, Peak], *, again: bool, record: bool) -> list[Run]:
    """The ranks to run: of peaks without a result, and of steps without a recording."""
    runs = []
    for row in rows:
        script = catalogue().script(row)
        if lacking := [name for name in script.needs if not any(distributions(name=name))]:
            print(f"left out {row.name}: {' and '.join(lacking)} is not installed")
            continue
        if row.has_peak and (again or row.name not in peaks):
            runs.append(Run(row, script.peak_rank if row.rank is None else row.rank, is_timed=False))
        if row.published_s and not row.like and (record or not steps.is_recorded(row)):
            runs += [Run(row, rank, is_timed=True) for rank in script.ranks]
    return runs


def rebuild(runs: Sequence[Run], found: Results, jobs: int | None, on: str) -> int:
    """Run ranks, and write each result as it comes, a peak into ``peaks`` of ``found``. Returns how many failed."""
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    named = {run.name: run for run in runs}

    def keep(rank: RankToRun, wall_s: float) -> None:
        run, directory = named[rank.name], rank.run_directory
        made = Made(commit.stdout.strip(), datetime.now(UTC).date().isoformat(), torch_build()[0], round(wall_s))
        manifest = load_manifest(directory)
        assert manifest.summary is not None
        if run.is_timed:
            steps.keep(run.row, run.rank, directory, made)
        else:
            said = manifest.summary
            found.peaks[run.row.name] = peak = peak_of(said.by_phase, said.peak_reserved_bytes, made, said.fits)
            found.write()
            print(f"{run.row.name}: {peak.allocated_bytes[1]:,} bytes allocated, {wall_s:.0f} s", flush=True)
        shutil.rmtree(directory)

    with tempfile.TemporaryDirectory(prefix="truth-") as text:
        scripts = [catalogue().script(run.row) for run in runs]
        if any(isinstance(script, Titan) for script in scripts):
            prepare_titan(Path(text))
        prepare_liger(script.release for script in scripts if isinstance(script, Liger))
        executor = make_executor(on, jobs, lambda line: print(line, flush=True))
        failures = run_ranks([run.to_run(Path(text)) for run in runs], Path(text), executor, keep)
    for failure in failures:
        print(f"failed: {failure}\n{failure.output[-2000:]}", file=sys.stderr)
    return len(failures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names or patterns of rows, separated by spaces")
    parser.add_argument("--again", action="store_true", help="also rows that have a peak")
    parser.add_argument("--record", action="store_true", help="also steps that were recorded")
    parser.add_argument("--price", action="store_true", help="price every recorded step again")
    parser.add_argument("--jobs", type=int, help="how many run at once; by cores and memory if not given")
    parser.add_argument("--on", default="local", help="local, ray or ray://HOST:PORT")
    parser.add_argument("--fast", action="store_true", help="price some recorded steps and compare, write nothing")
    parser.add_argument("--page", action="store_true", help="only make the page of the results")
    chosen = parser.parse_args(arguments)
    found = results()
    if chosen.fast:
        changed = [text for row in catalogue().chosen(FAST) if (text := steps.change(row, found))]
        print("\n".join(changed) or f"{len(catalogue().chosen(FAST))} estimates are those that are kept")
        return bool(changed)
    failed = 0
    if not chosen.page:
        rows = catalogue().chosen(chosen.only)
        runs = needed(rows, found.peaks, again=chosen.again, record=chosen.record)
        print(f"{len(runs)} ranks to run", flush=True)
        failed = rebuild(runs, found, chosen.jobs, chosen.on) if runs else 0
        timed = {run.row.name: run.row for run in runs if run.is_timed}
        if chosen.price or any(not row.is_later for row in timed.values()):
            steps.price(found)
        else:
            for row in timed.values():
                recording = steps.Recording(row)
                recording.check_work()
                steps.price_alone(recording, found)
        found.write()
    page.write(found)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
