"""The data behind the page's drawings: memory over time, the peak block by block, and the timed step.

The block is a little-endian u32 with the length of a JSON header, the header padded with blanks to a multiple of 8,
and the arrays, each on a multiple of 8. Integers are stored byte by byte (all lowest bytes, then all second ones), so
that neighbours are similar and gzip compresses them well.

Advised changes as switches of the page: the blocks that each change saves, for a replay of any of them together.

A browser replays them as :meth:`fakedist.analysis.evidence.Evidence.saved` does, over *points*: the moves of the
timeline, and the events between two moves at which a change begins or ends. Sums are in the same order, so they are
equal to the last bit.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.advice import RULES, advice_of
from fakedist.analysis.evidence import Change, Evidence, Saving
from fakedist.analysis.memory_tables import Fold, fold_layers, with_children
from fakedist.analysis.recording import Array
from fakedist.cost_model.breakdown import name_rows
from fakedist.cost_model.host_times import thread_titles
from fakedist.cost_model.step_axis import bars, hidden_us, kind_runs, layer_runs, longest_runs
from fakedist.report.content.memory import block_owners, frame_texts
from fakedist.report.content.time import top_kernels
from fakedist.report.figures.memory_figures import MemoryCurve, named_bands
from fakedist.report.figures.run_figures import Calls
from fakedist.report.figures.time_figures import bar_labels, drawn_host, drawn_ranges, host_lanes, lane_titles
from fakedist.results.run import Run, evidence_of, room_of_run
from fakedist.results.verdict import short_operation
from fakedist.rundir.notes import counted
from fakedist.rundir.schema import CATEGORIES, FAMILIES, KINDS
from fakedist.rundir.sources import INDUCTOR_FILE, WRAPPERS
from fakedist.rundir.step_time import StepTime
from fakedist.rundir.summary import Advice
from fakedist.units import format_bytes

_LEVEL = 6  # gzip; 9 takes three times as long for 2 % less


class Pack:
    """Named arrays, and ``meta``: one JSON object with everything else, which the page reads from the header."""

    def __init__(self) -> None:
        self.meta: dict[str, object] = {}
        self.numbers: dict[str, Array] = {}

    def add(self, name: str, values: npt.ArrayLike) -> None:
        """Add an array: non-negative integers in the narrowest type, everything else as float64."""
        array = np.asarray(values)
        if array.dtype.kind in "iub":
            most = int(array.max(initial=0))
            kinds: tuple[tuple[int, str], ...] = ((1 << 8, "u1"), (1 << 16, "<u2"), (1 << 32, "<u4"))
            kind = next((kind for limit, kind in kinds if most < limit), "<f8")
            array = array.astype(kind)
        else:
            array = array.astype("<f8")
        self.numbers[name] = array

    def add_table(self, name: str, columns: Mapping[str, npt.ArrayLike]) -> None:
        """Add the columns of a table, whose name begins theirs."""
        for column, values in columns.items():
            self.add(f"{name}_{column}", values)

    def text(self) -> str:
        """The whole block as base64 text."""
        index = {}
        body = []
        at = 0
        for name, array in self.numbers.items():
            index[name] = [array.dtype.str.lstrip("<|"), at, len(array)]
            data = array.tobytes()
            if array.dtype.kind == "u":
                data = np.frombuffer(data, "u1").reshape(-1, array.dtype.itemsize).T.tobytes()
            data += bytes(-len(data) % 8)
            body.append(data)
            at += len(data)
        header = json.dumps({"meta": self.meta, "arrays": index}, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + 4) % 8)
        block = b"".join([len(header).to_bytes(4, "little"), header, *body])
        return base64.b64encode(gzip.compress(block, _LEVEL, mtime=0)).decode()


_MOST_KNOTS = 4_000  # of an axis of time: about one for each third of a pixel of a wide screen


def add_timeline(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add every block that was allocated: its kind, and after how many moves it was freed.

    Blocks are in order of allocation, so the moves that free no block are the blocks' allocations in order, and two
    numbers per block are enough. Blocks of a kind have the same bytes, category, layer, operation, line and stack.
    """
    blocks = curve.blocks
    lives = np.where(curve.freed < curve.num_moves, curve.freed - curve.made, 0)
    line, line_names = pd.factorize(pd.Series([*curve.lines, ""]))
    names, owners = block_owners(run)
    owner, owner_texts = pd.factorize(pd.Series(owners, dtype="object"))
    layer = blocks["layer"].to_numpy().copy()
    layer[np.fromiter(owners, "i8", len(owners))] = len(names) + owner
    keys = {
        "bytes": blocks["bytes"].to_numpy(),
        "category": curve.colouring.of_block,
        "layer": layer,
        "operation": blocks["operation"].cat.codes.to_numpy(),
        "line": line[blocks["stack"].to_numpy()],  # stack -1 (none) indexes the empty line at the end
        "stack": np.where(blocks["stack"] < 0, len(curve.lines), blocks["stack"]),  # beyond the last stack: none
    }
    kind, first = kinds_of_rows(keys)
    pack.add_table("block", {"kind": kind, "life": lives})
    pack.add_table("kind", {name: values[first] for name, values in keys.items()})
    pack.meta |= {
        "owners": [str(text) for text in owner_texts],
        "names": curve.colouring.names,
        "colours": curve.colouring.colours,
        "operations": [short_operation(str(name)) for name in blocks["operation"].cat.categories],
        "lines": [str(name) for name in line_names],
        "num_moves": curve.num_moves,
    }


