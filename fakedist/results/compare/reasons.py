"""Why a figure changed: the settings in which the runs differ, and the categories and layers that account for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fakedist.results.compare.layer_matching import OUTSIDE
from fakedist.results.run import Run
from fakedist.rundir.directory import Manifest
from fakedist.rundir.outcome import BEYOND_CAPACITY, Ending, Outcome
from fakedist.rundir.summary import Summary
from fakedist.units import format_bytes, format_change, format_us, format_us_change

#: Settings of a job: their keys and display names.
_JOB = {
    "world_size": "world size",
    "rank": "rank",
    "target": "script",
    "arguments": "arguments",
    "gpus_per_node": "GPUs a node",
    "device": "device",
    "gpu_memory_bytes": "GPU memory",
    "reserve_bytes": "GPU memory of others",
    "host_memory_bytes": "host memory",
    "gpu_power_watts": "GPU power limit in watts",
    "steps": "steps asked for",
    "launcher": "launcher",
    "collectives": "collectives",
    "values": "values",
    "environment": "variables",
    "seed": "seed",
    "nccl_environment": "NCCL's variables",
}


def different_settings(a: Run, b: Run) -> dict[str, tuple[str, str]]:
    """Every setting in which two runs differ, and both values."""
    pairs = [(name, _setting(a.manifest, key), _setting(b.manifest, key)) for key, name in _JOB.items()]
    one, other = a.summary, b.summary
    pairs += [
        (
            "git commit",  # of 40 characters, and "+" where the tree was changed
            a.manifest.git_commit[:12] + a.manifest.git_commit[40:],
            b.manifest.git_commit[:12] + b.manifest.git_commit[40:],
        ),
        ("torch", one.torch, other.torch),
        ("gpu", one.gpu, other.gpu),
        ("steps that ended", len(one.steps), len(other.steps)),
        ("how it ended", _ending(one.exit), _ending(other.exit)),
        ("times", _times(one), _times(other)),
        ("fakedist", a.manifest.fakedist, b.manifest.fakedist),
    ]
    return {name: (_text(mine), _text(theirs)) for name, mine, theirs in pairs if mine != theirs}


def _setting(manifest: Manifest, key: str) -> object:
    value = getattr(manifest.job, key, None)
    return format_bytes(value) if key.endswith("_bytes") and value is not None else value


def warnings(summaries: Mapping[str, Summary]) -> list[str]:
    """Limits of the figures of named runs, each compared with the first, one sentence each."""
    found = [
        f"{name} {phrase}"
        for name, summary in summaries.items()
        if summary.rank is not None and (phrase := _incomplete(summary))
    ]
    (base, first), *others = summaries.items()
    return found + [text for name, summary in others if (text := _unlike_times((base, first), (name, summary)))]


def _unlike_times(a: tuple[str, Summary], b: tuple[str, Summary]) -> str:
    """Why the times of two named runs are not directly comparable; empty if they are."""
    (name_a, one), (name_b, other) = a, b
    if one.timed is None or other.timed is None:
        return ""
    timed = (one.timed, other.timed)
    words = [source.source for _, source in timed]
    if words[0] != words[1]:
        sources = f"the times of {name_a} are {words[0]}, those of {name_b} {words[1]}"
        return f"{sources}: a difference may be the model's error, not a change of the job"
    unknown = [time.num_unknown_calls for time, _ in timed]
    if bool(unknown[0]) != bool(unknown[1]):
        return f"only one of {name_a} and {name_b} knows the duration of its collectives: do not compare their steps"
    return ""


def _times(summary: Summary) -> str:
    return "none" if summary.timed is None else f"{summary.timed[1].source} ({summary.timed[1].tool})"


def _incomplete(summary: Summary) -> str:
    """A run's early end in one phrase; empty if it was complete."""
    ending = summary.exit
    if ending.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        return ""
    if ending == BEYOND_CAPACITY:
        return "does not fit the GPU: it went on beyond the GPU's memory, so its figures are complete"
    steps = len(summary.steps)
    return f"ended after {steps} step{'' if steps == 1 else 's'}, {_ending(ending)}: its figures end there"


def _ending(ending: Ending) -> str:
    if ending.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        return "finished"  # a run is stopped after --steps
    return ending.in_words


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join("=".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in value)
    return "" if value is None else str(value)


_MOST = 3  # changes named one by one
#: Settings that follow from the others, or that do not change what the script does.
_NO_CAUSE = ("arguments", "steps that ended", "how it ended", "times")
_OPTION = re.compile(r"--?[A-Za-z]")


def changed_text(changes: Sequence[str]) -> str:
    """The changes in one phrase; empty without any."""
    if len(changes) <= _MOST + 1:
        return ", ".join(changes)
    return f"{', '.join(changes[:_MOST])} and {len(changes) - _MOST} more settings"


def changed_names(a: Run, b: Run) -> list[str]:
    """Each of :func:`different_settings` in a few words, those of the script's arguments first."""
    jobs = a.manifest.job, b.manifest.job
    settings = [
        f"{name} {mine or '(none)'} -> {theirs or '(none)'}"
        for name, (mine, theirs) in different_settings(a, b).items()
        if name not in _NO_CAUSE
    ]
    return [*changed_arguments(*([] if job is None else job.arguments for job in jobs)), *settings]


