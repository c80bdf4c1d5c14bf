"""How close estimated steps are to published ones: ``make accuracy-steps``.

    python bench/accuracy_steps.py [--recorded] [--job NAME ...] [--packages DIR]

Records ranks of public jobs (``tests/accuracy/step_jobs.py``) and keeps their launches in tests/data/steps; with
``--recorded``, takes what is kept there. Checks the recorded work against arithmetic, and prices each run for the GPU
that the step was published on. The power model's one parameter, ``fakedist.cost_model.kernels.clocks.HEAT``, is
fitted on the rows marked so: the least squares of the logarithm of estimate over published step. Each of these rows is
also estimated with the parameter of the others. What communication adds to the estimate has a column of its own. Writes
``fakedist/cost_model/data/accuracy_steps.json`` and the table of docs/accuracy/results.md between its two marks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean, median

import numpy as np
import numpy.typing as npt
import pandas as pd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


from fakedist.cost_model.accuracy import StepAccuracy, StepRow  # noqa: E402
from fakedist.cost_model.busiest_rank import ExpertsLoad  # noqa: E402
from fakedist.cost_model.collectives.communication import Communication  # noqa: E402
from fakedist.cost_model.collectives.fabric import find_fabric  # noqa: E402
from fakedist.cost_model.estimated import JobNetwork, communication_for  # noqa: E402
from fakedist.cost_model.hosts import HostModel, host_model  # noqa: E402
from fakedist.cost_model.job.job_times import Models, job_times  # noqa: E402
from fakedist.cost_model.kernels.kernel_times import KernelTimes  # noqa: E402
from fakedist.cost_model.kernels.measurements import DATA  # noqa: E402
from fakedist.cost_model.nccl.settings import Nccl  # noqa: E402
from fakedist.cost_model.step import PricedStep, Prices, StepPrices, price_step  # noqa: E402
from fakedist.gpu.models.catalogue import find_gpu  # noqa: E402
from fakedist.gpu.models.spec import GpuSpec  # noqa: E402
from fakedist.rundir.manifest import load_manifest  # noqa: E402
from fakedist.rundir.plain import from_plain  # noqa: E402
from fakedist.rundir.step_time import ClockSteadiness, HostTime  # noqa: E402
from tests.accuracy import titan  # noqa: E402
from tests.accuracy.step_jobs import NOT_SAID, STEPS, Published  # noqa: E402

PAGE = ROOT / "docs" / "accuracy" / "results.md"
RECORDED = ROOT / "tests" / "data" / "steps"
TABLES = ("launches", "work", "calls", "groups")
#: Where the host's time of these launches comes from.
HOST = "host.json"
MARKS = ("<!-- make accuracy-steps: begin -->", "<!-- make accuracy-steps: end -->")
HOST_MARKS = ("<!-- make accuracy-steps, host: begin -->", "<!-- make accuracy-steps, host: end -->")
#: Values of the parameter that are tried.
HEATS = np.round(np.arange(0.5, 4.0, 0.05), 2)
Floats = npt.NDArray[np.float64]


class Run:
    """The recorded ranks of a job.

    Args:
        step: The job.

    Attributes:
        step: The job.
        gpu: The GPU that it is priced for.
        tables: The tables of each rank.
    """

    def __init__(self, step: Published) -> None:
        self.step, self.gpu = step, find_gpu(step.gpu)
        kept = places(step)
        self.tables = {
            rank: {name: pd.read_parquet(place / f"{name}.parquet") for name in TABLES} for rank, place in kept.items()
        }
        self._host = host_of(kept.values(), self.gpu)

    def estimate(self, heat: float) -> tuple[float, float, float]:
        """Seconds of the step, and its interval."""
        return self._estimate(self.gpu, heat)

    def error(self, heat: float) -> float:
        """Logarithm of the estimate over the published step."""
        return float(np.log(self.estimate(heat)[0] / self.step.step_s))

    def kernels(self, heat: float) -> float | None:
        """Seconds of the step if communication took no time; None for several ranks, which wait for each other."""
        if len(self.tables) > 1:
            return None
        return (self._alone(KernelTimes(self.gpu, heat=heat), None).step_us or 0.0) / 1e6

    def elsewhere(self, heat: float) -> str:
        """The step's time on the usual GPU, in words."""
        usual = find_gpu("h100-80g")
        return f"On {usual.name}, {usual.watts:.0f} W, it would be {self._estimate(usual, heat)[0]:.3f} s"

    def flops(self, family: str) -> float:
        """FLOPs of all kernels of a family, of all recorded ranks."""
        found = 0.0
        for tables in self.tables.values():
            of_work, work = tables["launches"]["work"].to_numpy(), tables["work"]
            counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
            own = (work["family"] == family).to_numpy()
            found += float((np.nan_to_num(work["flops"].to_numpy()) * counts)[own].sum())
        return found

    def _estimate(self, gpu: GpuSpec, heat: float) -> tuple[float, float, float]:
        prices = KernelTimes(gpu, heat=heat)
        network = JobNetwork(find_fabric(self.step.fabric), nccl=Nccl(self.step.script.nccl))
        if len(self.tables) > 1:
            ranks = frozenset(self.tables)
            models = Models(gpu, prices, network, self._host)
            job = job_times(self.tables.items(), ranks, self.step.world_size, models)
            found = (job.step_us, job.low_us, job.high_us)
        else:
            (tables,) = self.tables.values()
            alone = self._alone(prices, communication_for(tables, gpu, network))
            found = (alone.step_us or 0.0, alone.step_low_us, alone.step_high_us)
        step_us, low_us, high_us = found
        assert low_us is not None
        assert high_us is not None
        return step_us / 1e6, low_us / 1e6, high_us / 1e6

    def _alone(self, prices: Prices, communication: Communication | None) -> PricedStep:
        (tables,) = self.tables.values()
        prices = StepPrices(prices, ExpertsLoad(), self._host.costs)
        return price_step(tables["launches"], tables["work"], prices, communication)


