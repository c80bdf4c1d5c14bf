"""How close estimated steps are to published ones: ``make accuracy-steps``.

    python bench/accuracy_steps.py [--recorded] [--packages DIR]

Records rank 0 of public jobs (``tests/accuracy/titan.py``) and keeps their launches in tests/data/steps; with
``--recorded``, takes what is kept there. Checks the recorded work against arithmetic, and prices each run for the GPU
that the step was published on. The power model's one parameter, ``fakedist.time.clocks.HEAT``, is
fitted on the rows marked so: the least squares of the logarithm of estimate over published step. Each of these rows is
also estimated with the parameter of the others. What communication adds to the estimate has a column of its own. Writes
``fakedist/time/data/accuracy_steps.json`` and the table of docs/accuracy.md between its two marks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fakedist.gpu_models.known import find_gpu  # noqa: E402
from fakedist.run.step_time import KernelSource  # noqa: E402
from fakedist.time.communication import Communication, communication_of  # noqa: E402
from fakedist.time.fabric import find_fabric  # noqa: E402
from fakedist.time.kernels import KernelTimes  # noqa: E402
from fakedist.time.measurements import DATA  # noqa: E402
from fakedist.time.published_steps import StepAccuracy, StepRow  # noqa: E402
from fakedist.time.step import price_step  # noqa: E402
from tests.accuracy import titan  # noqa: E402

PAGE = ROOT / "docs" / "accuracy.md"
RECORDED = ROOT / "tests" / "data" / "steps"
TABLES = ("launches", "work", "calls", "groups")
BEGIN, END = "<!-- make accuracy-steps: begin -->", "<!-- make accuracy-steps: end -->"
META_H100 = ROOT / "bench" / "jobs" / "h100-96g-500w.toml"
ONE = ("--training.local_batch_size", "1")
#: Values of the parameter that are tried.
HEATS = np.round(np.arange(0.5, 4.0, 0.05), 2)
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_A100 = "torchtitan, docs/performance.md @04133643"
_AWS = "AWS, Efficient pre-training of Llama 3-like model architectures using torchtitan on Amazon SageMaker"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
        name: The directory of its run.
        job: What ran.
        gpu: What ``--gpu`` takes.
        fabric: What ``find_fabric`` takes.
        world_size: Ranks.
        flags: Of torchtitan.
        batch: Sequences of 8,192 tokens in a rank's step.
        tokens_per_s: Published tokens per second and GPU.
        source: Who published it.
        note: What the source leaves open.
        is_fitted: Whether the parameter is fitted on it.
        as_then: Flags of torchtitan that take back what changed since then.
    """

    name: str
    job: str
    gpu: str
    fabric: str
    world_size: int
    flags: tuple[str, ...]
    batch: int
    tokens_per_s: float
    source: str
    note: str = ""
    is_fitted: bool = False
    as_then: tuple[str, ...] = titan.AS_THEN

    @property
    def step_s(self) -> float:
        """The published step, in seconds."""
        return self.batch * SEQUENCE / self.tokens_per_s


SEQUENCE = 8192
_NOT_SAID = (
    'only "8 H100" is said; taken as torchtitan\'s, whose table has the same job: 32 GPUs of 700 W ran it in 1.143 s'
)
STEPS = (
    Published(
        "eager-8", "Llama 3.1 8B, FSDP, eager, batch 2, 8 GPUs", str(META_H100), "dgx-h100-ndr",
        8, (), 2, 5762, _TITAN, is_fitted=True,
    ),
    Published(
        "compiled-8", "the same, compiled", str(META_H100), "dgx-h100-ndr",
        8, titan.COMPILE, 2, 6667, _TITAN, is_fitted=True,
    ),
    Published(
        "compiled-8-batch-1", "the same, compiled, batch 1", str(META_H100), "dgx-h100-ndr",
        8, titan.COMPILE + ONE, 1, 6150, "torchao, torchao/float8/README.md @36027d82", _NOT_SAID, is_fitted=True,
    ),
    Published(
        "eager-128", "eager, batch 2, 128 GPUs", str(META_H100), "dgx-h100-ndr", 128, (), 2, 5605, _TITAN,
    ),
    Published(
        "compiled-128", "compiled, batch 2, 128 GPUs", str(META_H100), "dgx-h100-ndr",
        128, titan.COMPILE, 2, 6514, _TITAN,
    ),
    Published("eager-32-batch-1", "eager, batch 1, 32 GPUs", "h100-80g", "p5-efa", 32, ONE, 1, 6475, _AWS),
    Published(
        "compiled-32-batch-1", "compiled, batch 1, 32 GPUs", "h100-80g", "p5-efa",
        32, titan.COMPILE + ONE, 1, 7166, _AWS,
    ),
    Published(
        "eager-64-batch-1-a100", "eager, batch 1, 64 GPUs", "a100-80g", "dgx-a100-hdr", 64, ONE, 1, 2973, _A100,
        "the network is not said, taken as eight HDR NICs a node; RMSNorm was one Triton kernel, here torch's own",
        as_then=titan.EARLY_2024,
    ),
)  # fmt: skip


