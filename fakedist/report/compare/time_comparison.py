"""A comparison of two runs' timed steps: every table of changes, and one line with the reason."""

from __future__ import annotations

from functools import cached_property

import pandas as pd

from fakedist.analysis.compare import changed_times, why
from fakedist.report.text.time_wording import communication_word
from fakedist.results.run import Run
from fakedist.units import format_us


class TimeComparison:
    """What changed in the timed step, from one run to another.

    Args:
        runs: Both runs. Each has a timed step.
        paths: For each run, the names of its layers in the comparison.

    Raises:
        RunDirectoryError: On access to a table that is missing or damaged.
    """

    def __init__(self, runs: tuple[Run, Run], paths: tuple[dict[int, str], dict[int, str]]) -> None:
        self.runs, self._paths = runs, paths
        timed = [run.summary.timed for run in runs]
        assert timed[0] is not None
        assert timed[1] is not None
        self.times = timed[0][0], timed[1][0]
        self.words = timed[0][1].source, timed[1][1].source

    @cached_property
    def parts(self) -> pd.DataFrame:
        """The step, and how its time is spent."""
        return changed_times.part_changes(*self.times)

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
        """Whether these times are measured or estimated, for each run if they differ."""
        a, b = self.words
        return a if a == b else f"A {a}, B {b}"

    @property
    def of_communication(self) -> str:
        """The same of communication, which is estimated between measured kernels too."""
        a, b = (communication_word(time) for time in self.times)
        return a if a == b else f"A {a}, B {b}"

    @property
    def why(self) -> str:
        """The one line: "+12.3 ms in the kernels of the step, estimated: gemm of layers.*.mlp, +11.9 ms".

        Of exposed communication if that changed more: "-9.1 ms of exposed communication, estimated: all_gather on dp".
        """
        cause = why.find_cause(self.layers, "change_us")
        exposed = float(self.groups["change_us"].sum())
        if abs(exposed) > (0.0 if cause is None else abs(cause.change)):
            first = self.groups[self.groups["change_us"] * exposed > 0].iloc[0]
            part = f"{first['operation']} on {first['group']}, {format_us_change(float(first['change_us']))}"
            return f"{format_us_change(exposed)} of exposed communication, {self.of_communication}: {part}"
        if cause is None:
            return f"the kernels of the step take the same time, {format_us(self.times[1].kernel_us)}, {self.of}"
        return f"{format_us_change(cause.change)} in the kernels of the step, {self.of}: {say_time_part(cause)}"


def say_time_part(cause: why.Cause, *, is_change: bool = True) -> str:
    """What accounts for a change of time, or for a time: "gemm of layers.*.mlp, +11.9 ms"."""
    amount = format_us_change(cause.part) if is_change else format_us(cause.part)
    return f"{cause.category} {why.of_layers(cause.layer)}, {amount}"


def format_us_change(duration_us: float) -> str:
    """Microseconds with a sign: "+12.3 ms", "-3.0 µs", "0 µs"."""
    text = format_us(duration_us)
    return f"+{text}" if duration_us > 0 and not text.startswith("0 ") else text
