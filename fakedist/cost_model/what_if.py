"""The effect of a change of a job's communication: its launches and its fabric as if it had been made.

- ``merge=A,B``: the calls of two groups queue on one communicator, one at a time.
- ``separate=A``: each kind of collective of a group has a communicator and a stream of its own.
- ``bandwidth=2x``, ``bandwidth=nvlink:2x``: the NICs, or NVLink, are faster or slower.
- ``fabric=NAME``, ``gpus-per-node=N``: another interconnect.
- ``overlap``: nothing waits for a collective, as if other work of the step could always run meanwhile: the most that
  overlap can gain. A collective still waits for what its stream waits for, and for its communicator; sends and receives
  stay as they are.
- ``no-overlap``: everything runs one after another, so every collective is exposed.
- ``host=2x``: the host is faster or slower.
- ``no-host-waits``: the host launches everything in no time, and waits only for the GPU.
- ``no-sync``: the host never waits for the GPU, as if it read nothing of it; what it launches takes its time.
  ``no-sync=train.py:57``: it does not wait at that line.
- ``cuda-graphs=layers.*``: what these layers launch in a row is one CUDA graph, which ends where the host waits.
- ``compile=layers.*``: the host only launches what these layers run, without torch's operations. No kernel is fused.
- ``foreach``: an optimizer that runs operations for each parameter has them in lists of 30.
- ``bandwidth=2x+host=2x``: several changes at once.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.collectives.collective_times import Fabric
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.host_times import HOST_WAITS, lines_of_operations
from fakedist.cost_model.timeline import waits_of_allocator
from fakedist.errors import JobError

_Kind = Literal[
    "merge", "separate", "bandwidth", "fabric", "gpus-per-node", "host",
    "overlap", "no-overlap", "no-host-waits", "no-sync", "cuda-graphs", "compile", "foreach",
]  # fmt: skip
_FORMS = (
    "merge=A,B, separate=A, bandwidth=2x, bandwidth=nvlink:2x, fabric=NAME, gpus-per-node=N, host=2x, overlap, "
    "no-overlap, no-host-waits, no-sync, no-sync=FILE:LINE, cuda-graphs=LAYERS, compile=LAYERS, foreach"
)
_ALONE: tuple[_Kind, ...] = ("overlap", "no-overlap", "no-host-waits", "no-sync", "foreach")
_WITH_PATTERN: tuple[_Kind, ...] = ("no-sync", "cuda-graphs", "compile")
#: What joins changes: the name of a group or a file may have a plus of its own.
_JOINED = re.compile(rf"\+(?=\s*(?:{'|'.join(get_args(_Kind))})(?:=|\+|\s*$))")
_FACTOR = re.compile(r"(?:(nic|nvlink):)?(\d+(?:\.\d+)?)x?")
_MOST_FACTOR, _MOST_GPUS = 1000.0, 4096


@dataclass(frozen=True)
class WhatIf:
    """A change to price.

    Attributes:
        groups: Names of the groups that it is about.
        nic, nvlink: Factors of their bandwidths.
        host: Factor of the host's speed.
        pattern: Of layers, or of lines; empty for all of them.
        fabric: Empty for the same.
        gpus_per_node: GPUs in one NVLink domain; None for the same number.
    """

    text: str
    kind: _Kind
    groups: tuple[str, ...] = ()
    nic: float = 1.0
    nvlink: float = 1.0
    host: float = 1.0
    pattern: str = ""
    fabric: str = ""
    gpus_per_node: int | None = None


def read_what_ifs(text: str) -> tuple[WhatIf, ...]:
    """Read one or several changes as they are written on the command line; JobError if they are not changes."""
    return tuple(read_what_if(part) for part in _JOINED.split(text))


def read_what_if(text: str) -> WhatIf:
    """Read one change; JobError if it is not one."""
    name, _, value = (part.strip() for part in text.partition("="))
    groups = tuple(part.strip() for part in value.split(",") if part.strip())
    if name == "merge" and len(set(groups)) > 1:
        return WhatIf(text, "merge", groups)
    if name == "separate" and len(groups) == 1:
        return WhatIf(text, "separate", groups)
    if name in ("bandwidth", "host") and (factor_text := _FACTOR.fullmatch(value)):
        link = factor_text[1]
        factor = float(factor_text[2])
        if 0 < factor <= _MOST_FACTOR:
            if name == "host" and not link:
                return WhatIf(text, "host", host=factor)
            if name == "bandwidth":
                nic, nvlink = (1.0, factor) if link == "nvlink" else (factor, 1.0)
                return WhatIf(text, "bandwidth", nic=nic, nvlink=nvlink)
    if name == "fabric" and value:
        return WhatIf(text, "fabric", fabric=value)
    if name == "gpus-per-node" and value.isdecimal() and 0 < int(value) <= _MOST_GPUS:
        return WhatIf(text, "gpus-per-node", gpus_per_node=int(value))
    for kind in _ALONE:
        if name == kind and not value:
            return WhatIf(text, kind)
    for kind in _WITH_PATTERN:
        if name == kind and value:
            return WhatIf(text, kind, pattern=value)
    raise JobError(f"there is no what-if {text!r}", f"what-ifs are {_FORMS}; several are joined by +")


def changed_fabric(what_if: WhatIf, fabric: Fabric, nvlink_bandwidth: float) -> Fabric:
    """The fabric with a what-if's bandwidth; JobError if it changes NVLink and the GPU model has none (0 bytes/s)."""
    if what_if.nic != 1:
        return replace(
            fabric,
            name=f"{fabric.name} with {what_if.nic:g}x NIC bandwidth",
            nic_bandwidth=fabric.nic_bandwidth * what_if.nic,
            send_bandwidth=fabric.send_bandwidth * what_if.nic,
        )
    if what_if.nvlink != 1:
        own = fabric.nvlink_bandwidth or nvlink_bandwidth
        if not own:
            raise JobError(f"{what_if.text}: this GPU has no NVLink", "bandwidth=2x changes the NICs")
        name = f"{fabric.name} with {what_if.nvlink:g}x NVLink bandwidth"
        return replace(fabric, name=name, nvlink_bandwidth=own * what_if.nvlink)
    return fabric


