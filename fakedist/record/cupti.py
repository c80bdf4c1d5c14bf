"""The timed step as CUPTI saw it: ``torch.profiler``'s raw events, written to the journal.

The events are written unchanged. ``traces`` finds the layer and phase of each kernel after the rank has ended,
so that the script's process does none of that work.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity

from fakedist.patch import present
from fakedist.rundir.encoding import Columns, Record
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.rows import Location
from fakedist.rundir.trace_records import (
    PHASE_RANGE,
    STEP_RANGE,
    ProfilerRecord,
    TracedActivity,
    TracedCalls,
    TracedOperations,
    TracedWaits,
)

#: cupti_activity.h: CUPTI_ACTIVITY_KIND_CUDA_EVENT. Kineto reads these records, and names them in the waits' metadata.
_CUDA_EVENT = 36
_MAPS = Path("/proc/self/maps")


def enable_event_records() -> bool:
    """Have CUPTI record events. The profiler must have started. Returns whether CUPTI does it."""
    library = _cupti()
    return library is not None and library.cuptiActivityEnable(_CUDA_EVENT) == 0


def disable_event_records() -> None:
    """Undo :func:`enable_event_records`."""
    library = _cupti()
    if library is not None:
        library.cuptiActivityDisable(_CUDA_EVENT)


def _cupti() -> ctypes.CDLL | None:
    """The CUPTI that this process has loaded; None if torch has it inside its own libraries."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cuptiActivityEnable"):
        return process
    for line in _MAPS.read_text(errors="replace").splitlines():
        path = line.rpartition(" ")[2]
        if os.path.basename(path).startswith("libcupti"):
            return ctypes.CDLL(path)
    return None


_SIDES = re.compile(r'"(grid|block)": ?\[(\d+), ?(\d+), ?(\d+)\]')
_NODE = re.compile(r'"graph node id": ?(\d+)')
#: Names of functions of CUDA's runtime and driver. No torch operation has such a name. Torch 2.11 has no name for
#: functions newer than itself, such as cudart 13's __cudaLaunchKernel.
_CALL = re.compile(r"(?:__)?cu(?:da)?[A-Z]\w+$|INVALID$|unknown$")


@contextmanager
def _hushed() -> Iterator[None]:
    """Without torch's warnings: on a GPU, torch 2.11 warns of each event of a kind that it does not know, twice."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(None), "FLAGS_caffe2_log_level")  # c10/util/Logging.cpp
    except ValueError:  # built with another logger
        yield
        return
    usual, level.value = level.value, 2  # errors
    try:
        yield
    finally:
        level.value = usual


#: Events that the profiler reports as GPU work although they are none.
_NO_WORK = re.compile(r"\w+ Sync$|Stream Wait|Iteration Start|cudaEvent$")
#: Those that wait, by Kineto's names, as the table of launches calls them.
_WAITS = {
    "Stream Wait Event": "stream_waits",
    "Event Sync": "host_waits",
    "Stream Sync": "host_waits",
    "Context Sync": "host_waits_for_device",
}
_RECORD = re.compile(r'"wait_on_(stream|cuda_event_record_corr_id)": ?(-?\d+)')


#: Torch's ``_KinetoEvent``, which is untyped. Its times are in nanoseconds.
KinetoEvent = Any


class CuptiTracer:
    """``torch.profiler`` around the timed step, whose times are measured, or simulated on the virtual GPU."""

    def __init__(self, source: Literal["measured", "simulated"] = "measured") -> None:
        self._source = source
        self._profile: torch.profiler.profile | None = None
        self._events: Iterable[KinetoEvent] = ()
        self._gpu = ""
        self._has_events = False
        self._event = present(torch._C._profiler, "_RecordFunctionFast")

    def begin(self, step: int) -> None:
        """Start the profiler, then mark which step it is."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        # Without the option of metadata events have no grid and no graph. The other one traces waits.
        make_config = present(torch._C._profiler, "_ExperimentalConfig")
        config = make_config(enable_cuda_sync_events=True, expose_kineto_event_metadata=True)
        # acc_events: there is only one cycle, and some versions warn without it.
        self._profile = torch.profiler.profile(
            activities=activities, acc_events=True, with_flops=True, experimental_config=config
        )
        self._profile.start()
        self._has_events = enable_event_records()
        self._mark(f"{STEP_RANGE}{step}")

    def location(self, location: Location) -> None:
        """Mark that this phase begins."""
        self._mark(f"{PHASE_RANGE}{location.phase}")

    def end(self) -> None:
        """Stop the profiler once everything that was launched has ended."""
        profile, self._profile = self._profile, None
        assert profile is not None
        if self._has_events:
            disable_event_records()
        self._gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
        with _hushed():
            profile.stop()
            self._events = present(profile.profiler, "kineto_results").events()

    def records(self) -> Sequence[Record]:
        """The events, the GPU's name and the source of its times."""
        with _hushed():
            return (profiler_record(self._events, self._gpu, self._source, has_events=self._has_events),)

    def _mark(self, text: str) -> None:
        with self._event(text):
            pass