class Run:
    """A recorded job.

    Args:
        step: The job.

    Attributes:
        step: The job.
        gpu: The GPU that it is priced for.
        work: The table ``work``.
        counts: How many launches each row of work has.
    """

    def __init__(self, step: Published) -> None:
        tables = {name: pd.read_parquet(RECORDED / step.name / f"{name}.parquet") for name in TABLES}
        self.step, self.gpu, self.work = step, find_gpu(step.gpu), tables["work"]
        self.launches = tables["launches"]
        places = self.launches["work"].to_numpy()
        self.counts = np.bincount(places[places >= 0], minlength=len(self.work))
        self._communication = communication_of(tables["calls"], tables["groups"], self.gpu, find_fabric(step.fabric))

    def estimate(self, heat: float) -> tuple[float, float, float]:
        """Seconds of the step, and its interval."""
        source = self._priced(KernelTimes(self.gpu, heat=heat), self._communication)
        assert source.step_us is not None
        assert source.step_low_us is not None
        assert source.step_high_us is not None
        return source.step_us / 1e6, source.step_low_us / 1e6, source.step_high_us / 1e6

    def error(self, heat: float) -> float:
        """Logarithm of the estimate over the published step."""
        return float(np.log(self.estimate(heat)[0] / self.step.step_s))

    def kernels(self, heat: float) -> float:
        """Seconds of the step if communication took no time."""
        return (self._priced(KernelTimes(self.gpu, heat=heat), None).step_us or 0.0) / 1e6

    def elsewhere(self, heat: float) -> str:
        """What the step would take on the GPU that is usual, in words."""
        usual = find_gpu("h100-80g")
        source = self._priced(KernelTimes(usual, heat=heat), dataclasses.replace(self._communication, gpu=usual))
        return f"On {usual.name}, {usual.watts:.0f} W, it would be {(source.step_us or 0.0) / 1e6:.3f} s"

    def _priced(self, prices: KernelTimes, communication: Communication | None) -> KernelSource:
        return price_step(self.launches, self.work, prices, communication).source


def main() -> None:
    """Record, check, fit, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="run no job: price what was recorded before")
    parser.add_argument("--packages", type=Path, default=titan.INSTALLED)
    chosen = parser.parse_args()
    if not chosen.recorded:
        record(chosen.packages)
    runs = [Run(step) for step in STEPS]
    for run in runs:
        check_work(run)
    found = judged(runs)
    print(table(found))
    (DATA / "accuracy_steps.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    if not begin or END not in rest:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    PAGE.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")


def record(packages: Path) -> None:
    """Run every job, and keep the tables that pricing needs."""
    titan.install(packages)
    for step in STEPS:
        with tempfile.TemporaryDirectory(prefix="steps-") as text:
            run = titan.profile(Path(text), packages, step.world_size, step.flags, as_then=step.as_then)
            kept = RECORDED / step.name
            kept.mkdir(parents=True, exist_ok=True)
            for name in TABLES:
                shutil.copy(run / "tables" / f"{name}.parquet", kept)
        print(f"recorded {step.name}", flush=True)


def check_work(run: Run) -> None:
    """Leave with a message if what was recorded is not the work that the model asks for."""
    tokens, layers, width, inner, kv, words = run.step.batch * SEQUENCE, 32, 4096, 14_336, 1024, 128_256
    layer = 2 * width * width + 2 * width * kv + 3 * width * inner
    recomputed = width * kv + width * width + width * inner  # every second product of a layer: wk, wo, w3
    products = 2 * tokens * (3 * (layers * layer + width * words) + layers * recomputed)
    met = (SEQUENCE + 1) / 2
    attention = layers * (2 + 5) * 2 * tokens * met * width
    flops = np.nan_to_num(run.work["flops"].to_numpy()) * run.counts
    for name, expected in (("gemm", products), ("attention", attention)):
        recorded = flops[(run.work["family"] == name).to_numpy()].sum()
        if abs(recorded / expected - 1) > 1e-3:
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
                note=f"{step.note}. {run.elsewhere(heat)}" if step.note == _NOT_SAID else step.note,
                is_fitted=step.is_fitted,
                published_s=step.step_s,
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
    for row in found.rows:
        left_out = (
            "" if row.left_out_s is None else f"{row.left_out_s:.3f} s ({row.left_out_s / row.published_s - 1:+.1%})"
        )
        mark = f" [{list(notes(found)).index(row.note) + 1}]" if row.note else ""
        lines.append(
            f"| {row.job}{mark} | {row.gpu}, {row.watts:.0f} W | {row.published_s:.3f} s "
            f"| {row.step_s:.3f} s ({row.low_s:.2f} to {row.high_s:.2f}) | {row.error:+.1%} | {left_out} "
            f"| {row.step_s - row.kernels_s:.3f} s | {row.error_without_communication:+.1%} |"
        )
    lines.append("")
    lines += [f"[{place}] {note[0].upper()}{note[1:]}.\n" for place, note in enumerate(notes(found), start=1)]
    sources = dict.fromkeys(row.source for row in found.rows)
    lines.append(f"Published by {'; '.join(sources)}.")
    return "\n".join(lines)


def notes(found: StepAccuracy) -> dict[str, None]:
    """The rows' notes, each once, in order."""
    return dict.fromkeys(row.note for row in found.rows if row.note)


if __name__ == "__main__":
    main()