def changed_arguments(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """The arguments in which two command lines differ: "--loss-parallel", "--tp 8 -> 4", "no --checkpoint full"."""
    before, after = _options(a), _options(b)
    changes = []
    for name, values in after.items():
        if name not in before:
            changes.append(_spoken(name, values))
        elif before[name] != values:
            changes.append(f"{_spoken(name, before[name])} -> {' '.join(values) or '(none)'}")
    return [*changes, *(f"no {_spoken(name, values)}" for name, values in before.items() if name not in after)]


def _spoken(name: str, values: Sequence[str]) -> str:
    return " ".join([name, *values]).strip()


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values of each option in their order; arguments before the first option have an empty name."""
    options: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if _OPTION.match(argument):
            name, is_given, value = argument.partition("=")
            options.setdefault(name, []).extend([value] if is_given else [])
        else:
            options.setdefault(name, []).append(argument)
    return options


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
#: A part accounts for the whole if its change is between these multiples of the whole's change.
_STANDS_FOR = (0.8, 1.25)


@dataclass(frozen=True)
class Cause:
    """The layers that account for most of a change: of the peak in bytes, of a step's kernels in microseconds.

    Attributes:
        category: The category (for kernels, the family) that changed most in the same direction.
        path: The layers, with numbers as ``*``; empty if none are prominent.
        part: The change of these layers.
        layer: The layer's name if there is only one, else the path.
    """

    change: float
    category: str
    path: str
    part: float
    layer: str

    def phrase(self, *, is_time: bool = False, is_change: bool = True) -> str:
        """The layers and their change, or what they hold or take: "activations of layers.*.mlp, +2.88 GiB"."""
        if is_time:
            name = self.category
            amount = (format_us_change if is_change else format_us)(self.part)
        else:
            name = _CATEGORY_WORDS[self.category]
            amount = (format_change if is_change else format_bytes)(self.part)
        return f"{name} {_of_layers(self.layer)}, {amount}"


def find_cause(parts: pd.DataFrame, column: str = "change_bytes") -> Cause | None:
    """The category that changed most in the figure's direction, and the deepest layer that accounts for its change.

    None if the figure did not change. ``parts`` has columns path, name, category and ``column``: the layers' own
    changes, which add up to the figure's.
    """
    total = float(parts[column].sum())
    if not total:
        return None
    way = 1 if total > 0 else -1
    sums = parts.groupby("category", observed=True)[column].sum() * way
    category = str(sums.idxmax())
    chosen = parts[parts["category"] == category]
    path, part = _descend(chosen["path"], chosen[column])
    inside = chosen[is_below(chosen["path"], path) & (chosen[column] != 0)]
    depth = len(_steps(path))
    alone = {".".join(_steps(str(name))[:depth]) for name in inside["name"]}
    return Cause(total, category, path, part, alone.pop() if path and len(alone) == 1 else path)


def is_below(paths: pd.Series, path: str) -> pd.Series:
    """Mask of the paths at or below ``path``; all of them if it is empty."""
    return (paths == path) | paths.str.startswith(path + ".") | (not path)


def _descend(paths: pd.Series, changes: pd.Series) -> tuple[str, float]:
    """Descend the tree of names for as long as one branch accounts for the change above it."""
    change = float(changes.sum())
    sums: dict[tuple[str, ...], float] = defaultdict(int)
    for path, part in zip(paths, changes.tolist(), strict=True):
        steps = _steps(str(path))
        for depth in range(1, len(steps) + 1):
            sums[steps[:depth]] += part
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for steps in sums:
        below[steps[:-1]].append(steps)
    at: tuple[str, ...] = ()
    while branches := below[at]:
        best = max(branches, key=lambda branch: sums[branch] / change)
        if not _STANDS_FOR[0] <= sums[best] / change <= _STANDS_FOR[1]:
            break
        at = best
        change = sums[best]
    return ".".join(at), change


def _steps(path: str) -> tuple[str, ...]:
    return (path,) if path.startswith("(") else tuple(path.split("."))


@dataclass(frozen=True)
class AllocationSite:
    """The code that allocates the blocks of a cause; empty texts are unknown.

    ``line`` is the job's, ``file:line (function)``; most of backward has none.
    """

    line: str = ""
    operation: str = ""
    phase: str = ""

    def phrase(self, verb: str) -> str:
        """The verb and the site after a comma: ", made at model.py:212 (forward)"; empty if the site is unknown."""
        if self.line:
            return f", {verb} at {self.line}"
        return f", {verb} in {self.operation.removeprefix('aten.')} ({self.phase})" if self.operation else ""


def origin_of(cause: Cause, blocks: pd.DataFrame) -> AllocationSite:
    """Origin of most of a cause, from path, category, line, operation, phase, change_bytes of peak blocks."""
    way = 1 if cause.part > 0 else -1
    responsible = blocks[is_below(blocks["path"], cause.path) & (blocks["category"] == cause.category)]
    responsible = responsible[responsible["change_bytes"] * way > 0]
    if not len(responsible):
        return AllocationSite()
    sums = responsible.assign(bytes=responsible["change_bytes"].abs())
    by_line = sums[sums["line"] != ""].groupby("line", sort=False)["bytes"].sum()
    by_operation = sums[sums["line"] == ""].groupby(["operation", "phase"], sort=False)["bytes"].sum()
    # A line is more useful than an operation, unless it accounts for next to nothing.
    if len(by_line) and (by_operation.empty or by_line.max() * 2 >= by_operation.max()):
        return AllocationSite(line=str(by_line.idxmax()))
    most = by_operation.index[int(by_operation.argmax())]
    return AllocationSite(operation=str(most[0]), phase=str(most[1]))


def _of_layers(layer: str) -> str:
    """The layers in words: "of layers.*.mlp", "outside of modules", or "all over the model" without a layer."""
    if layer == OUTSIDE:
        return "outside of modules"
    return f"of {layer}" if layer else "all over the model"
