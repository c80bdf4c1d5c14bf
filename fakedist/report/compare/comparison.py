"""A comparison of two runs, or of memory snapshots: every table of changes, and one line with the reason.

Access to a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd

from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK
from fakedist.errors import RunDirectoryError
from fakedist.report.content.topology import CallsText, RunTopology
from fakedist.report.text.memory_sheets import UNUSED_NAMES
from fakedist.results.compare import changed_memory, changed_times, layer_matching, reasons
from fakedist.results.compare.allocation_streams import StreamDifference, compare_streams
from fakedist.results.opening import open_run, open_run_directory
from fakedist.results.run import Run
from fakedist.results.verdict import communication_word, relative_time, short_line, step_word
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import MOMENTS
from fakedist.rundir.step_time import StepTime
from fakedist.rundir.tables import read_table
from fakedist.units import format_bytes, format_us


class TimeComparison:
    """The changes of the timed step between two runs that have one. ``paths`` name each run's layers."""

    def __init__(self, runs: tuple[Run, Run], paths: tuple[dict[int, str], dict[int, str]]) -> None:
        self.runs, self._paths = runs, paths
        timed = [run.summary.timed for run in runs]
        assert timed[0] is not None
        assert timed[1] is not None
        self.times = timed[0][0], timed[1][0]
        self._sources = timed[0][1], timed[1][1]
        self.words = timed[0][1].source, timed[1][1].source

    @cached_property
    def parts(self) -> pd.DataFrame:
        """The step, and how its time is spent."""
        return changed_times.part_changes(*self.times)

    @cached_property
    def rates(self) -> pd.DataFrame:
        """Tokens or samples per second and in a step, and MFU."""
        return changed_times.rate_changes(*self.times)

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Forward, recompute, backward and so on. The changes add up to the change of all kernels."""
        return changed_times.phase_changes(*self.times)

    @cached_property
    def families(self) -> pd.DataFrame:
        """Families of kernels."""
        return changed_times.family_changes(*self.times)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Exposed communication by group and operation; no rows unless both runs have it."""
        return changed_times.group_changes(*self.times)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Own time of layers by family. The changes add up to the change of all kernels."""
        sides = [
            changed_times.layer_parts(run.table("layer_times"), paths)
            for run, paths in zip(self.runs, self._paths, strict=True)
        ]
        return changed_times.layer_changes(*sides)

    @cached_property
    def names(self) -> pd.DataFrame:
        """Kernels by name."""
        return changed_times.name_changes(*(run.table("kernel_names") for run in self.runs))

    @property
    def of(self) -> str:
        """Source of these times: "measured" or "estimated", for each run if they differ."""
        a, b = self.words
        return a if a == b else f"A {a}, B {b}"

    @property
    def of_communication(self) -> str:
        """The same of communication, which is estimated between measured kernels too."""
        a, b = (communication_word(time) for time in self.times)
        return a if a == b else f"A {a}, B {b}"

    @cached_property
    def noise_us(self) -> float:
        """Smaller changes are not worth a row: a ten-thousandth of the shorter step, and what is written as 0 µs."""
        return noise_us(self.times)

    @property
    def is_changed(self) -> bool:
        """True if the step changed by more than that."""
        return abs(self.times[1].step_us - self.times[0].step_us) >= self.noise_us

    @property
    def why(self) -> str:
        """The one line: "step +10.1 ms (+4.2%), estimated: +12.3 ms in its kernels, gemm of layers.*.mlp, +11.9 ms".

        Of exposed communication if that changed more: "-9.1 ms of exposed communication, all_gather on dp, -9.0 ms".
        Where the steps have unlike work, the rate comes first: "tokens/s per GPU 1,702 -> 1,498 (-12.0%)".
        """
        (before, after), cause = (time.step_us for time in self.times), self._cause()
        a, b = (step_word(source) for source in self._sources)
        of = a if a == b else f"A {a}, B {b}"
        if not cause and format_us(before) == format_us(after) and not rate_text(*self.times):
            return f"the step takes the same time, {format_us(after)}, {of}"
        step = f"step {format_us_change(after - before)} ({relative_time(after, before)}), {of}"
        step = "; ".join(filter(None, (rate_text(*self.times), step)))
        return f"{step}: {cause}" if cause else step

    def _cause(self) -> str:
        cause = reasons.find_cause(self.layers, "change_us")
        exposed = float(self.groups["change_us"].sum())
        if abs(exposed) > (0.0 if cause is None else abs(cause.change)):
            first = self.groups[self.groups["change_us"] * exposed > 0].iloc[0]
            part = f"{first['operation']} on {first['group']}, {format_us_change(float(first['change_us']))}"
            return f"{format_us_change(exposed)} of exposed communication, {part}"
        return "" if cause is None else f"{format_us_change(cause.change)} in its kernels, {say_time_part(cause)}"


def rate_text(before: StepTime, after: StepTime) -> str:
    """The change of the rate between steps of unlike work, which comes first; empty for steps of the same work."""
    if (names := changed_times.unlike_work(before, after)) is None:
        return ""
    (rate_a, work_a), (rate_b, work_b) = (
        [changed_times.rates_of(time)[name] for name in names] for time in (before, after)
    )
    moved = f"{format_number(rate_a)} -> {format_number(rate_b)} ({relative_time(rate_b, rate_a)})"
    return f"{names[0]} {moved}, with {format_number(work_a)} -> {format_number(work_b)} {names[1]}"


def format_number(value: float) -> str:
    """A rate, a number of tokens or a percentage: "1,702", "43.0"."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


