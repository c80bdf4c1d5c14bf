"""A finished run: its figures, and its tables as DataFrames. Bytes and microseconds throughout.

A finished run as advice reads it: its evidence, and the memory that its rank may reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import Evidence, Room, Setup
from fakedist.analysis.memory_tables import Fold, fold_layers, fold_table, unfolded
from fakedist.cost_model.breakdown import fold_times
from fakedist.cost_model.host_times import host_waits, late_launches
from fakedist.errors import JobError, RunDirectoryError
from fakedist.findings.case import Case
from fakedist.findings.finding_all import Tried, find_faults, is_ignored
from fakedist.gpu.models.catalogue import gpu_of_product
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing, PricingOptions
from fakedist.results.repricing import models_of, price_again
from fakedist.results.summing_up import estimate_or_note, room_of, setup_of
from fakedist.results.verdict import limit_text, step_text, step_word, verdict
from fakedist.rundir.directory import Manifest
from fakedist.rundir.finding import Finding
from fakedist.rundir.notes import Note
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import MOMENTS
from fakedist.rundir.step_time import GroupTime, KernelSource, PathPart, StepTime
from fakedist.rundir.summary import Summary
from fakedist.rundir.table_rows import TABLES
from fakedist.rundir.tables import count_rows, read_table
from fakedist.units import format_bytes, format_us

if TYPE_CHECKING:
    from fakedist.report.figures.run_figures import RunFigures


#: From pandas 3 on, a copy shares what neither side changes.
_IS_DEEP = int(pd.__version__.partition(".")[0]) < 3


class RunTables:
    """The tables of a run, by their names in ``rundir.table_rows.TABLES``: of its directory, or in memory.

    Args:
        directory: None for a snapshot.
        made: Tables in memory, used instead of the directory's.
        keeps: Each table is read once and kept. A caller gets a copy, which it may change.
    """

    def __init__(
        self, directory: Path | None, made: Mapping[str, pd.DataFrame] = MappingProxyType({}), *, keeps: bool = False
    ) -> None:
        self._directory, self._made, self._keeps = directory, made, keeps
        self._kept: dict[tuple[str, tuple[str, ...] | None], pd.DataFrame] = {}

    def with_tables(self, made: Mapping[str, pd.DataFrame]) -> RunTables:
        """The same tables, some of them replaced."""
        return RunTables(self._directory, {**self._made, **made}, keeps=self._keeps)

    def keeping(self) -> RunTables:
        """The same tables, kept once they are read."""
        return RunTables(self._directory, self._made, keeps=True)

    def has(self, name: str) -> bool:
        """Whether the run has this table. A directory that lacks one of ``TABLES`` is damaged."""
        return name in self._made or (self._directory is not None and name in TABLES)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table; see :meth:`Run.num_rows`."""
        if self._directory is None or name in self._made:
            return len(self.table(name))
        return count_rows(self._directory, name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table, or some of its columns; see :meth:`Run.table`."""
        if not self._keeps:
            return self._read(name, columns)
        key = name, None if columns is None else tuple(columns)
        if key not in self._kept:
            self._kept[key] = self._read(name, columns)
        return self._kept[key].copy(deep=_IS_DEEP)

    def _read(self, name: str, columns: Sequence[str] | None) -> pd.DataFrame:
        if self._directory is not None and name not in self._made:
            if name not in TABLES:
                raise JobError(f"no table is called {name!r}", f"tables are {', '.join(sorted(TABLES))}")
            frame = read_table(self._directory, name, columns).to_pandas(strings_to_categorical=columns is not None)
            assert isinstance(frame, pd.DataFrame)
            return frame
        if name not in self._made:
            has = ", ".join(sorted(self._made))
            raise RunDirectoryError(f"a memory snapshot has no table {name!r}", f"it has {has}")
        if columns is None:
            return self._made[name]
        frame = self._made[name][list(columns)].copy(deep=_IS_DEEP)
        for column in frame.select_dtypes(["object", "string"]).columns:
            frame[column] = frame[column].astype("category")
        return frame


class RunMemory:
    """The memory of a run."""

    def __init__(self, tables: RunTables, summary: Summary) -> None:
        self._tables, self._summary = tables, summary

    def __repr__(self) -> str:
        summary = self._summary
        when = f", step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else ""
        rows = [("peak_allocated", f"{format_bytes(summary.peak_allocated_bytes)}{when}")]
        rows.append(("peak_reserved", format_bytes(summary.peak_reserved_bytes)))
        if self._tables.has("phases"):
            held = sorted(summary.by_category.items(), key=lambda row: -row[1])
            rows += [(name, format_bytes(bytes_)) for name, bytes_ in held if bytes_]
        return "\n  ".join([type(self).__name__, *(f"{name}: {text}" for name, text in rows)])

    def peak(self) -> pd.DataFrame:
        """Blocks alive at the peak, largest first. ``bytes`` adds up to ``run.peak_allocated_bytes``.

        Columns: bytes, category, layer, step, phase, operation, line.
        """
        blocks = self._tables.table("blocks")
        held = self._described(blocks[blocks["at_peak"]]).drop(columns="at_peak")
        return held.sort_values("bytes", ascending=False, kind="stable").reset_index(drop=True)

    def blocks(self) -> pd.DataFrame:
        """Every block of the run in order of allocation, with the columns of :meth:`peak` and ``at_peak``."""
        return self._described(self._tables.table("blocks"))

    def _described(self, blocks: pd.DataFrame) -> pd.DataFrame:
        layers = self._tables.table("layers")["name"]
        lines = [*self._tables.table("stacks")["line"], ""]  # stack -1 (none) indexes the empty line at the end
        described = blocks[["bytes", "category", "step", "phase", "operation", "at_peak"]].copy()
        described.insert(2, "layer", layers.iloc[blocks["layer"]].to_numpy())
        described.insert(6, "line", [lines[stack] for stack in blocks["stack"]])
        return described

    def segments(self, moment: str = "peak_reserved") -> pd.DataFrame:
        """The segments that the allocator held at ``peak_reserved`` or ``peak_allocated``, most free memory first.

        ``bytes`` adds up to what was reserved, ``allocated_bytes`` to what was allocated. Columns: those of the table
        ``segments``; category, layer, step, phase, operation and line of the largest block in each segment, empty
        without one.

        Raises:
            ValueError: There is no such moment.
        """
        if moment not in MOMENTS:
            raise ValueError(f"moment is {' or '.join(map(repr, MOMENTS))}, not {moment!r}")
        table = self._tables.table("segments")
        held = table[table["moment"] == moment].drop(columns="moment").reset_index(drop=True)
        block = held["block"]
        largest = self._described(self._tables.table("blocks").loc[block[block >= 0]])
        return held.join(largest.drop(columns=["bytes", "at_peak"]).reindex(block).reset_index(drop=True))

    def segment_blocks(self, moment: str = "peak_reserved") -> pd.DataFrame:
        """The blocks in those segments, by address. Empty if the addresses of the segments are unknown.

        Columns: segment (row of :meth:`segments`), offset_bytes (from the segment's begin), bytes, is_waiting (freed
        while another stream still used it), category, layer, step, phase, operation, line.
        """
        segments = self.segments(moment).sort_values("address")
        blocks = self._tables.table("blocks")
        event = int(segments["event"].iloc[0]) if len(segments) else -1
        alive = blocks[(blocks["alloc_event"] <= event) & (blocks["reuse_event"] > event)].sort_values("address")
        if not len(segments) or not segments["address"].iloc[0]:
            alive = alive.head(0)
        index = np.searchsorted(segments["address"].to_numpy(), alive["address"].to_numpy(), side="right") - 1
        described = self._described(alive).drop(columns="at_peak")
        described.insert(0, "segment", segments.index.to_numpy()[index])
        described.insert(1, "offset_bytes", (alive["address"] - segments["address"].to_numpy()[index]).astype("int64"))
        described.insert(3, "is_waiting", alive["free_event"] <= event)
        return described.reset_index(drop=True)

    def by_category(self) -> pd.DataFrame:
        """Bytes at the peak by category: columns bytes, share (of the peak)."""
        table = pd.Series(self._summary.by_category, dtype="int64").rename("bytes").to_frame()
        return table.assign(share=table["bytes"] / max(self._summary.peak_allocated_bytes, 1))

    def by_phase(self) -> pd.DataFrame:
        """The table ``phases``; RunDirectoryError for a snapshot, which has none."""
        return self._tables.table("phases")

    def timeline(self) -> pd.DataFrame:
        """Memory after each event: action, time_us, allocated_bytes, reserved_bytes; of a run step, phase, too."""
        curve = self._tables.table("events")[["action", "time_us", "allocated_bytes", "reserved_bytes"]].copy()
        if self._tables.has("spans") and len(curve):
            spans = self._tables.table("spans").set_index("first_event").reindex(range(len(curve)), method="ffill")
            curve["step"], curve["phase"] = spans["step"].to_numpy(), spans["phase"].to_numpy()
        return curve


_PATH_COLUMNS, _GROUP_COLUMNS = ([each.name for each in fields(kind)] for kind in (PathPart, GroupTime))


class RunTime:
    """The times of a run's timed step: where they go, and whether they are measured, simulated or estimated."""

    def __init__(self, tables: RunTables, step_time: StepTime, source: KernelSource) -> None:
        self._tables, self._step_time = tables, step_time
        self.source, self.step = source.source, source.step

    def __repr__(self) -> str:
        time = self._step_time
        rows = [("step", f"{self.step}, {format_us(time.step_us)}, {self.source}")]
        if time.num_unknown_calls:
            rows.append(("without", f"{time.num_unknown_calls:,} of {time.num_calls:,} collectives"))
        rows += [(row.family, format_us(row.time_us)) for row in time.by_family if row.share is not None]
        return "\n  ".join([type(self).__name__, *(f"{name}: {text}" for name, text in rows)])

    def summary(self) -> StepTime:
        """The step's time and how it is spent."""
        return self._step_time

    def layers(self, *, fold: bool = True) -> pd.DataFrame:
        """Time by layer, with children. Columns: see ``cost_model.breakdown.fold_times``."""
        layers = self._tables.table("layers")
        return fold_times(self._tables.table("layer_times"), layers, fold_layers(layers) if fold else unfolded(layers))

    def families(self) -> pd.DataFrame:
        """Time by family of kernels, most first. ``share`` does not include communication."""
        return pd.DataFrame(to_plain(self._step_time.by_family))

    def names(self) -> pd.DataFrame:
        """The table ``kernel_names``: time by name, shape and folded layer of kernels, most first."""
        return self._tables.table("kernel_names")

    def ranges(self) -> pd.DataFrame:
        """The table ``ranges``: the script's own ranges, and what was launched in each."""
        return self._tables.table("ranges")

    def critical_path(self) -> pd.DataFrame:
        """The parts that make the step as long as it is, by layer, group, host and idle time, the longest part first.

        They add up to the step. Columns: those of ``fakedist.rundir.step_time.PathPart``. Those of a file
        from a real GPU are inferred. No rows if its streams' waits are unknown.
        """
        return pd.DataFrame(to_plain(self._step_time.critical_path), columns=_PATH_COLUMNS)

    def host(self) -> pd.DataFrame:
        """The table ``host``: the host's moments, a row for each row of the table ``launches``, with four of its own.

        Columns: begin_us, reached_us, passed_us, late_us, idle_us; what, op, phase, layer (row of ``layers``), and
        layer_name. No rows if the step was imported, or if its streams' waits are unknown.
        """
        host, names = self._tables.table("host"), self._tables.table("layers")["name"]
        launches = self._tables.table("launches", ["what", "op", "phase", "layer"]).iloc[: len(host)]
        made = host.join(launches.reset_index(drop=True))
        return made.assign(layer_name=names.iloc[made["layer"].to_numpy("i8")].to_numpy())

    def host_waits(self) -> pd.DataFrame:
        """The waits of the host for the GPU by line and operation, most idle time of the GPU first.

        Columns: those of ``fakedist.rundir.step_time.HostWait``, in microseconds. ``idle_us`` is a part of
        ``summary().launch_gap_us``.
        """
        return host_waits(*self._of_host())

    def late_launches(self) -> pd.DataFrame:
        """The lines whose operations the host launches too late, most idle time of the GPU first.

        Columns: those of ``fakedist.rundir.step_time.LateLaunches``, in microseconds. ``late_us`` adds up to
        ``summary().launch_gap_us``, except for the end of the step, when nothing is left to launch.
        """
        return late_launches(*self._of_host())

    def _of_host(self) -> tuple[pd.DataFrame, dict[str, pd.DataFrame], list[Fold]]:
        tables = {name: self._tables.table(name) for name in ("launches", "work", "operation_stacks")}
        tables["stacks"] = self._tables.table("stacks", ["line"])
        host = self._tables.table("host")
        tables["launches"] = tables["launches"].iloc[: len(host)]
        return host, tables, fold_layers(self._tables.table("layers"))

    def groups(self) -> pd.DataFrame:
        """Collectives by group and operation, most exposed first. Columns: those of ``rundir.step_time.GroupTime``."""
        return pd.DataFrame(to_plain(self._step_time.by_group), columns=_GROUP_COLUMNS)

    def kernels(self) -> pd.DataFrame:
        """The table ``kernels``, with the names of the layers as ``layer_name``."""
        kernels, names = self._tables.table("kernels"), self._tables.table("layers")["name"]
        return kernels.assign(layer_name=names.iloc[kernels["layer"]].to_numpy())


def findings_of(find: Callable[[Tried], list[Finding]]) -> tuple[list[Finding], list[Note]]:
    """Findings that no comment of the script ignores, and notes on rules that failed."""
    notes: list[Note] = []
    faults = find(lambda code, see: estimate_or_note(f"finding {code}", see, notes) or [])
    return [finding for finding in faults if not is_ignored(finding)], notes


class Run:
    """One finished run. ``fakedist.open`` and ``fakedist.profile`` return one. A part that it lacks is None.

    Attributes:
        device: ``cuda`` or ``virtual``; of a snapshot ``cuda:0`` or another.
        num_events: Events in the history of a snapshot; 0 of another run.
        memory: None if the run was imported from a tool that does not record memory.
        by_category: Bytes at the peak, which they add up to; None for a snapshot whose stacks do not tell.
        time: None if no step was timed.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        summary: Summary,
        tables: RunTables,
        *,
        device: str = "",
        num_events: int = 0,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.summary = summary
        self.device = device or summary.device
        self.num_events = num_events
        self._tables = tables
        self.memory = RunMemory(tables, summary) if summary.peak_allocated_bytes or not manifest.imported else None
        self.by_category = dict(summary.by_category) if tables.has("phases") else None
        self.time = RunTime(tables, *summary.timed) if summary.timed else None

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a memory snapshot of torch: its phases, layers and categories are inferred, or not known."""
        return self.manifest.job is None and self.manifest.imported is None

    @property
    def is_inferred(self) -> bool:
        """Whether it is a file from a real GPU, whose phases and categories are inferred, if known at all."""
        return self.manifest.job is None

    @property
    def figures(self) -> RunFigures:
        """The run's charts as plotly figures, for a notebook: ``run.figures.timeline()``."""
        from fakedist.report.figures.run_figures import RunFigures  # plotly is imported when a chart is wanted

        return RunFigures(self)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that tensors held at once."""
        return self.summary.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the caching allocator held at once."""
        return self.summary.peak_reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        """The GPU's memory."""
        return self.summary.capacity_bytes

    @property
    def headroom_bytes(self) -> int:
        """The part of the GPU's memory that was never reserved; negative if more was reserved than the GPU has."""
        return self.capacity_bytes - self.peak_reserved_bytes

    @property
    def fits(self) -> bool:
        """Whether the rank fits its GPU."""
        return self.summary.fits

    @property
    def findings(self) -> list[Finding]:
        """Faults of the job that the rules of docs/findings.md see in this run, the gravest first."""
        return self._found[0]

    @property
    def finding_notes(self) -> list[Note]:
        """Rules of findings that failed."""
        return self._found[1]

    @cached_property
    def case(self) -> Case:
        """The run as the rules of findings read it."""
        job = self.manifest.job
        return Case(self.keeping_tables().table, self.has, self.summary, 0 if job is None else job.gpus_per_node)

    @cached_property
    def _found(self) -> tuple[list[Finding], list[Note]]:
        return findings_of(partial(find_faults, self.case))

    def layers(self, *, fold: bool = True) -> pd.DataFrame:
        """The memory of layers at the peak, with children; columns as of ``analysis.layer_table.fold_table``."""
        table = self.table("layers")
        return fold_table(table, fold_layers(table) if fold else unfolded(table))

    def collectives(self) -> pd.DataFrame:
        """This rank's collective calls: group, group_size, operation, num_calls, bytes_in, bytes_out."""
        return pd.DataFrame(to_plain(self.summary.collectives))

    def priced_for(self, gpu: str | None = None, *, gains: bool = False, **options: Unpack[PricingOptions]) -> Run:
        """The same run with the times of another GPU or fabric: its launches are priced anew, and nothing runs.

        Args:
            gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
            gains: Also price each change that may shorten the step: ``summary.time.gains``.
            options: See :class:`fakedist.options.definition.Pricing`.

        Raises:
            SetupError: The calibration table cannot be read, or is of another GPU.
            JobError: fakedist has no such GPU model, fabric or what-if, the file is not valid, or a variable of NCCL's
                makes no difference.
            RunDirectoryError: The run has no launches (it was imported or made with --no-kernels), or its kernels were
                measured and another GPU is wanted.
        """
        models = models_of(Pricing(gpu, **options), self.manifest, self.summary)
        times = price_again(self.manifest, self.summary, self.table, models, gains=gains)
        unpriced = [
            replace(piece, price_us=None, price_high_us=None, step_share=None, step_share_high=None)  # another GPU's
            for piece in self.summary.advice
        ]
        summary = replace(self.summary, kernels=times.source, time=times.summary, advice=unpriced, remedy=None)
        return Run(self.path, self.manifest, summary, self._tables.with_tables(times.tables), device=self.device)

    def changed(self, manifest: Manifest, tables: Mapping[str, pd.DataFrame]) -> Run:
        """The same run of another job, with some tables replaced: as if that had been recorded."""
        return Run(self.path, manifest, self.summary, self._tables.with_tables(tables), device=self.device)

    def keeping_tables(self) -> Run:
        """The same run, which keeps each table that it has read: for a report, which asks for one several times."""
        kept = self._tables.keeping()
        return Run(self.path, self.manifest, self.summary, kept, device=self.device, num_events=self.num_events)

    def has(self, name: str) -> bool:
        """Whether the run has a table."""
        return self._tables.has(name)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table, without reading them; RunDirectoryError if it is missing or damaged."""
        return self._tables.num_rows(name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some columns with categorical strings.

        Raises:
            JobError: No table has this name.
            RunDirectoryError: It is missing or damaged.
        """
        return self._tables.table(name, columns)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name}: {text}" for name, text in self._figures())
        return f"{type(self).__name__}({str(self.path)!r}){rows}"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._figures())
        return f"<table>{rows}</table>"

    def _figures(self) -> list[tuple[str, str]]:
        """The verdict's card: what ran, what it takes, whether it fits, the step and what limits it."""
        summary = self.summary
        rows = [("device", f"{self.device}: {summary.gpu}" if summary.gpu else self.device)]
        if summary.rank is not None:
            rows = [("rank", f"{summary.rank:,} of {summary.world_size:,}"), *rows]
            rows.append(("outcome", f"{summary.exit.outcome}, {len(summary.steps)} steps"))
        if self.memory is not None:
            amounts = {"peak_allocated": self.peak_allocated_bytes, "peak_reserved": self.peak_reserved_bytes}
            rows += [(name, format_bytes(bytes_)) for name, bytes_ in amounts.items()]
        if fit := verdict(summary, self.manifest.cwd):
            rows.append(("verdict", f"{fit.word}{fit.more}"))
        if summary.timed is not None:
            time, source = summary.timed
            rows.append(("step", f"{step_text(time)}, {step_word(source)}, step {source.step}"))
            if limit := limit_text(time):
                rows.append(("limit", limit.removeprefix("limited by ")))
        return rows