def kinds_of_rows(columns: dict[str, Array]) -> tuple[Array, Array]:
    """Group equal rows: for each row the number of its kind, and for each kind its first row."""
    num_rows = len(next(iter(columns.values())))
    kind = np.zeros(num_rows, "i8")
    for values in columns.values():
        code, names = pd.factorize(values)
        kind = pd.factorize(kind * len(names) + code)[0]  # below rows times names, so it never overflows
    first = np.unique(kind, return_index=True)[1]
    return kind, first


def add_reserved(pack: Pack, curve: MemoryCurve) -> None:
    """Add reserved bytes at each change."""
    changed = np.flatnonzero(np.diff(curve.reserved, prepend=0))
    # A segment is for the next move. Of several changes before one move, the largest is kept.
    move = np.minimum(curve.of_event[changed] + 1, max(curve.num_moves - 1, 0))
    largest = pd.DataFrame({"move": move, "bytes": curve.reserved[changed]}).groupby("move")["bytes"].max()
    pack.add_table("reserved", {"move": largest.index.to_numpy(), "bytes": largest.to_numpy()})


def add_refusal(pack: Pack, run: Run, curve: MemoryCurve) -> str:
    """Add the move at which memory did not suffice for the first time; returns its name, or "" where it always did."""
    summary = run.summary
    failed, limit = summary.out_of_memory, summary.capacity_bytes
    if failed is not None and not failed.went_on:
        found = np.flatnonzero((run.table("events", ["action"])["action"] == "oom").to_numpy())[-1:]
        name = text = "refused"
    elif failed is not None:
        found = np.flatnonzero(curve.reserved > (failed.limit_bytes or limit))[:1]
        name, text = "the first refusal", "first refused"
    else:
        found = np.flatnonzero((curve.reserved > limit) & (limit > 0))[:1]
        name = text = "beyond the GPU's memory"
    if not len(found):
        return ""
    if failed is not None:
        operation = short_operation(failed.operation) or "an allocation"
        text = f"{text}: {format_bytes(failed.requested_bytes)} for {operation}"
    move = int(curve.move_at(np.asarray(found))[0])
    pack.meta["refusal"] = {"move": max(min(move, curve.num_moves - 1), 0), "text": text}
    return name if failed is None or failed.went_on else "the refusal"