def host_of(kept: Iterable[Path], gpu: GpuSpec) -> HostModel:
    """The GPU's usual host, by the clock of all recorded ranks: of their machine's scores the mean."""
    times = [from_plain(HostTime, json.loads(path.read_text())) for each in kept if (path := each / HOST).exists()]
    clocks = [time.clock for time in times if time.clock is not None]
    if not clocks:
        return host_model(gpu)
    worst = ClockSteadiness(
        min(clock.num_repeats for clock in clocks),
        max(clock.spread for clock in clocks),
        max(clock.bound for clock in clocks),
    )
    return host_model(gpu, None, fmean(time.machine_us for time in times if time.machine_us is not None), worst)


def places(step: Published) -> dict[int, Path]:
    """Where the tables of each recorded rank are kept."""
    kept = RECORDED / (step.like or step.name)
    ranks = step.script.ranks
    return {rank: kept / f"rank{rank}" if len(ranks) > 1 else kept for rank in ranks}


def main() -> None:
    """Record, check, fit, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="run no job: price what was recorded before")
    parser.add_argument("--packages", type=Path, default=titan.INSTALLED)
    parser.add_argument("--job", action="append", default=[], help="run this one only; repeatable")
    chosen = parser.parse_args()
    if not chosen.recorded:
        record(chosen.packages, chosen.job)
    runs = [Run(step) for step in STEPS]
    for run in runs:
        check_work(run)
    found = judged(runs)
    print(table(found))
    (DATA / "accuracy_steps.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    page = replaced(PAGE.read_text(), MARKS, table(found))
    PAGE.write_text(replaced(page, HOST_MARKS, host_table(found)))


def record(packages: Path, names: Sequence[str]) -> None:
    """Run every job, or those named, and keep the tables that pricing needs; what cannot run keeps its tables."""
    for step in STEPS:
        if step.like or (names and step.name not in names):
            continue
        if lacking := [name for name in step.script.needs if not any(distributions(name=name))]:
            print(f"kept {step.name}: {' and '.join(lacking)} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="steps-") as text:
            runs = step.script.record(Path(text), packages, step.world_size)
            for rank, kept in places(step).items():
                kept.mkdir(parents=True, exist_ok=True)
                for name in TABLES:
                    shutil.copy(runs[rank] / "tables" / f"{name}.parquet", kept)
                if (source := load_manifest(runs[rank]).summary.kernels) is not None and source.host is not None:
                    (kept / HOST).write_text(json.dumps(asdict(source.host), indent=1) + "\n")
        print(f"recorded {step.name}", flush=True)


def check_work(run: Run) -> None:
    """Leave with a message if what was recorded is not the work that the model asks for."""
    asked = run.step.script.flops()
    for name, expected in (("gemm", asked.products), ("attention", asked.attention)):
        recorded = run.flops(name)
        if abs(recorded - expected) > 1e-3 * expected:
            sys.exit(f"{run.step.name}: {name}: {recorded / 1e12:.2f} TFLOP recorded, {expected / 1e12:.2f} expected")


def judged(runs: Sequence[Run]) -> StepAccuracy:
    """Fit the parameter and estimate every step."""
    errors = {run.step.name: np.array([run.error(heat) for heat in HEATS]) for run in runs if run.step.is_fitted}
    heat = fit(list(errors.values()))
    rows = []
    for run in runs:
        step = run.step
        step_s, low_s, high_s = run.estimate(heat)
        others = fit([each for name, each in errors.items() if name != step.name]) if step.is_fitted else None
        rows.append(
            StepRow(
                name=step.name,
                job=step.job,
                gpu=run.gpu.name,
                watts=run.gpu.watts,
                source=step.source,
                note=f"{step.note}. {run.elsewhere(heat)}" if step.note == NOT_SAID else step.note,
                is_fitted=step.is_fitted,
                is_host_bound=step.is_host_bound,
                published_s=step.step_s,
                others_s=list(step.others_s),
                step_s=step_s,
                low_s=low_s,
                high_s=high_s,
                left_out_s=None if others is None else run.estimate(others)[0],
                kernels_s=run.kernels(heat),
            )
        )
    return StepAccuracy(heat, rows)


def fit(errors: Sequence[Floats]) -> float:
    """The parameter with the least squared error over some rows, each with its errors for all of ``HEATS``."""
    return float(HEATS[int(np.argmin(sum(np.square(each) for each in errors)))])


def table(found: StepAccuracy) -> str:
    """The results as Markdown."""
    lines = [
        f'`HEAT` is {found.heat:.2f}, fitted on the rows that have a figure under "left out".',
        "",
        "| job | GPU | published | estimate | error | left out | of it communication | error without it |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found.filled:
        left_out = (
            "" if row.left_out_s is None else f"{row.left_out_s:.3f} s ({row.left_out_s / row.published_s - 1:+.1%})"
        )
        without = row.error_without_communication
        parts = ("", "")
        if row.kernels_s is not None and without is not None:
            parts = (f"{row.step_s - row.kernels_s:.3f} s", f"{without:+.1%}")
        mark = f" [{list(notes(found)).index(row.note) + 1}]" if row.note else ""
        lines.append(
            f"| {row.job}{mark} | {row.gpu}, {row.watts:.0f} W | {row.published_s:.3f} s "
            f"| {row.step_s:.3f} s ({row.low_s:.2f} to {row.high_s:.2f}) | {row.error:+.1%} | {left_out} "
            f"| {parts[0]} | {parts[1]} |"
        )
    lines.append("")
    lines += [f"[{place}] {note[0].upper()}{note[1:]}.\n" for place, note in enumerate(notes(found), start=1)]
    sources = dict.fromkeys(row.source for row in found.rows)
    lines.append(f"Published by {'; '.join(sources)}.")
    return "\n".join(lines)


def host_table(found: StepAccuracy) -> str:
    """The steps that the host limits as Markdown, with how many of them are met."""
    rows = found.host_bound
    lines = [f"- {gpu}: {_closeness([row for row in rows if row.gpu == gpu])}." for gpu in {row.gpu: 0 for row in rows}]
    lines += [
        "",
        "| job | GPU | published | in other versions | estimate | error | 90 % interval | inside |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        others = ", ".join(f"{each * 1e3:.0f}" for each in row.others_s)
        published, estimate, low, high = (each * 1e3 for each in (row.published_s, row.step_s, row.low_s, row.high_s))
        lines.append(
            f"| {row.job} | {row.gpu} | {published:.1f} ms | {others and others + ' ms'} | {estimate:.1f} ms "
            f"| {row.error:+.0%} | {low:.0f} to {high:.0f} ms | {'yes' if row.is_inside else 'no'} |"
        )
    return "\n".join(lines)


def _closeness(rows: Sequence[StepRow]) -> str:
    errors = [abs(row.error) for row in rows]
    return (
        f"of {len(rows)} rows, {sum(error <= 0.3 for error in errors)} are within 30 %, the median error is "
        f"{median(errors):.0%}, and {sum(row.is_inside for row in rows)} are inside of their interval"
    )


def replaced(page: str, marks: tuple[str, str], text: str) -> str:
    """The page with what is between its two marks replaced."""
    head, begin, rest = page.partition(marks[0])
    if not begin or marks[1] not in rest:
        sys.exit(f"{PAGE} lacks the marks {' and '.join(marks)}")
    return f"{head}{begin}\n{text}\n{marks[1]}{rest.partition(marks[1])[2]}"


def notes(found: StepAccuracy) -> dict[str, None]:
    """The rows' notes, each once, in order."""
    return dict.fromkeys(row.note for row in found.rows if row.note)


if __name__ == "__main__":
    main()