def changed_launches(
    what_if: WhatIf, launches: pd.DataFrame, communication: Communication, tables: Mapping[str, pd.DataFrame]
) -> tuple[pd.DataFrame, Communication]:
    """The launches and communication of a step with the streams, communicators and host of a what-if.

    Args:
        tables: ``groups``, ``layers`` and ``work``, and with lines ``operation_stacks`` and ``stacks``.

    Raises:
        JobError: The step has no calls on such a group, no such layer or line, or the change changes nothing.
    """
    match what_if.kind:
        case "no-overlap":
            return launches.assign(stream=np.uint64(0)), communication
        case "overlap":
            return _overlapped(what_if, launches, communication), communication
        case "no-host-waits":
            return launches.assign(host_us=0.0), communication
        case "host":
            return launches.assign(host_speed=what_if.host), communication
        case "no-sync":
            return _unsynchronized(what_if, launches, tables), communication
        case "cuda-graphs" | "compile":
            return _launched_by_layer(what_if, launches, tables["layers"]), communication
        case "foreach":
            return _in_lists(what_if, launches, tables["work"]), communication
    if not what_if.groups:
        return launches, communication
    groups = tables["groups"]
    queue = communication.calls["queue"].to_numpy("i8", copy=True)
    parts = [_members(what_if, name, queue, groups) for name in what_if.groups]
    if what_if.kind == "merge":
        queue[np.isin(queue, np.concatenate(parts))] = int(parts[0][0])
        return launches, replace(communication, calls=communication.calls.assign(queue=queue))
    return _separated(what_if, launches, communication, parts[0])


def _overlapped(what_if: WhatIf, launches: pd.DataFrame, communication: Communication) -> pd.DataFrame:
    """The launches with the column ``is_apart``, true for collectives but not for sends and receives."""
    kind = communication.calls["kind"].astype(str).reindex(launches["call"].to_numpy("i8"), fill_value="").to_numpy(str)
    is_apart = (launches["what"].astype(str).to_numpy(str) == "collective") & ~np.isin(kind, ["", "send"])
    if not is_apart.any():
        raise JobError(f"{what_if.text}: the step has no collectives", "it changes collectives alone")
    return launches.assign(is_apart=is_apart)