def profiler_record(
    events: Iterable[KinetoEvent],
    gpu: str,
    source: Literal["measured", "simulated"] = "measured",
    *,
    has_events: bool = False,
) -> ProfilerRecord:
    """Make the journal's record of what ``torch.profiler`` saw; ``has_events``: where events were recorded, too."""
    operations, calls, activity = Columns(TracedOperations), Columns(TracedCalls), Columns(TracedActivity)
    waits = Columns(TracedWaits)
    texts: dict[str, int] = {}
    graph_launches: set[int] = set()
    for event in events:
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        if event.device_type() != torch._C._autograd.DeviceType.CPU:
            if event.is_user_annotation() or _NO_WORK.match(name):
                if name in _WAITS and hasattr(event, "metadata_json"):
                    _add_wait(waits, event)
                continue
            _add_activity(activity, event, texts)
        elif _CALL.match(name):
            linked = event.linked_correlation_id()
            thread = event.device_resource_id()
            if "GraphLaunch" in name:
                graph_launches.add(event.correlation_id())
            calls.add(correlation=event.correlation_id(), start=start, operation=linked, thread=thread)
        else:
            operations.add(
                id=event.correlation_id(),
                start=start,
                end=end,
                thread=event.device_resource_id(),
                sequence=event.sequence_nr(),
                flops=int(event.flops()),
                text=texts.setdefault(name, len(texts)),
            )
    nodes = activity.arrays["node"]
    for row, correlation in enumerate(activity.arrays["correlation"]):
        if correlation in graph_launches and not nodes[row]:  # torch 2.11 gives nodes no number
            nodes[row] = 1
    made = (operations.made(), calls.made(), activity.made(), waits.made())
    return ProfilerRecord(gpu, source, list(texts), *made, has_events)


def _add_activity(activity: Columns[TracedActivity], event: KinetoEvent, texts: dict[str, int]) -> None:
    more, start = event.metadata_json() if hasattr(event, "metadata_json") else "", event.start_ns()
    shape = {side: ",".join(sizes) for side, *sizes in _SIDES.findall(more)}
    node = _NODE.search(more)
    activity.add(
        start=start,
        end=start + event.duration_ns(),
        stream=event.device_resource_id(),
        correlation=event.correlation_id(),
        operation=event.linked_correlation_id(),
        size=event.nbytes() or -1,
        node=int(node[1]) if node else 0,
        text=texts.setdefault(event.name(), len(texts)),
        grid=texts.setdefault(shape.get("grid", ""), len(texts)),
        block=texts.setdefault(shape.get("block", ""), len(texts)),
    )


def _add_wait(waits: Columns[TracedWaits], event: KinetoEvent) -> None:
    start = event.start_ns()
    recorded = {key: int(value) for key, value in _RECORD.findall(event.metadata_json())}
    waits.add(
        what=LAUNCH_KINDS.index(_WAITS[event.name()]),
        stream=event.device_resource_id(),
        recorded_on=recorded.get("stream", -1),
        record=recorded.get("cuda_event_record_corr_id", -1),
        correlation=event.correlation_id(),
        start=start,
        end=start + event.duration_ns(),
    )
