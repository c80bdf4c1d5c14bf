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
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.collectives.fabric import Fabric
from fakedist.errors import JobError

_Kind = Literal[
    "merge", "separate", "bandwidth", "fabric", "gpus-per-node", "host",
    "overlap", "no-overlap", "no-host-waits", "no-sync",
]  # fmt: skip
_FORMS = (
    "merge=A,B, separate=A, bandwidth=2x, bandwidth=nvlink:2x, fabric=NAME, gpus-per-node=N, host=2x, overlap, "
    "no-overlap, no-host-waits, no-sync"
)
_HOST_WAITS = ("host_waits", "host_waits_for_device", "host_reads")
_FACTOR = re.compile(r"(?:(nic|nvlink):)?(\d+(?:\.\d+)?)x?")
_MOST_FACTOR, _MOST_GPUS = 1000.0, 4096


@dataclass(frozen=True)
class WhatIf:
    """A change to price.

    Attributes:
        groups: Names of the groups that it is about.
        nic, nvlink: Factors of their bandwidths.
        host: Factor of the host's speed.
        fabric: Empty for the same.
        gpus_per_node: GPUs in one NVLink domain; None for the same number.
    """

    text: str
    kind: _Kind
    groups: tuple[str, ...] = ()
    nic: float = 1.0
    nvlink: float = 1.0
    host: float = 1.0
    fabric: str = ""
    gpus_per_node: int | None = None


def read_what_if(text: str) -> WhatIf:
    """Read a change as it is written on the command line; JobError if it is not one."""
    name, _, value = (part.strip() for part in text.partition("="))
    groups = tuple(part.strip() for part in value.split(",") if part.strip())
    if name == "merge" and len(set(groups)) > 1:
        return WhatIf(text, "merge", groups)
    if name == "separate" and len(groups) == 1:
        return WhatIf(text, "separate", groups)
    if name in ("bandwidth", "host") and (factor_text := _FACTOR.fullmatch(value)):
        link, factor = factor_text[1], float(factor_text[2])
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
    if name == "overlap" and not value:
        return WhatIf(text, "overlap")
    if name == "no-overlap" and not value:
        return WhatIf(text, "no-overlap")
    if name == "no-host-waits" and not value:
        return WhatIf(text, "no-host-waits")
    if name == "no-sync" and not value:
        return WhatIf(text, "no-sync")
    raise JobError(f"there is no what-if {text!r}", f"what-ifs are {_FORMS}")


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
    what_if: WhatIf, launches: pd.DataFrame, communication: Communication, groups: pd.DataFrame
) -> tuple[pd.DataFrame, Communication]:
    """The launches and communication of a step with the streams and communicators of a what-if.

    Raises:
        JobError: The step has no calls on such a group, or the change changes nothing.
    """
    if what_if.kind == "no-overlap":
        return launches.assign(stream=np.uint64(0)), communication
    if what_if.kind == "overlap":
        return _overlapped(what_if, launches, communication), communication
    if what_if.kind == "no-host-waits":
        return launches.assign(host_us=0.0), communication
    if what_if.kind == "host":
        return launches.assign(host_speed=what_if.host), communication
    if what_if.kind == "no-sync":
        return _unsynchronized(what_if, launches), communication
    if not what_if.groups:
        return launches, communication
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


def _unsynchronized(what_if: WhatIf, launches: pd.DataFrame) -> pd.DataFrame:
    """The launches with reads of the host as copies that it does not wait for, and without its other waits."""
    what = launches["what"].astype(str)
    waits = what.isin(_HOST_WAITS)
    if not waits.any():
        raise JobError(f"{what_if.text}: the step's host waits for nothing", "host=2x makes it faster")
    instead = np.where(what == "host_reads", "copy", "stream_waits")  # a wait for no event
    event = launches["event"].where(~waits, np.uint64(0))
    return launches.assign(what=what.where(~waits, instead), event=event)


def _members(what_if: WhatIf, name: str, queue: npt.NDArray[np.int64], groups: pd.DataFrame) -> npt.NDArray[np.int64]:
    used = np.unique(queue[queue >= 0])
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
    device, kinds = launches["device"].to_numpy(), launches["what"].astype(str).to_numpy(str)
    has_work, is_call = launches["work"].to_numpy("i8") >= 0, kinds == "collective"
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
