"""The rows of catalogue.toml, and their results in results.json. A row is a published job: its peak, step or both."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fakedist.cost_model.hosts import default_host
from fakedist.rundir.plain import from_plain, to_plain
from fakedist.units import GIB
from tests.truth.jobs import ROOT, Example, Liger, Megatron, Megatron2022, Script, Titan

HERE = Path(__file__).parent
CATALOGUE, RESULTS = HERE / "catalogue.toml", HERE / "results.json"
#: What :4096:8 makes of it, 8 x 4096 KiB, and an H100's default. Torch keeps one for each thread that multiplies, the
#: forward's and the backward's; torch 2.15 takes one for each call instead.
WORKSPACE_BYTES = 32 << 20
#: Differences that need a cause: of bytes, of time.
BYTES_NEED_CAUSE, TIME_NEEDS_CAUSE = 0.001, 0.1


@dataclass(frozen=True)
class Source:
    """A place that publishes figures.

    Attributes:
        text: Who and where.
        script: What runs its jobs: "titan", "megatron", "megatron-2022", "liger" or "example".
        ran: The container or torch of the published run.
        differs: What is otherwise in ours.
        commit: Of its repository.
    """

    text: str
    script: str
    ran: str
    differs: str
    commit: str = ""

    @property
    def cited(self) -> str:
        """The source with its commit."""
        return f"{self.text} @{self.commit}" if self.commit else self.text


@dataclass(frozen=True)
class Row:
    """A published job.

    Attributes:
        name: Of the row and of its recording in tests/data/steps.
        job: What ran.
        kind: "dense", "experts" or "hybrid"; "kernels" for a training kernel alone, which has no optimizer.
        gpu: A GPU model, or a GPU file of bench/jobs.
        gpus: Ranks.
        source: A key of [sources].
        flags: Of the script; ``@name`` is replaced by a line of [flags].
        case: Its directory in tests/functional_tests/test_cases of Megatron-LM.
        environment: Keys of [environments].
        peak_bytes: Allocated peak on one rank, after the first iteration and later, or only later.
        other_peaks: The same in other versions of the source, or on another system.
        peak_commit: Where the peaks were read, if not at the source's commit.
        num_workspaces: cuBLAS workspaces that the published job's torch kept by the end of the first iteration, and
            later.
        reserved_gib: Reserved peak.
        label: "fits" or "out of memory", if that was published.
        peak_gb: The rounded peak that was published with a label. It is taken for the allocated one by the end of the
            first iteration.
        rank: The rank that it is of; without it, the script's.
        step_s: Seconds of a step.
        tokens: Of a GPU in a step, with ``tokens_s``, if that is what was published.
        others_s: What the same test took in other versions of the source, or on another system.
        stages: Numbers of the pipeline stages that are recorded, where a formula has the bubble; all if empty.
        micro_batches: Of a step, where the flags have fewer: the recorded ones are repeated. 0: those of the flags.
        fabric: What ``find_fabric`` takes.
        like: The row whose recorded launches are priced.
        is_fitted: Whether a parameter of the power model is fitted on it, or chosen for it.
        is_host_bound: Whether the host sets its pace.
        is_later: Whether it came after the halves were fitted: it judges, and they stay as they were.
        why_bytes: The cause of a difference in bytes; ``why_time`` of one in time.
        note: What else differs.
    """

    name: str
    job: str
    kind: str
    gpu: str
    gpus: int
    source: str
    flags: str
    case: str = ""
    precision: str = "bf16"
    environment: list[str] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    other_peaks: list[int] = field(default_factory=list)
    peak_commit: str = ""
    num_workspaces: list[int] = field(default_factory=lambda: [2, 2])
    reserved_gib: float | None = None
    label: str = ""
    peak_gb: float | None = None
    rank: int | None = None
    step_s: float | None = None
    tokens: int = 0
    tokens_s: float = 0.0
    others_s: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    micro_batches: int = 0
    fabric: str = ""
    like: str = ""
    is_fitted: bool = False
    is_host_bound: bool = False
    is_later: bool = False
    why_bytes: str = ""
    why_time: str = ""
    note: str = ""

    @property
    def recording(self) -> str:
        """The row whose recorded launches are priced, which may be this one."""
        return self.like or self.name

    @property
    def has_peak(self) -> bool:
        """Whether a peak was published."""
        return bool(self.peak_bytes or self.label) or self.reserved_gib is not None

    @property
    def published_s(self) -> float | None:
        """The published step."""
        return self.tokens / self.tokens_s if self.tokens_s else self.step_s

    @property
    def gpu_model(self) -> str:
        """The argument of ``find_gpu``."""
        path = ROOT / "bench" / "jobs" / f"{self.gpu}.toml"
        return str(path) if path.exists() else self.gpu


@dataclass(frozen=True)
class Pair:
    """Two jobs that differ in one thing, of which the ratio was published or is that of two rows.

    Attributes:
        name: Of the pair.
        change: What changes.
        figure: "step" or "peak".
        rows: Names of the rows, before and after; empty for a ratio with a result of its own.
        published: The figure after the change over that before it, where ``rows`` are empty.
        source: Who published it, likewise.
        is_fitted: Whether something was chosen for it.
    """

    name: str
    change: str
    figure: str
    rows: list[str] = field(default_factory=list)
    published: float = 0.0
    source: str = ""
    is_fitted: bool = False


@dataclass(frozen=True)
class NotRebuilt:
    """Published jobs without a row: which, who published them, and why not."""

    jobs: str
    source: str
    why: str


@dataclass(frozen=True)
class Made:
    """How a result was made: ``seconds`` on two cores, None if it was not timed."""

    commit: str
    date: str
    torch: str
    seconds: float | None = None


@dataclass(frozen=True)
class Peak:
    """Measured peaks of a row's rank: allocated peaks by the end of the first iteration, and later; whether it fits."""

    allocated_bytes: tuple[int, int]
    reserved_bytes: int
    made: Made
    fits: bool | None = None