_NOISE = 1e-4


def noise_us(times: Sequence[StepTime]) -> float:
    """The time below which a difference between steps is left out of tables, in microseconds."""
    return max(_NOISE * min(time.step_us for time in times), changed_memory.SHOWN_AS_NONE_US)


def noise_text(least_us: float) -> str:
    """That threshold in words."""
    share = "" if least_us <= changed_memory.SHOWN_AS_NONE_US else f", {_NOISE:.2%} of the shortest step"
    return f"less than {format_us(least_us)}{share}"


def say_time_part(cause: reasons.Cause, *, is_change: bool = True) -> str:
    """The main cause of a change of time, or of a time: "gemm of layers.*.mlp, +11.9 ms"."""
    amount = format_us_change(cause.part) if is_change else format_us(cause.part)
    return f"{cause.category} {reasons.of_layers(cause.layer)}, {amount}"


def format_us_change(duration_us: float) -> str:
    """Microseconds with a sign: "+12.3 ms", "-3.0 µs", "0 µs"."""
    text = format_us(duration_us)
    return f"+{text}" if duration_us > 0 and not text.startswith("0 ") else text


#: Columns of the table `blocks` that a comparison of blocks needs.
BLOCK_COLUMNS = ("bytes", "operation", "phase", "layer", "category", "stack", "at_peak")
_TIME_TABLES = ("parts", "phases", "families", "groups", "layers", "names")
_CATEGORY_WORDS = {
    "parameter": "parameters",
    "optimizer_state": "optimizer states",
    "gradient": "gradients",
    "workspace": "workspaces",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "other": "other blocks",
}