def _unsynchronized(what_if: WhatIf, launches: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The launches with reads of the host as copies that it does not wait for, and without its other waits."""
    what = launches["what"].astype(str)
    waits = what.isin(HOST_WAITS) & ~waits_of_allocator(launches)
    if not waits.any():
        raise JobError(f"{what_if.text}: the step's host waits for nothing", "host=2x makes it faster")
    if what_if.pattern:
        lines = lines_of_operations(tables)
        # As in the table of waits: one outside of any operation is behind the operation before it.
        op = launches["op"].where(launches["op"] >= 0).ffill().fillna(-1).astype("i8")
        waits &= op.map(lambda number: _has_line(lines.get(number, ""), what_if.pattern)).to_numpy(bool)
    if not waits.any():
        raise JobError(
            f"{what_if.text}: the step's host waits for the GPU at no such line",
            "lines are in the report: fakedist report RUN --section time",
        )
    instead = np.where(what == "host_reads", "copy", "stream_waits")  # a wait for no event
    event = launches["event"].where(~waits, np.uint64(0))
    return launches.assign(what=what.where(~waits, instead), event=event)


def _has_line(line: str, pattern: str) -> bool:
    """Whether a line, file:line (function), is the one that is named: train.py:57 is not train.py:570."""
    location = line.partition(" (")[0]
    return location == pattern or location.endswith(f"/{pattern}") or fnmatch.fnmatchcase(location, pattern)


def chosen_layers(pattern: str, layers: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The layers whose name, or that of whose folded row, matches a pattern, with all that they contain."""
    names = layers["name"].astype(str).tolist()
    of_fold = {layer: fold.name for fold in fold_layers(layers) for layer in fold.layers}
    patterns = [part.strip() for part in pattern.split(",")]

    def matches(name: str) -> bool:
        return bool(name) and any(name == part or fnmatch.fnmatchcase(name, part) for part in patterns)

    chosen = np.zeros(len(names), bool)
    for layer, parent in enumerate(layers["parent"].tolist()):
        chosen[layer] = matches(names[layer]) or matches(of_fold[layer]) or (parent >= 0 and chosen[parent])
    return chosen


#: The host's own time, which a change replaces: whole where it was measured, else by operations.
_HOST_TIMES = ("host_us", "dispatch_us")


def _launched_by_layer(what_if: WhatIf, launches: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """The launches of some layers as CUDA graphs, or launched without torch's operations."""
    has_work = launches["work"].to_numpy("i8") >= 0
    graph = launches["graph"].to_numpy("i8")
    what = launches["what"].astype(str).to_numpy(str)
    own = chosen_layers(what_if.pattern, layers)[launches["layer"].to_numpy("i8")]
    own &= (graph == 0) & ~np.isin(what, HOST_WAITS)
    if not (own & has_work).any():
        hint = "layers are in the report, such as layers.0-79, or layers.* for all below it"
        raise JobError(f"{what_if.text}: no such layer launches anything outside of CUDA graphs", hint)
    if what_if.kind == "compile":
        return _without_host_time(launches, own)
    # An event between two launches of a layer ends no graph; a launch of another layer, or a wait of the host, does.
    ends = (has_work | np.isin(what, HOST_WAITS)) & ~own
    phase = pd.factorize(launches["phase"].astype(str) + launches["recompute"].astype(str))[0]
    rows = np.flatnonzero(own & has_work)
    stretch = np.cumsum(ends)[rows]
    begins = (np.diff(stretch, prepend=-1) != 0) | (np.diff(phase[rows], prepend=-1) != 0)
    numbers = graph.copy()
    numbers[rows] = int(graph.max(initial=0)) + np.cumsum(begins)
    return _without_host_time(launches, own).assign(graph=numbers)


def _without_host_time(launches: pd.DataFrame, rows: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """The launches with no time of the host for some rows but that of the launch itself.

    What was measured before the step's first launch stays: it has the work between two steps, too.
    """
    stays = ~rows | (np.arange(len(rows)) == 0)
    measured = {name: launches[name].where(stays) for name in _HOST_TIMES if name in launches}
    return launches.assign(num_operations=launches["num_operations"].where(~rows, 0), **measured)


#: Tensors in one launch of torch's foreach kernels with five lists, such as Adam's (multi_tensor_apply's
#: ``depth_to_max_tensors``). With fewer lists there are more.
_TENSORS_IN_A_LIST = 30
#: Operations on lists of tensors.
_ON_LISTS = ("_foreach_", "_fused_", "_amp_foreach")


def loop_of_optimizer(launches: pd.DataFrame, work: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], float]:
    """The launches of an optimizer's operations on one parameter each, and how many a parameter has.

    None, and 0, unless operations on single tensors are most of what the optimizer launches, each for several tens of
    parameters.
    """
    of_work, graph = launches["work"].to_numpy("i8"), launches["graph"].to_numpy("i8")
    is_optimizer = (launches["phase"].astype(str) == "optimizer").to_numpy(bool)
    rows = (of_work >= 0) & (graph == 0) & is_optimizer & (launches["what"].astype(str) == "kernel").to_numpy(bool)
    operation = work["operation"].astype(str)
    in_lists = operation.str.contains("|".join(_ON_LISTS)).to_numpy(bool)
    single = rows & (operation.str.startswith("aten.").to_numpy(bool) & ~in_lists)[of_work]
    counts = operation.iloc[of_work[single]].value_counts()
    if not len(counts) or 2 * single.sum() < rows.sum() or counts.iloc[0] < 2 * _TENSORS_IN_A_LIST:
        return np.zeros(len(launches), bool), 0.0
    # Most operations run once for each parameter. One may run more often (``mul_`` in AdamW), or for some parameters.
    num_parameters = counts[counts >= _TENSORS_IN_A_LIST].mode().min()
    return single, float(single.sum() / num_parameters)


def _in_lists(what_if: WhatIf, launches: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """The launches with one of a list in place of each 30 of an optimizer's. Its kernels take as long as they do."""
    rows, _ = loop_of_optimizer(launches, work)
    if not rows.any():
        raise JobError(f"{what_if.text}: the step has no optimizer that runs operations for each parameter", "")
    number = np.cumsum(rows) - 1
    more = rows & (number % _TENSORS_IN_A_LIST != 0)
    graph = launches["graph"].to_numpy("i8")
    # What one graph launches after its first costs the host nothing.
    lists = np.where(rows, int(graph.max(initial=0)) + 1 + number // _TENSORS_IN_A_LIST, graph)
    return _without_host_time(launches, more).assign(graph=lists)


def _members(what_if: WhatIf, name: str, queue: npt.NDArray[np.int64], groups: pd.DataFrame) -> npt.NDArray[np.int64]:
    used = np.unique(queue[(queue >= 0) & (queue < len(groups))])  # beyond are queues of another change
    names = groups["name"].astype(str).to_numpy(str)
    labels = groups["description"].astype(str).to_numpy(str)
    members: npt.NDArray[np.int64] = used[(names[used] == name) | (labels[used] == name)]
    if not len(members):
        known = dict.fromkeys(labels[number] or names[number] for number in used.tolist())
        hint = f"groups with collectives are {', '.join(known)}" if known else "the step has no collectives"
        raise JobError(f"{what_if.text}: the step has no collectives on a group {name!r}", hint)
    return members


def _separated(
    what_if: WhatIf, launches: pd.DataFrame, communication: Communication, members: npt.NDArray[np.int64]
) -> tuple[pd.DataFrame, Communication]:
    calls = communication.calls
    queue = calls["queue"].to_numpy("i8", copy=True)
    own = np.isin(queue, members)
    codes, kinds = pd.factorize(calls["kind"].astype(str))
    if len(set(codes[own].tolist())) < 2:
        kind = kinds[codes[own][0]]
        raise JobError(f"{what_if.text}: every call on it is of one kind, {kind}", "there is nothing to separate")
    # A queue for each pair of group and kind, beyond the numbers of all groups.
    queue[own] = (queue.max() + 1) + queue[own] * len(kinds) + codes[own]
    kind_of = pd.Series(np.where(own, codes, -1), index=calls.index)
    of_launch = kind_of.reindex(launches["call"].to_numpy("i8"), fill_value=-1)
    streams = _own_streams(launches, np.asarray(of_launch.to_numpy("i8"), np.int64))
    return launches.assign(stream=streams), replace(communication, calls=calls.assign(queue=queue))


def _own_streams(launches: pd.DataFrame, kind: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The stream of each launch, with a stream for each kind of collective (-1 for other rows).

    Only streams of nothing but collectives are taken apart: the calls of a script's own stream wait for its kernels.
    The waits before a call and the events after it go with it.
    """
    streams: npt.NDArray[np.uint64] = launches["stream"].to_numpy("u8", copy=True)
    device = launches["device"].to_numpy()
    kinds = launches["what"].astype(str).to_numpy(str)
    has_work = launches["work"].to_numpy("i8") >= 0
    is_call = kinds == "collective"
    free = int(streams.max(initial=np.uint64(0))) + 1
    for index, stream in pd.DataFrame({"device": device, "stream": streams})[kind >= 0].drop_duplicates().to_numpy():
        rows = np.flatnonzero((device == index) & (streams == stream))
        if (has_work[rows] & ~is_call[rows]).any():
            continue
        of_row = _kind_of_rows(kinds[rows], has_work[rows], kind[rows])
        stays = int(kind[rows][kind[rows] >= 0][0])
        for one_kind in sorted(set(of_row.tolist()) - {-1, stays}):
            streams[rows[of_row == one_kind]] = free
            free += 1
    return streams


def _kind_of_rows(
    kinds: Sequence[str] | npt.NDArray[np.str_], has_work: npt.NDArray[np.bool_], kind: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The kind of the call that each row of a stream belongs to: the next one for a wait, else the one before."""
    numbers = pd.Series(np.where(has_work, kind, np.nan))
    after, before = numbers.bfill().fillna(-1), numbers.ffill().fillna(-1)
    of_row: npt.NDArray[np.int64] = np.where(np.asarray(kinds) == "stream_waits", after, before).astype(np.int64)
    return of_row