@dataclass(frozen=True)
class Step:
    """The estimate of a row's step, in seconds.

    Attributes:
        left_out_s: With the parameter fitted on the other rows; None for a row that is not fitted.
        kernels_s: Without communication; None for stages of a pipeline, which wait for each other.
        made: How its launches were recorded.
    """

    step_s: float
    low_s: float
    high_s: float
    left_out_s: float | None
    kernels_s: float | None
    made: Made


@dataclass(frozen=True)
class Ratio:
    """The ratio of a pair without rows, estimated: the mean, least and most of several draws."""

    ratio: float
    low: float
    high: float
    made: Made


@dataclass
class Results:
    """Every result by name, and the power model's parameters as fitted on rows: ``fp8_heat`` on those in fp8."""

    heat: float
    fp8_heat: float
    peaks: dict[str, Peak]
    steps: dict[str, Step]
    pairs: dict[str, Ratio] = field(default_factory=dict)
    #: Kept peaks on torch 2.8, which is nearest to the published run's and no longer supported.
    nearest: dict[str, Peak] = field(default_factory=dict)

    def peak(self, name: str) -> Peak:
        """The peak of a row on the release of torch that is nearest to the published run's."""
        return self.nearest.get(name) or self.peaks[name]

    def write(self, path: Path = RESULTS) -> None:
        """Write one line for each result, in the catalogue's order."""
        order = [each.name for each in (*catalogue().rows, *catalogue().pairs)]
        parts = [f'"heat": {self.heat}', f'"fp8_heat": {self.fp8_heat}']
        for name, found in (
            ("peaks", self.peaks),
            ("nearest", self.nearest),
            ("steps", self.steps),
            ("pairs", self.pairs),
        ):
            lines = [f'"{key}": {json.dumps(to_plain(found[key]))}' for key in order if key in found]
            parts.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
        path.write_text("{" + ",\n".join(parts) + "}\n")


@dataclass(frozen=True)
class Catalogue:
    """The contents of catalogue.toml."""

    sources: dict[str, Source]
    flags: dict[str, str]
    environments: dict[str, dict[str, str]]
    rows: list[Row]
    pairs: list[Pair]
    not_rebuilt: list[NotRebuilt]

    def row(self, name: str) -> Row:
        """A row by its name."""
        return next(row for row in self.rows if row.name == name)

    def script(self, row: Row) -> Script:
        """The command of a row."""
        kinds = {"titan": Titan, "megatron": Megatron, "megatron-2022": Megatron2022, "liger": Liger}
        kind = kinds.get(self.sources[row.source].script, Example)
        environment = {name: value for key in row.environment for name, value in self.environments[key].items()}
        return kind(tuple(self._words(row.flags)), environment, row.gpus, tuple(row.stages))

    def chosen(self, only: str, rows: Sequence[Row] | None = None) -> list[Row]:
        """The rows that match one of several patterns, separated by spaces; all without any.

        Raises:
            LookupError: A pattern matches none.
        """
        patterns, rows = only.split(), self.rows if rows is None else rows
        for pattern in patterns:
            if not any(fnmatch.fnmatch(row.name, pattern) for row in rows):
                raise LookupError(f"no row is called {pattern}: {CATALOGUE.name} has their names")
        return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, one) for one in patterns)]

    def _words(self, text: str) -> Iterator[str]:
        for word in text.split():
            if word.startswith("@"):
                yield from self._words(self.flags[word[1:]])
            else:
                yield word

    def step_groups(self) -> dict[str, list[Row]]:
        """Rows with a step by what is fitted on half of them: by host model those that the host limits; "kernels" has
        the others, without those that a parameter of the power model is fitted on."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.published_s and not row.is_fitted and not row.is_later:
                name = default_host(row.gpu).name if row.is_host_bound else "kernels"
                groups.setdefault(name, []).append(row)
        return groups

    @cached_property
    def judged_steps(self) -> frozenset[str]:
        """The names of the rows that judge what was fitted: the other half of each group, and all that came later."""
        judging = [row for group in self.step_groups().values() for row in halves(group)[1]]
        return frozenset(row.name for row in (*judging, *(row for row in self.rows if row.is_later)))


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows to fit and the rows to judge: every other one in the order of their names, from the first on."""
    ordered = sorted(rows, key=lambda row: row.name)
    return ordered[::2], ordered[1::2]


@cache
def catalogue() -> Catalogue:
    """Every row; PlainValueError names a field that is wrong."""
    plain: dict[str, Any] = tomllib.loads(CATALOGUE.read_text())
    return from_plain(Catalogue, plain)


def results(path: Path = RESULTS) -> Results:
    """Every result so far."""
    return from_plain(Results, json.loads(path.read_text()))


def published_bytes(row: Row) -> float:
    """The published peak, from the second iteration on."""
    if row.peak_gb is not None:
        return row.peak_gb * 1e9
    return row.peak_bytes[-1] if row.peak_bytes else (row.reserved_gib or 0.0) * GIB


def our_bytes(row: Row, peak: Peak) -> int:
    """Ours of the same kind, with the workspaces that today's torch no longer keeps."""
    if row.reserved_gib is not None:
        return peak.reserved_bytes
    if row.label:
        return peak.allocated_bytes[0]
    return peak.allocated_bytes[1] + row.num_workspaces[1] * WORKSPACE_BYTES