class Comparison:
    """The changes from run directory ``a`` to ``b``.

    Raises:
        RunDirectoryError: One of them is not a run directory, or is damaged.
    """

    names = ("A", "B")

    def __init__(self, a: Path, b: Path) -> None:
        self.runs = self.a, self.b = open_run_directory(a), open_run_directory(b)
        self.summaries = self.a.summary, self.b.summary

    @cached_property
    def differences(self) -> list[dict[str, str]]:
        """Settings that differ: ``name``, ``a``, ``b``."""
        return reasons.different_settings(self.a.manifest, self.b.manifest, self.summaries)

    @cached_property
    def changes(self) -> list[str]:
        """The changed settings, in a few words each: "--loss-parallel", "world size 64 -> 128"."""
        return reasons.changed_names(self.a.manifest, self.b.manifest, self.differences)

    @property
    def changed(self) -> str:
        """All of it in one phrase; empty if both runs have the same settings."""
        return reasons.changed_text(self.changes)

    @cached_property
    def warnings(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        return reasons.warnings(dict(zip("AB", self.summaries, strict=True)))

    @property
    def look_first(self) -> list[str]:
        """Hints beyond the headline: none, since the tables name the layers."""
        return []

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Peaks, capacity, headroom."""
        return changed_memory.figure_changes(*self.summaries)

    @cached_property
    def categories(self) -> pd.DataFrame:
        """Bytes at the peak by category."""
        return changed_memory.category_changes(*(summary.by_category for summary in self.summaries))

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Peak by step and phase."""
        return changed_memory.phase_changes(*self._tables("phases"))

    @cached_property
    def matches(self) -> pd.DataFrame:
        """Pairs of layers: which layer of one run is which layer of the other."""
        return layer_matching.match_layers(*self._tables("layers"))

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Own bytes of every layer at the peak, by category."""
        return changed_memory.layer_parts(*self._tables("layers"), self.matches)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Changes by layer and category."""
        return changed_memory.layer_changes(self.parts)

    @cached_property
    def most(self) -> pd.DataFrame:
        """Changes in the most that one layer held."""
        return changed_memory.most_changes(*self._tables("layers"), self.matches)

    @cached_property
    def renamed(self) -> list[dict[str, str]]:
        """Layers with a new name: ``was``, ``name``, ``how``. Repeated layers once, and only the topmost."""
        return layer_matching.renamed_layers(*self._tables("layers"), self.matches)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """Changes of the blocks at the peak."""
        paths = layer_matching.layer_paths(*self._tables("layers"), self.matches)
        sides = []
        for run, of_layers in zip((self.a, self.b), paths, strict=True):
            table = read_table(run.path, "blocks", BLOCK_COLUMNS).to_pandas()
            stacks = read_table(run.path, "stacks", ("line",)).to_pandas()
            sides.append(changed_memory.peak_blocks(table, stacks, of_layers, cwd=run.manifest.cwd))
        return changed_memory.block_changes(*sides)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """Changes of the collectives."""
        return changed_times.collective_changes(*(summary.collectives for summary in self.summaries))

    @cached_property
    def streams(self) -> list[tuple[str, CallsText]]:
        """Calls of a step, their streams and what can run at once, of "A" and of "B"; empty if both are the same."""
        calls = [RunTopology(run).rows() for run in (self.a, self.b)]
        places = [[(row.group, row.operation, row.stream, row.beside) for row in rows] for rows in calls]
        if places[0] == places[1]:
            return []
        return [(side, row) for side, rows in zip("AB", calls, strict=True) for row in rows]

    @cached_property
    def time(self) -> TimeComparison | None:
        """Changes of the timed step; None if one of the runs has none."""
        if any(summary.timed is None for summary in self.summaries):
            return None
        paths = layer_matching.layer_paths(*self._tables("layers"), self.matches)
        return TimeComparison((self.a, self.b), paths)

    @cached_property
    def cause(self) -> reasons.Cause | None:
        """The main cause of the change."""
        return reasons.find_cause(self.parts)

    @property
    def why(self) -> str:
        """The one line: "+2.91 GiB at the peak: activations of layers.*.mlp, +2.88 GiB, first seen at model.py:212"."""
        if self.cause is None:
            peak = self.summaries[1].peak_allocated_bytes
            moved = "" if self.layers.empty else ", but made of different blocks"
            return f"the peak is the same, {format_bytes(peak)}{moved}"
        return say_cause(self.cause, reasons.origin_of(self.cause, self.blocks))

    @property
    def whys(self) -> list[tuple[str, str]]:
        """The lines of the peak ("why") and of the step ("time_why"), the step first if only it changed."""
        lines = [("why", self.why)]
        if self.time is not None:
            at = 0 if self.cause is None and self.time.is_changed else 1
            lines.insert(at, ("time_why", self.time.why))
        return lines

    @property
    def headlines(self) -> list[tuple[str, str]]:
        """Those lines, the first behind the changed settings: "--loss-parallel: -7.32 GiB at the peak: ..."."""
        (name, first), *others = self.whys
        return [(name, f"{self.changed}: {first}" if self.changed else first), *others]

    def _tables(self, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        return self._kept.setdefault(name, (self.a.table(name), self.b.table(name)))

    @cached_property
    def _kept(self) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
        return {}


def say_cause(cause: reasons.Cause, origin: reasons.AllocationSite) -> str:
    """A change of the peak, what accounts for it and where that is allocated, in one line."""
    seen = origin.phrase("first seen" if cause.part > 0 else "last seen")
    return f"{format_change(cause.change)} at the peak: {say_part(cause)}{seen}"


def say_part(cause: reasons.Cause, *, is_change: bool = True) -> str:
    """The main cause of a change, or of a figure: "activations of layers.*.mlp, +2.88 GiB"."""
    amount = format_change(cause.part) if is_change else format_bytes(cause.part)
    return f"{_CATEGORY_WORDS[cause.category]} {reasons.of_layers(cause.layer)}, {amount}"


def format_change(bytes_: float) -> str:
    """Bytes with a sign: "+2.91 GiB", "-512 B", "0 B"."""
    return ("+" if bytes_ > 0 else "") + format_bytes(bytes_)


def format_relative(bytes_: float, of: float) -> str:
    """A change in percent of the former value; empty if that was 0."""
    return f"{bytes_ / of:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%") if of else ""


def time_object(comparison: Comparison) -> dict[str, object] | None:
    """The part of that object about the timed step; null if one of the runs has none."""
    time = comparison.time
    if time is None:
        return None
    tables = {name: getattr(time, name).to_dict("records") for name in _TIME_TABLES}
    rates = time.rates.astype(object).where(time.rates.notna(), None).to_dict("records")
    return {"sources": list(time.words), "why": time.why, **tables, "rates": rates}


def comparison_object(comparison: Comparison) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints."""
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "changes": comparison.changes,
        "why": comparison.why,
        "warnings": comparison.warnings,
        "differences": comparison.differences,
        "renamed_layers": comparison.renamed,
        "streams": [{"side": side, **to_plain(row)} for side, row in comparison.streams],
        **{
            name: getattr(comparison, name).to_dict("records")
            for name in ("figures", "categories", "phases", "layers", "most", "blocks", "collectives")
        },
        "time": time_object(comparison),
    }


_BLOCK_COLUMNS = ("bytes", "stack", "at_peak")
_SEGMENT_COLUMNS = ("moment", "bytes", "pool", "private_pool", "is_expandable", "free_bytes")
#: Notes of a snapshot that a reader must know before the figures.
_LIMITS = ("snapshot_starts_late", "snapshot_without_history", "snapshot_action_unknown", "snapshot_of_several_devices")
#: A change below this share of the larger peak is not worth a look.
_MIN_SHARE = 0.01
#: What runs have and a snapshot has not.
LACKS = ("differences", "phases", "categories", "layers", "collectives", "time")


class SnapshotComparison:
    """The changes of memory from ``a`` to ``b``, each a snapshot or a run, as far as a snapshot of torch knows them.

    Raises:
        RunDirectoryError: One of them has no memory: it was imported from an Nsight report.
    """

    names = ("A", "B")
    time: TimeComparison | None = None

    def __init__(self, a: Run, b: Run) -> None:
        for run in (a, b):
            if run.memory is None:
                raise RunDirectoryError(
                    f"{run.path} has no memory to compare: fakedist nsys imported it",
                    "compare the snapshot with a second snapshot, or with a run of fakedist profile",
                )
        self.runs = self.a, self.b = a, b
        self.summaries = a.summary, b.summary

    @cached_property
    def warnings(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        warnings = []
        for side, run in (("A", self.a), ("B", self.b)):
            warnings += reasons.warnings({side: run.summary})
            warnings += [f"{side}: {note.text}" for note in run.summary.notes if note.code in _LIMITS]
        return warnings

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Both peaks."""
        return changed_memory.figure_changes(*self.summaries).head(2)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Changes of the blocks at the peak by source line."""
        return changed_memory.line_changes(*self._blocks)

    @cached_property
    def stream(self) -> StreamDifference:
        """The allocations of a step of both, in order."""
        return compare_streams(self.a, self.b)

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """Blocks that appeared, grew, shrank, went or stayed."""
        return changed_memory.line_kinds(self.lines)

    @cached_property
    def sizes(self) -> pd.DataFrame:
        """Blocks at the peak that only one of them has, by line and size."""
        return changed_memory.size_changes(*self._blocks)

    @cached_property
    def reserved(self) -> pd.DataFrame:
        """Reserved memory at its peak, in parts."""
        return changed_memory.reserved_changes(*self.summaries)

    @cached_property
    def segments(self) -> pd.DataFrame:
        """The segments when most was reserved, by pool and size."""
        return changed_memory.segment_changes(*(run.table("segments", _SEGMENT_COLUMNS) for run in (self.a, self.b)))

    @property
    def why(self) -> str:
        """The one line: "+12.00 MiB at the peak: 3 more blocks from model.py:12 (forward), +12.00 MiB"."""
        peak = self.summaries[1].peak_allocated_bytes
        total = peak - self.summaries[0].peak_allocated_bytes
        if not total:
            return f"the peak is the same, {format_bytes(peak)}" + (
                "" if self.sizes.empty else ", but made of different blocks"
            )
        way = 1 if total > 0 else -1
        most = self.lines.iloc[int((self.lines["change_bytes"] * way).to_numpy().argmax())]
        return (
            f"{format_change(total)} at the peak: {self._blocks_of(most)}, {format_change(int(most['change_bytes']))}"
        )

    @property
    def headlines(self) -> list[tuple[str, str]]:
        """The line of the peak, as :attr:`Comparison.headlines`."""
        return [("why", self.why)]

    def _blocks_of(self, row: pd.Series) -> str:
        num_a, num_b = int(row["num_a"]), int(row["num_b"])
        line = self.shown(str(row["line"]))
        if not num_a or not num_b:
            return f"{_blocks(num_a or num_b)} from {line}, only in {'A' if num_a else 'B'}"
        if num_a == num_b:
            return f"{'larger' if row['change_bytes'] > 0 else 'smaller'} blocks from {line}"
        return f"{_blocks(abs(num_b - num_a), 'more' if num_b > num_a else 'fewer')} from {line}"

    def shown(self, line: str) -> str:
        """A line as tables show it: relative to the working directory of a run, or to where packages are."""
        for run in (self.a, self.b):
            line = short_line(line, run.manifest.cwd)
        return line

    @cached_property
    def look_first(self) -> list[str]:
        """Hints beyond the headline, one sentence each."""
        return [text for text in (self._unused(), self._expandable(), self._without_line()) if text]

    def _unused(self) -> str:
        changes = self.reserved.set_index("name")["change_bytes"]
        largest = max(summary.peak_reserved_bytes for summary in self.summaries)
        unused = int(changes.get("reserved", 0) - changes.get("allocated", 0))
        if abs(unused) < max(_MIN_SHARE * largest, 1):
            return ""
        parts = changes[changes.index.isin(changed_memory.UNUSED_PARTS)] * (1 if unused > 0 else -1)
        name = str(parts.idxmax())
        part = UNUSED_NAMES[name], format_change(int(changes[name]))
        return f"{format_change(unused)} reserved without a tensor in it: {part[0]}, {part[1]}"

    def _expandable(self) -> str:
        uses = [
            bool(run.table("segments", ["is_expandable"])["is_expandable"].to_numpy(bool).any())
            for run in (self.a, self.b)
        ]
        if uses[0] == uses[1]:
            return ""
        return f"only {'A' if uses[0] else 'B'} has expandable segments (PYTORCH_CUDA_ALLOC_CONF)"

    def _without_line(self) -> str:
        untold = self.lines[self.lines["line"].isin((IN_TORCH, NO_STACK))]
        change = int(untold["change_bytes"].sum())
        if abs(change) < max(_MIN_SHARE * max(summary.peak_allocated_bytes for summary in self.summaries), 1):
            return ""
        return (
            f"{format_change(change)} at the peak has no line of the script: most of backward has no Python stack, and "
            "blocks from before the history have none either"
        )

    @cached_property
    def _blocks(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        sides = [
            changed_memory.lines_at_peak(
                run.table("blocks", _BLOCK_COLUMNS), [str(line) for line in run.table("stacks", ["line"])["line"]]
            )
            for run in (self.a, self.b)
        ]
        return changed_memory.blocks_by_line(sides[0], sides[1])


def _blocks(number: int, how: str = "") -> str:
    return " ".join(part for part in (f"{number:,}", how, "block" if number == 1 else "blocks") if part)


def snapshot_object(comparison: SnapshotComparison) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints if one of both is a snapshot."""
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "why": comparison.why,
        "warnings": comparison.warnings,
        "look_first": comparison.look_first,
        "lacks": list(LACKS),
        "moment": MOMENTS[0],
        "stream": stream_object(comparison.stream),
        **{
            name: getattr(comparison, name).to_dict("records")
            for name in ("figures", "kinds", "lines", "sizes", "reserved", "segments")
        },
    }


def stream_object(stream: StreamDifference) -> dict[str, object]:
    """The part of that object about allocations in order."""
    facts = {name: getattr(stream, name) for name in ("step_a", "step_b", "num_a", "num_b", "num_same")}
    first = None
    if stream.first is not None:
        before, *sides = stream.first
        first = {"num_before": before} | {
            side: None if row is None else {"bytes": row.bytes_, "line": row.line, "phase": row.phase}
            for side, row in zip("ab", sides, strict=True)
        }
    return {**facts, "first": first, "lines": stream.lines.to_dict("records")}


Compared = Comparison | SnapshotComparison


def open_comparison(a: Path, b: Path) -> Compared:
    """Compare two run directories; or by what snapshots know, if one of them is a snapshot. Changes are from a to b.

    Raises:
        RunDirectoryError: One of them is neither, or is damaged; or a snapshot is compared with a run without memory.
    """
    if a.is_file() or b.is_file():
        return SnapshotComparison(open_run(a), open_run(b))
    return Comparison(a, b)


def compared_object(comparison: Compared) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints."""
    return comparison_object(comparison) if isinstance(comparison, Comparison) else snapshot_object(comparison)