_TABLES = ("blocks", "asleep", "layers", "spans", "calls", "groups", "events", "stacks", "steps", "frames", "shares")


def evidence_tables(run: Run) -> dict[str, pd.DataFrame] | None:
    """The tables that advice reads; None if the run lacks one, or has blocks of an engine that sleeps."""
    if not all(run.has(name) for name in _TABLES) or run.num_rows("asleep"):
        return None  # a curve of the page counts what sleeps
    return {name: run.table(name) for name in (*_TABLES, "kernels") if run.has(name)}


def evidence_of(run: Run) -> Evidence | None:
    """The run's tables in the form that the rules of advice use; None as of :func:`evidence_tables`."""
    tables = evidence_tables(run)
    return None if tables is None else Evidence(tables, fold_layers(tables["layers"]), setup_of_run(run))


def setup_of_run(run: Run, gpu: GpuSpec | None = None) -> Setup:
    """The job's command line and hosts, with the run's GPU or another."""
    gpu = gpu or gpu_of_product(run.summary.gpu)
    return setup_of(run.manifest.job, 0.0 if gpu is None else gpu.host_bandwidth)


def room_of_run(run: Run) -> Room:
    """The memory that a run may reserve, and its step."""
    summary = run.summary
    return room_of(summary.exit, summary.out_of_memory, summary.capacity_bytes, summary.estimated_outside, summary.time)
