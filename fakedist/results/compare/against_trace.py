"""Compares a step that a tool traced on a real GPU with the step of a run: where the real one is slower."""

from __future__ import annotations

import re
from collections.abc import Callable

import pandas as pd

from fakedist.results.compare.changed_times import PARTS
from fakedist.results.run import Run

#: Kinds of collectives, by words of NCCL's kernels and of torch's calls. The first that matches counts.
_KINDS = (
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce"),
    ("all_to_all, send and recv", r"all_?to_?all|send|recv"),
    ("broadcast", r"broadcast|bcast"),
    ("reduce", r"reduce"),
)
#: What a trace's innermost operations are to a run, which records those that were dispatched: (of torch, of both).
_INNER = (
    (r"aten\._(flash|efficient|cudnn)_attention(?:_forward|(_backward))", r"aten._scaled_dot_product_\1_attention\2"),
    (r"aten\.(?:cudnn_|miopen_|_slow_|thnn_)?conv(?:olution|2d_forward|_depthwise2d)", "aten.convolution"),
    (r"aten\.clamp_min(_?)", r"aten.relu\1"),
    (r"aten\._to_copy", "aten.copy_"),
    (r"aten\.(?:zero_|(?:zeros|ones|full|new_zeros|new_ones|new_full)(?:_like)?)", "aten.fill_"),
    (r"aten\.random_", "aten.randint"),
)
#: Modules that wrap a model, as ranges of torch or of modules name them, and those that are never called.
_WRAPPER = re.compile(r"^(?:DistributedDataParallel|FullyShardedDataParallel|OptimizedModule)(?:\.forward)?(?:\.|$)")
_CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
COLUMNS = ["name", "num_real", "real_us", "num_run", "run_us", "slower_us"]


def slower_parts(real: Run, run: Run) -> dict[str, pd.DataFrame]:
    """By part, layer, operation, collective and family of kernels: by how much the real step is slower, most first.

    Columns ``COLUMNS``: kernels of each side, their time in microseconds, and the difference. A collective's is the
    time for which nothing else computes. Layers are compared where both sides name any alike.
    """
    tables = {
        "part": _parts(real, run),
        "layer": _layers(real, run),
        "operation": _kernels(real, run, "operation", plain_operation),
        "collective": _collectives(real, run),
        "family": _kernels(real, run, "family", str),
    }
    return {name: table for name, table in tables.items() if len(table)}


def plain_operation(name: str) -> str:
    """An operation as traces and runs both know it: ``aten.mm.default`` is ``aten.mm``, of which a trace has only this.

    A trace has the innermost operations, such as ``aten._flash_attention_forward``.
    """
    if not name:
        return "(no operation)"
    parts = name.replace("::", ".", 1).split(".")
    plain = ".".join(parts[:2]) if parts[0] == "aten" else name
    return next((re.sub(inner, both, plain) for inner, both in _INNER if re.fullmatch(inner, plain)), plain)


def _parts(real: Run, run: Run) -> pd.DataFrame:
    times = [side.summary.timed for side in (real, run)]
    assert times[0] is not None
    assert times[1] is not None
    pairs = [(name, getattr(times[0][0], key), getattr(times[1][0], key)) for key, name in PARTS.items()]
    counts = [time[0].num_kernels for time in times if time is not None]
    rows = [(name, counts[0], a, counts[1], b, a - b) for name, a, b in pairs if a or b]
    return pd.DataFrame(rows, columns=COLUMNS)


def _kernels(real: Run, run: Run, column: str, named: Callable[[str], str]) -> pd.DataFrame:
    sides = []
    for side in (real, run):
        kernels = side.table("kernels", [*dict.fromkeys((column, "family", "duration_us"))])
        kernels = kernels[kernels["family"].astype(str) != "communication"]
        names = kernels[column].astype(str).map(named)
        sides.append(kernels["duration_us"].fillna(0.0).groupby(names).agg(["size", "sum"]))
    return _joined(*sides)


def _layers(real: Run, run: Run) -> pd.DataFrame:
    sides = []
    for side in (real, run):
        times = side.table("layer_times")
        named = times[times["name"].astype(str) != ""]
        sums = named.set_index(named["name"].astype(str))[["num_kernels", "own_us"]].set_axis(["size", "sum"], axis=1)
        sides.append(sums[sums["sum"] > 0])
    if not len(sides[0].index.intersection(sides[1].index)):
        names = layers_by_class(run)
        sides[0].index = pd.Index([names.get(_WRAPPER.sub("", name), name) for name in sides[0].index])
        sides[0] = sides[0].groupby(level=0).sum()
    common = sides[0].index.intersection(sides[1].index)
    return _joined(*sides) if len(common) else pd.DataFrame(columns=COLUMNS)


def layers_by_class(run: Run) -> dict[str, str]:
    """A run's layers by their classes, as torch.profiler names modules: "GPT.Block.3.Linear.1"."""
    layers = run.table("layers", ["name", "class_name", "parent"])
    parents: list[int] = layers["parent"].tolist()
    classes = layers["class_name"].astype(str).tolist()
    owner = [*range(len(layers))]  # of containers, the module that holds them
    children: dict[tuple[int, str], list[int]] = {}
    paths = [""] * len(layers)
    for number, (kind, parent) in enumerate(zip(classes, parents, strict=True)):
        above = owner[parent] if parent >= 0 else -1
        if kind in _CONTAINERS:
            owner[number] = above
        else:
            children.setdefault((above, kind), []).append(number)
    for (above, kind), numbers in children.items():
        for index, number in enumerate(numbers):
            own = f"{kind}.{index}" if len(numbers) > 1 else kind
            paths[number] = f"{paths[above]}.{own}" if above >= 0 and paths[above] else own
    return {_WRAPPER.sub("", path): str(name) for path, name in zip(paths, layers["name"], strict=True)}


def _collectives(real: Run, run: Run) -> pd.DataFrame:
    sides = []
    for side in (real, run):
        assert side.summary.timed is not None
        groups = side.summary.timed[0].by_group
        rows = [(collective_kind(row.operation), row.num_calls, row.exposed_us) for row in groups]
        table = pd.DataFrame(rows, columns=["name", "size", "sum"])
        sides.append(table.groupby("name")[["size", "sum"]].sum())
    return _joined(*sides)


def collective_kind(name: str) -> str:
    """The kind of a collective, by the name of NCCL's kernel or of torch's call."""
    return next((kind for kind, words in _KINDS if re.search(words, name, re.IGNORECASE)), name)


def _joined(real: pd.DataFrame, run: pd.DataFrame) -> pd.DataFrame:
    names = real.index.union(run.index)
    a, b = (side.reindex(names, fill_value=0) for side in (real, run))
    table = pd.DataFrame({"name": names.astype(str)})
    for side, own in (("real", a), ("run", b)):
        table[f"num_{side}"], table[f"{side}_us"] = own["size"].to_numpy("i8"), own["sum"].to_numpy("f8")
    table["slower_us"] = table["real_us"] - table["run_us"]
    return table.sort_values("slower_us", ascending=False, kind="stable").reset_index(drop=True)[COLUMNS]