def add_spans(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add the moves at which phases begin."""
    if not run.has("spans"):
        return
    spans = run.table("spans")
    names, phase = np.unique(spans["phase"].astype(str), return_inverse=True)
    pack.meta["phases"] = names.tolist()
    moves = curve.move_at(spans["first_event"].to_numpy())
    pack.add_table("span", {"phase": phase, "step": spans["step"].to_numpy(), "move": moves})


def add_named_phases(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add the script's phases: the moves at which they begin and end, and how many others each of them is within."""
    bands = named_bands(run, curve)
    if not len(bands):
        return
    pack.meta["named"] = bands["phase"].tolist()
    pack.add_table("named", {name: bands[name].to_numpy() for name in ("begin", "end", "depth")})


def add_times(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add the axes of time: when moves happened, at enough of them to draw a straight line between.

    The wall time is the recording's. In the timed step a move also has the time of the next kernel that was launched.
    """
    time_us = np.maximum.accumulate(curve.time_us[curve.events])
    if not len(time_us):
        return
    knots = _knots(len(time_us))
    pack.add_table("wall", {"move": knots, "us": time_us[knots] - time_us[0]})
    if run.summary.timed is None:
        return
    kernels = run.table("kernels", ["op", "start_us", "duration_us", "stream"])
    kernels = kernels[kernels["op"] > 0]
    if not len(kernels):
        return
    busiest = kernels.groupby("stream")["duration_us"].sum().idxmax()
    kernels = kernels[kernels["stream"] == busiest].sort_values(["op", "start_us"], kind="stable")
    op = run.table("events", ["op"])["op"].to_numpy()[curve.events]
    start = kernels["start_us"].to_numpy("f8")
    inside = np.flatnonzero((op >= kernels["op"].iloc[0]) & (op <= kernels["op"].iloc[-1]))
    if len(inside) < 2:
        return
    moves = np.arange(inside[0], inside[-1] + 1)
    indices = np.searchsorted(kernels["op"].to_numpy(), np.maximum.accumulate(op[moves]))
    knots = _knots(len(moves))
    started = np.maximum.accumulate(start)[np.minimum(indices, len(start) - 1)]
    pack.add_table("step", {"move": moves[knots], "us": started[knots]})
    pack.meta["timed"] = {"step": run.summary.timed[1].step, "source": run.summary.timed[1].source}


def _knots(num: int) -> Array:
    return np.unique(np.linspace(0, num - 1, min(num, _MOST_KNOTS)).astype("i8"))


def add_layers(pack: Pack, layers: pd.DataFrame, folds: list[Fold]) -> None:
    """Add own bytes of every layer at the peak, and the layers in each folded row of the table."""
    pack.meta |= {"categories": CATEGORIES, "layers": layers["name"].astype(str).tolist()}
    sizes = {name: layers[f"peak_{name}_bytes"].to_numpy() for name in CATEGORIES}
    parent = layers["parent"].to_numpy() + 1
    pack.add_table("layer", {"parent": parent, **sizes, "most": layers["most_total_bytes"].to_numpy()})
    add_folds(pack, folds)


def add_folds(pack: Pack, folds: list[Fold]) -> None:
    """Add the layers in each folded row of a table."""
    layers = [layer for fold in folds for layer in fold.layers]
    pack.add_table("fold", {"size": [len(fold.layers) for fold in folds], "layers": layers})


def add_calls(pack: Pack, calls: Calls) -> None:
    """Add the calls that have a lane, each at the next move after it."""
    kept = np.flatnonzero(calls.lane >= 0)
    pack.add_table("call", {"move": calls.move[kept], "lane": calls.lane[kept], "bytes": calls.bytes[kept]})
    pack.meta["lanes"] = [{"group": name, "operation": operation} for _, name, operation in calls.lanes]


#: Limits for the bars of the timeline (all streams together) and the intervals of its layers: about 10 bytes each.
MOST_BARS = 60_000
MOST_RUNS = 40_000
#: The script's own ranges, the longest.
MOST_RANGES = 20_000
#: The host's operations and waits: neighbours of one layer and phase are merged.
MOST_HOST_BARS = 20_000
_TICKS = 1 << 31  # per step: 1 ns each in a step of 2 s, and the same bytes for any duration
#: Columns of the table of layers: figures with children, which the page sums itself when a folded row is expanded.
LAYER_FIGURES = (*(f"{kind}_us" for kind in KINDS), "total_us", "launch_gap_us")


def add_kernels(pack: Pack, run: Run, kernels: pd.DataFrame, layers: pd.DataFrame, time: StepTime) -> None:
    """Add the timeline: bars by stream, with the layers and phases above them.

    ``bars_row`` is the row of :func:`top_kernels` that a bar's kernel is in, from 1 on; 0 for none.
    """
    top, folds = top_kernels(run), fold_layers(layers)
    step_us = time.step_us or 1.0
    tick = max(step_us / _TICKS, 1e-3)
    drawn = bars(kernels, MOST_BARS)
    rows = kernels.iloc[drawn["first"].to_numpy("i8")]
    names, labels = bar_labels(run, rows)
    keys = {
        "family": rows["family"].to_numpy("i8"),
        "kind": rows["kind"].to_numpy("i8"),
        "layer": rows["layer"].to_numpy("i8"),
        "name": names,
        "known": drawn["known"].to_numpy("i8"),
        "row": 1 + name_rows(rows, top, folds),
    }
    of_bar, first = kinds_of_rows(keys)
    pack.add_table("bars", {name: values[first] for name, values in keys.items()})
    stream = np.unique(drawn["stream"].to_numpy("u8"), return_inverse=True)[1]
    pack.add_table("bar", {"kind": of_bar, "num": drawn["num_kernels"].to_numpy(), "stream": stream})
    _add_times(pack, "bar", drawn, tick)
    _add_sums(pack, kernels, drawn, tick)
    is_call = (keys["family"] == FAMILIES.index("communication")) & drawn["known"].to_numpy(bool)
    pack.add("bar_hidden", np.where(is_call, np.round(hidden_us(drawn, kernels) / tick), 0).astype("i8"))
    all_runs = layer_runs(kernels, layers["parent"].to_numpy())
    runs = longest_runs(all_runs, MOST_RUNS)
    pack.add_table("run", {name: runs[name].to_numpy("i8") for name in ("layer", "kind", "depth")})
    _add_times(pack, "run", runs, tick)
    _add_ranges(pack, run, tick)
    _add_host(pack, run, tick)
    phases = kind_runs(kernels)
    pack.add("part_kind", phases["kind"].to_numpy("i8"))
    _add_times(pack, "part", phases, tick)
    pack.meta |= {
        "families": FAMILIES,
        "kinds": KINDS,
        "streams": lane_titles(run, kernels),
        "kernels": labels,
        "tick_us": tick,
        "step_us": step_us,
        "num_kernels": len(kernels),
        "merged": len(drawn) < len(kernels),
        "runs_left_out": len(all_runs) - len(runs),
    }
    pack.meta.setdefault("layers", layers["name"].astype(str).tolist())
    pack.add("layer_parent", layers["parent"].to_numpy() + 1)


def _add_sums(pack: Pack, kernels: pd.DataFrame, drawn: pd.DataFrame, tick: float) -> None:
    """Add what differs from a bar's length: the time of its kernels, and how much of the critical path they are.

    Where kernels overlap or leave gaps, a bar is shorter (``bar_more``) or longer (``bar_less``) than their sum.
    """
    order = np.lexsort((kernels["start_us"].to_numpy("f8"), kernels["stream"].to_numpy("u8")))  # as bars are made
    first = np.cumsum(drawn["num_kernels"].to_numpy("i8")) - drawn["num_kernels"].to_numpy("i8")

    def ticks(us: Array) -> Array:
        return np.round(np.add.reduceat(us[order], first) / tick).astype("i8") if len(first) else np.zeros(0, "i8")

    start, end = (np.round(np.maximum(drawn[name].to_numpy("f8"), 0) / tick) for name in ("start_us", "end_us"))
    more = ticks(kernels["known_us"].to_numpy("f8")) - np.maximum(end - start, 0).astype("i8")
    path = kernels["path_us"].to_numpy("f8")
    pack.meta["has_path"] = bool(np.isfinite(path).all()) and bool(path.any())
    on_path = ticks(path) if pack.meta["has_path"] else np.zeros(len(first), "i8")
    pack.add_table("bar", {"more": np.maximum(more, 0), "less": np.maximum(-more, 0), "path": on_path})


def _add_ranges(pack: Pack, run: Run, tick: float) -> None:
    ranges = drawn_ranges(run, MOST_RANGES)
    name, names = pd.factorize(ranges["name"].astype(str))
    columns = {"lane": "lane", "kernels": "num_kernels", "calls": "num_calls"}
    counts = {short: ranges[column].to_numpy("i8") for short, column in columns.items()}
    busy = np.round(ranges["kernel_us"].to_numpy("f8") / tick).astype("i8")
    pack.add_table("range", {"name": name, **counts, "busy": busy})
    _add_times(pack, "range", ranges, tick)
    pack.meta["ranges"] = [str(label) for label in names]


def _add_host(pack: Pack, run: Run, tick: float) -> None:
    rows = drawn_host(run, MOST_HOST_BARS)
    name, names = pd.factorize(rows["name"].astype(str))
    keys = {
        "name": name,
        "kind": rows["kind"].to_numpy("i8"),
        "layer": rows["layer"].to_numpy("i8"),
        "waits": (~rows["is_compute"]).to_numpy("i8"),
        "lane": host_lanes(rows),
    }
    of_row, first = kinds_of_rows(keys)
    pack.add_table("hosts", {key: values[first] for key, values in keys.items()})
    pack.add_table("host", {"of": of_row, "num": rows["num_parts"].to_numpy("i8")})
    _add_times(pack, "host", rows, tick)
    threads = [*thread_titles(rows["stream"].to_numpy("u8")).values()]
    pack.meta |= {"host_names": [str(label) for label in names], "threads": threads}


def _add_times(pack: Pack, prefix: str, table: pd.DataFrame, tick: float) -> None:
    start = np.round(np.maximum(table["start_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    end = np.round(np.maximum(table["end_us"].to_numpy("f8"), 0.0) / tick).astype("i8")
    pack.add_table(prefix, {"start": start, "length": np.maximum(end - start, 0)})


def add_layer_times(pack: Pack, times: pd.DataFrame, layers: pd.DataFrame) -> None:
    """Add figures of every layer with children, in whole nanoseconds, for folded rows that are expanded."""
    own = {name: times["own_us" if name == "total_us" else name].to_numpy("f8") for name in LAYER_FIGURES}
    figures = {name: with_children(layers, values) for name, values in own.items()} | {"own_us": own["total_us"]}
    pack.add_table("time", {name: np.round(values * 1e3).astype("i8") for name, values in figures.items()})


#: Calls in the tree, and letters of a frame, so that no page grows beyond 2.5 MB.
MOST_NODES = 40_000
_MOST_LETTERS = 400
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|/torch/|^<|^\W*$|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|so)\b"
    rf"|{INDUCTOR_FILE.pattern}"
)


def is_library(filename: str) -> bool:
    """Return whether a frame's file was installed, generated or compiled, and so is not the job's own code."""
    return filename.endswith(WRAPPERS) or _LIBRARY.search(filename) is not None


def add_stacks(pack: Pack, run: Run, curve: MemoryCurve) -> bool:
    """Add the tree: of each node its caller (0 is the root) and its frame, and the innermost node of each stack.

    Stacks with the most bytes come first. Those beyond ``MOST_NODES`` calls end at a node that says how many they are.
    Returns whether any block has a stack.
    """
    frames = run.table("frames")
    same = frames.groupby(["filename", "line", "function"], sort=False).ngroup().to_numpy()
    nodes, leaf, left_out = _tree(run.table("stacks")["frames"].tolist(), same, _heaviest(curve))
    used, frame = np.unique(np.array([number for _, number in nodes], "i8"), return_inverse=True)
    kept = frames.iloc[np.unique(same, return_index=True)[1][used]]
    texts = [text[:_MOST_LETTERS] for text in frame_texts(kept, run.manifest.cwd)]
    library = [is_library(str(name)) for name in kept["filename"]]
    parents = [parent for parent, _ in nodes]
    if left_out:
        leaf = np.where(leaf < 0, len(nodes) + 1, leaf)
        parents = [*parents, 0]
        frame = np.append(frame, len(texts))
        texts.append(f"({counted(len(left_out), 'stack')} with the fewest bytes: left out of this page)")
        library.append(False)
    pack.add_table("node", {"parent": parents, "frame": frame})
    pack.add("stack_node", np.append(leaf, 0))  # of blocks without a stack
    pack.add("frame_library", library)
    pack.meta["frames"] = texts
    return bool(texts)


def _heaviest(curve: MemoryCurve) -> list[int]:
    """The stacks that have blocks, most bytes first."""
    stack = curve.blocks["stack"].to_numpy()
    bytes_ = np.bincount(stack + 1, curve.blocks["bytes"].to_numpy("f8"), len(curve.lines) + 1)[1:]
    order = np.argsort(-bytes_, kind="stable")
    return [int(number) for number in order if bytes_[number] > 0]


def _tree(stacks: list[Array], same: Array, wanted: list[int]) -> tuple[list[tuple[int, int]], Array, list[int]]:
    """Nodes as (parent, frame), numbered from 1; each stack's innermost node (-1 if left out); what is left out.

    ``same`` has one number for all rows of the table ``frames`` that are equal.
    """
    numbers: dict[tuple[int, int], int] = {}
    leaf = np.zeros(len(stacks), "i8")
    for at, stack in enumerate(wanted):
        if len(numbers) + len(stacks[stack]) > MOST_NODES:
            leaf[wanted[at:]] = -1
            return list(numbers), leaf, wanted[at:]
        node = 0
        for frame in same[np.asarray(stacks[stack], "i8")][::-1].tolist():
            node = numbers.setdefault((node, frame), len(numbers) + 1)
        leaf[stack] = node
    return list(numbers), leaf, []


@dataclass(frozen=True)
class Switch:
    """One advised change, and what it does by itself. ``change`` is None if it moves no block."""

    advice: Advice
    change: Change | None

    @property
    def subjects(self) -> list[str]:
        """Of switches that share a subject only one can be on."""
        return sorted((self.change.subjects if self.change else ()) or {self.advice.rule})

    @property
    def savings(self) -> list[Saving]:
        """The least and the most that it saves; one if both are the same, none if it moves no block."""
        if self.change is None:
            return []
        return [self.change.most] if self.change.least is None else [self.change.least, self.change.most]


def find_switches(run: Run) -> tuple[Evidence | None, list[Switch]]:
    """The advised changes that the run's tables still show, in the order of their rules, and what the tables show."""
    summary = run.summary
    advised = {advice.title: advice for advice in summary.advice}
    wanted = {*advised, *(summary.remedy.titles if summary.remedy else ())}
    evidence, room = evidence_of(run) if wanted else None, room_of_run(run)
    if evidence is None:
        return None, []
    changes = [change for rule in RULES for change in rule(evidence) if change.title in wanted]
    switches = [
        Switch(advised.get(change.title) or advice_of(evidence, room, change, evidence.saved([change])), change)
        for change in changes
    ]
    reserved = [advice for advice in summary.advice if advice.of == "peak_reserved_bytes"]
    return evidence, [*switches, *(Switch(advice, None) for advice in reserved)]


def add_switches(pack: Pack, run: Run, curve: MemoryCurve) -> list[Switch]:
    """Add the switches, and the blocks that each saves; returns them in order of their numbers."""
    evidence, switches = find_switches(run)
    if evidence is None or not switches:
        return []
    cuts = [_cuts(evidence, saving) for switch in switches for saving in switch.savings]
    every = pd.concat([_NO_CUTS, *cuts], ignore_index=True)
    inner = np.unique(np.concatenate([every["start"].to_numpy("i8"), every["end"].to_numpy("i8")]))
    inner = np.setdiff1d(inner[inner < len(evidence.allocated)], curve.events)
    points = np.sort(np.concatenate([curve.events, inner]))
    pack.add("inner_move", np.searchsorted(curve.events, inner))
    values, indices = np.unique(every["bytes"].to_numpy("f8"), return_inverse=True)
    # Blocks of a saving ascend. A block that is gone for all its life has no points.
    steps = [np.diff(cut["block"].to_numpy("i8"), prepend=0) for cut in cuts]
    ends = {
        name: np.where(every["is_life"].to_numpy(bool), 0, np.searchsorted(points, every[name].to_numpy("i8")))
        for name in ("start", "end")
    }
    block = np.concatenate([np.zeros(0, "i8"), *steps])
    pack.add_table("cut", {"block": block, **ends, "value": indices, "values": values})
    lengths = iter([len(cut) for cut in cuts])
    room = room_of_run(run)
    pack.meta |= {
        "switches": [_described(switch, [next(lengths) for _ in switch.savings]) for switch in switches],
        "room": {
            "low": room.low_bytes,
            "high": room.high_bytes,
            "stepUs": room.step_us,
            "reserved": evidence.reserved_peak,
            "rounding": evidence.rounding,
        },
    }
    return switches


def _described(switch: Switch, num_cuts: list[int]) -> dict[str, object]:
    advice = switch.advice
    return {
        "title": advice.title,
        "rule": advice.rule,
        "subjects": switch.subjects,
        "priceUs": None if advice.price_us is None else [advice.price_us, advice.price_high_us or advice.price_us],
        "spentOn": advice.spent_on,
        "num": num_cuts,
        "hasOtherBlocks": switch.change is not None and switch.change.has_other_blocks,
    }


_NO_CUTS = pd.DataFrame({"block": [], "bytes": [], "start": [], "end": [], "is_life": []})


def _cuts(evidence: Evidence, saving: Saving) -> pd.DataFrame:
    """The blocks that are saved: bytes, first event, end, and whether that is all of the block's life."""
    made, freed = (evidence.blocks[name].to_numpy("i8") for name in ("alloc_event", "free_event"))
    gone = np.asarray(saving.bytes_)
    start: Array = made if saving.starts is None else np.asarray(saving.starts, "i8")
    end: Array = freed if saving.ends is None else np.asarray(saving.ends, "i8")
    is_life = (gone > 0) & (start <= made) & (end >= freed)
    rows = np.flatnonzero((gone != 0) & (is_life | (start < end)))
    columns = {"block": rows, "bytes": gone[rows], "start": start[rows], "end": end[rows], "is_life": is_life[rows]}
    return pd.DataFrame(columns)
