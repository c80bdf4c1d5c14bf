"""Reads the Chrome trace that torch.profiler exports, of any version: one process on one GPU, all of its steps.

The floating-point operations of an operation in a trace of torch.profiler with ``record_shapes=True``.

They are counted as those of a recorded step are (``gpu/demand``): products, convolutions and attention alone, each
without what a causal mask spares. What the trace does not say, such as a convolution's strides, is not guessed.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from fakedist.errors import ReportError
from fakedist.traces.foreign_files import EXPORT_HINT, other_values, read_unpacked
from fakedist.traces.one_step import StepChoice, choose_process
from fakedist.traces.snapshot_reading import MOST_BYTES, MOST_DEVICES
from fakedist.traces.step_trace import (
    HOST_WAITS,
    HOST_WAITS_FOR_DEVICE,
    IGNORED,
    MODULE,
    STREAM_WAITS,
    Activity,
    CudaCalls,
    Intervals,
    Ints,
    ProcessTrace,
    Ranges,
    TextNumbers,
    chosen,
    find_launches,
    linked_rows,
    meaning,
    taken,
)

_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
#: Positions of the padding, the stride, the dilation and what says that it is transposed (-1: its name says it is not).
_CONVOLUTIONS = {
    "aten::convolution": (4, 3, 5, 6),
    "aten::_convolution": (4, 3, 5, 6),
    "aten::cudnn_convolution": (2, 3, 4, -1),
    "aten::cudnn_convolution_relu": (4, 3, 5, -1),
}
#: Position of the queries, whether heads come before positions, and the position of what says that it is causal.
_ATTENTION = {
    "aten::_flash_attention_forward": (0, False, 8),
    "aten::_flash_attention_backward": (1, False, 11),
    "aten::_efficient_attention_forward": (0, False, 9),
    "aten::_efficient_attention_backward": (1, False, 14),
    "aten::_scaled_dot_product_cudnn_attention": (0, True, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, True, 14),
}
#: By torch's names for them in a trace; the parts after "Float8" say its format.
_DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2} | dict.fromkeys(
    ("Byte", "Char", "Bool", "Float8"), 1
)
#: The most that is counted. Larger sizes are not those of a tensor.
_MOST = 1 << 60


def operation_flops(name: str, more: Mapping[str, object]) -> int:
    """The FLOPs of an operation, by the sizes and values in its event's ``args``; 0 if they are not known."""
    dims, values = more.get("Input Dims", more.get("Input dims")), more.get("Concrete Inputs")
    if not isinstance(dims, list) or not name.startswith("aten::"):
        return 0
    try:
        flops = _flops(name, dims, values if isinstance(values, list) else [])
    except (IndexError, TypeError, ValueError):
        return 0
    return int(flops) if 0 < flops < _MOST else 0


def _flops(name: str, dims: list[object], values: list[object]) -> float:
    if name in _PRODUCTS:
        left, right = (_sizes(dims[_PRODUCTS[name] + side]) for side in (0, 1))
        return 2 * math.prod(left) * right[-1]
    if name in _ATTENTION:
        return _attention(name, dims, values)
    if name == "aten::convolution_backward":
        return _convolution_backward(dims, values)
    if name in _CONVOLUTIONS:
        padding, stride, dilation, transposed = _CONVOLUTIONS[name]
        data, weight = _sizes(dims[0]), _sizes(dims[1])
        if transposed >= 0 and _value(values[transposed]):
            return 2 * data[0] * math.prod(data[2:]) * math.prod(weight)
        pads, strides, spreads = (_list(values[at], len(data) - 2) for at in (padding, stride, dilation))
        positions = [
            (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
            for size, kernel, pad, step, spread in zip(data[2:], weight[2:], pads, strides, spreads, strict=True)
        ]
        return 2 * data[0] * math.prod(positions) * math.prod(weight)
    return 0


def _convolution_backward(dims: list[object], values: list[object]) -> float:
    """The gradients of the input and of the weights take as much as the forward each."""
    gradient, data, weight = (_sizes(dims[at]) for at in range(3))
    met = data if _value(values[7]) else gradient
    wanted = _list(values[10], 3)[:2]
    return 2 * met[0] * math.prod(met[2:]) * math.prod(weight) * sum(map(bool, wanted))


def _attention(name: str, dims: list[object], values: list[object]) -> float:
    """Two products forward, five backward; one of the five computes the scores again."""
    at, is_heads_first, causal = _ATTENTION[name]
    query, key, value = (_sizes(dims[at + side]) for side in range(3))
    batch, positions, heads = (query[0], query[-2], query[-3]) if is_heads_first else query[:3]
    keys = key[-2] if is_heads_first else key[1]
    met = float(keys)
    if _value(values[causal]):
        if positions != keys:
            return 0
        met = (keys + 1) / 2
    widths = query[-1] + value[-1] if at == 0 else 3 * query[-1] + 2 * value[-1]
    return 2 * batch * heads * positions * met * widths


def _sizes(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < _MOST for size in value):
        raise TypeError
    return value


def _value(value: object) -> int:
    """A flag or a number, which torch writes as text."""
    return {"False": 0, "True": 1}[value] if value in ("False", "True") else int(str(value))


def _list(value: object, length: int) -> list[int]:
    """A list of numbers or flags, which torch writes as text. One number stands for all."""
    values = [_value(part.strip()) for part in str(value).strip("[]").split(",")]
    return values * length if len(values) == 1 else values


_SPACE = re.compile(r"[ \t\r\n]*")
#: The most digits of a process's number; merged traces may name it "rank 3 (1234)".
_MOST_DIGITS = 15
_EVENTS, _PHASE = "traceEvents", '"ph"'
_WANTED = "a Chrome trace"


class JsonEvents:
    """The objects in the list ``traceEvents`` of a trace, or of a trace that is only the list.

    Iterating raises ReportError if it is damaged or not JSON.

    Attributes:
        header: The trace's other values, once all are read.
        cut_off_after: The number of events before the end of a trace that is cut off, as of a killed job; else -1.
    """

    def __init__(self, path: Path) -> None:
        self.header: dict[str, object] = {}
        self.cut_off_after = -1
        self._path = path
        content, self._is_cut_off = read_unpacked(path, EXPORT_HINT)
        self._text = content.decode("utf-8-sig", "replace")
        # strict: torch writes the names of Python frames without escaping control characters.
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._begin = 0

    def __iter__(self) -> Iterator[object]:
        num_events = 0
        try:
            for event in self._events():
                num_events += 1
                yield event
        except (IndexError, ValueError, RecursionError) as error:
            # ValueError: json's own, and Python's for a number with thousands of digits.
            is_named = f'"{_EVENTS}"' in self._text[:1_000_000]
            if not num_events and not is_named and not self._is_cut_off:
                raise ReportError(f"{self._path} is not {_WANTED}", EXPORT_HINT) from error
            if not num_events or self._text.count(_PHASE, self._begin) > 1:
                raise self.is_cut_off(num_events) from error
            self.cut_off_after = num_events
        if self._is_cut_off:
            self.cut_off_after = num_events
        if not num_events:
            self.header.pop(_EVENTS, None)
            raise other_values(self._path, self.header, _WANTED, "events", EXPORT_HINT)

    def is_cut_off(self, num_events: int) -> ReportError:
        """The error that only so many events can be read."""
        return ReportError(f"{self._path} is damaged or cut off after {num_events:,} events", "export the trace again")

    def _events(self) -> Iterator[object]:
        at = self._skip(0)
        if self._text[at] == "[":
            yield from self._list(at)
            return
        if self._text[at] != "{":
            raise ValueError
        at = self._skip(at + 1)
        while self._text[at] != "}":
            name, at = self._decode(self._text, at)
            at = self._skip(at)
            if not isinstance(name, str) or self._text[at] != ":":
                raise ValueError
            at = self._skip(at + 1)
            if name == _EVENTS and self._text[at] == "[":
                at = yield from self._list(at)
            else:
                self.header[name], at = self._decode(self._text, at)
            at = self._after(at, "}")

    def _list(self, at: int) -> Generator[object, None, int]:
        at = self._skip(at + 1)
        while self._text[at] != "]":
            self._begin = at
            event, at = self._decode(self._text, at)
            yield event
            at = self._after(at, "]")
        return at + 1

    def _after(self, at: int, end: str) -> int:
        """The next element after a comma, or the end."""
        at = self._skip(at)
        if self._text[at] == ",":
            return self._skip(at + 1)
        if self._text[at] != end:
            raise ValueError
        return at

    def _skip(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        assert space is not None
        return space.end()


_Adding = Callable[[dict[str, object], dict[str, object]], None]
#: Categories, as old and new versions of torch write them, in lower case.
#: Of activity, with how copies and fills are named: ROCm's are "CopyHostToDevice" and "FillBuffer".
_ON_GPU = {"kernel": ""} | {f"{on}{kind.lower()}": kind for kind in ("Memcpy", "Memset") for on in ("", "gpu_")}
#: With ``with_stack``, a frame of Python each; those of modules name layers. "[memory]" is an instant, ``ph`` "i".
_FRAMES, _MEMORY = "python_function", "cpu_instant_event"
_CUDA = 1  # c10::DeviceType
_CALLS, _OPERATIONS = (
    ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime"),
    ("cpu_op", "operator", "user_annotation"),
)
#: With enable_cuda_sync_events=True: waits by the beginning of their ``cuda_sync_kind``.
_SYNC = "cuda_sync"
_SYNC_KINDS = {"Event": HOST_WAITS, "Strea": HOST_WAITS, "Conte": HOST_WAITS_FOR_DEVICE}
_LARGEST = 1 << 62
_ADDRESS = (1 << 48) - 1
#: Columns of activity that number texts.
_NAMED = ("text", "grid", "block", "collective")
#: Tensors of an operation whose sizes are kept.
_MAX_TENSORS = 4


@dataclass
class _Table:
    """Columns that grow by a row."""

    names: tuple[str, ...]
    columns: dict[str, array[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = {name: array("q") for name in self.names}

    def add(self, *values: int) -> None:
        if any(not -_LARGEST < value < _LARGEST for value in values):
            raise OverflowError
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def arrays(self) -> dict[str, Ints]:
        return {name: np.array(column, np.int64) for name, column in self.columns.items()}


class _TraceEvents:
    """The events of a trace, as columns. Processes, threads and texts are numbers of their values."""

    def __init__(self) -> None:
        self.texts: TextNumbers[str] = TextNumbers()
        self.processes: TextNumbers[object] = TextNumbers()
        self.threads: TextNumbers[tuple[object, object]] = TextNumbers()
        self.inputs: TextNumbers[tuple[tuple[int, ...], ...]] = TextNumbers()
        self.operations = _Table(("process", "thread", "start", "end", "id", "sequence", "text", "inputs"))
        self.calls = _Table(("process", "thread", "start", "end", "correlation", "id", "text"))
        self.activity = _Table(("gpu", "start", "end", "stream", "correlation", "id", "node", "bytes", *_NAMED))
        self.num_unreadable = 0
        self._add: Mapping[str, _Adding] = (
            {name: partial(self._add_activity, kind=kind) for name, kind in _ON_GPU.items()}
            | dict.fromkeys(_CALLS, self._add_call)
            | dict.fromkeys(_OPERATIONS, self._add_operation)
            | {_FRAMES: self._add_frame, _MEMORY: self._add_memory, _SYNC: self._add_sync}
        )
        self.syncs = _Table(("gpu", "what", "stream", "recorded_on", "record", "correlation", "start", "end"))
        self.memory = _Table(("device", "process", "thread", "time", "address", "bytes", "allocated", "reserved"))
        self.functions = _Table(("process", "thread", "start", "end", "text"))
        self.flops = array("q")
        self._known: dict[str, _Adding | None] = {}

    def take(self, event: object) -> None:
        """Keep an event, if it is of a kind that is read."""
        if not isinstance(event, dict):
            self.num_unreadable += 1
            return
        category = event.get("cat")
        if not isinstance(category, str) or event.get("ph") not in ("X", "i"):
            return
        if category not in self._known:
            self._known[category] = self._add.get(category.lower())
        add = self._known[category]
        if add is None:
            return
        more = event.get("args")
        try:
            add(event, more if isinstance(more, dict) else {})
        except (TypeError, ValueError, KeyError, OverflowError):
            self.num_unreadable += 1

    def _add_operation(self, event: dict[str, object], more: dict[str, object]) -> None:
        self.operations.add(
            *self._origin(event),
            *_times(event),
            _whole(more, "External id", "external id"),
            _whole(more, "Sequence number", nothing=-1),
            self.texts[_text(event)],
            self._inputs(more.get("Input Dims", more.get("Input dims"))),
        )
        self.flops.append(operation_flops(str(event["name"]), more))

    def _add_frame(self, event: dict[str, object], more: dict[str, object]) -> None:
        if _text(event).startswith(MODULE):
            self._add_operation(event, {})
        else:
            self.functions.add(*self._origin(event), *_times(event), self.texts[_text(event)])

    def _origin(self, event: dict[str, object]) -> tuple[int, int]:
        process, thread = event["pid"], event["tid"]
        return self.processes[process], self.threads[process, thread]

    def _add_memory(self, event: dict[str, object], more: dict[str, object]) -> None:
        if event.get("name") == "[memory]" and more.get("Device Type") == _CUDA:
            names = ("Device Id", "Addr", "Bytes", "Total Allocated", "Total Reserved")
            device, address, *sizes = (_whole(more, name) for name in names)
            if max(map(abs, sizes)) > MOST_BYTES:
                raise OverflowError
            self.memory.add(device, *self._origin(event), _times(event)[0], address & _ADDRESS, *sizes)

    def _add_sync(self, event: dict[str, object], more: dict[str, object]) -> None:
        kind = str(more.get("cuda_sync_kind", event["name"]))
        self.syncs.add(
            self.processes[(event["pid"], _whole(more, "device"))],
            STREAM_WAITS if kind.startswith("Stream Wait") else _SYNC_KINDS[kind[:5]],
            -1 if kind.startswith("Event") else _whole(more, "stream", nothing=-1),
            _whole(more, "wait_on_stream", nothing=-1),
            _whole(more, "wait_on_cuda_event_record_corr_id", nothing=-1),
            _whole(more, "correlation", nothing=-1),
            *_times(event),
        )

    def _add_call(self, event: dict[str, object], more: dict[str, object]) -> None:
        self.calls.add(
            *self._origin(event),
            *_times(event),
            _whole(more, "correlation"),
            _whole(more, "External id", "external id"),
            self.texts[_text(event)],
        )

    def _add_activity(self, event: dict[str, object], more: dict[str, object], kind: str) -> None:
        start, end = _times(event)
        name = _text(event)
        self.activity.add(
            self.processes[(event["pid"], _whole(more, "device"))],
            start,
            end,
            _whole(more, "stream"),
            _whole(more, "correlation", nothing=-1),
            _whole(more, "External id", "external id"),
            _whole(more, "graph node id"),
            _whole(more, "bytes", nothing=_buffer_bytes(more)),
            self.texts[name if name.startswith(kind) else f"{kind} {name}"],
            self.texts[_sides(more.get("grid"))],
            self.texts[_sides(more.get("block"))],
            self.texts[_collective(more)],
        )

    def _inputs(self, dims: object) -> int:
        """The sizes of an operation's tensors; of a list of tensors, none."""
        if not isinstance(dims, list):
            return -1
        tensors = [
            tuple(int(size) for size in sizes)
            for sizes in dims[:_MAX_TENSORS]
            if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes)
        ]
        return self.inputs[tuple(tensors)]


def read_chrome_trace(path: Path, choice: StepChoice = StepChoice()) -> ProcessTrace:  # noqa: B008
    """Read a trace, by default of the process that launched the most kernels on a GPU.

    Raises:
        ReportError: The file is not a trace, is damaged, or has no kernels of such a process.
    """
    source, events = _read(path)
    operations, calls, device = (table.arrays() for table in (events.operations, events.calls, events.activity))
    operations["flops"] = np.array(events.flops, np.int64)
    texts, header = list(events.texts), source.header
    everything = Activity.of(device, texts)
    hosts = _hosts(events, calls, device)

    def described(number: int) -> tuple[int, int, str]:
        process, key = list(events.processes)[max(hosts[number], 0)], list(events.processes)[number]
        assert isinstance(key, tuple)
        digits = re.sub(r"\D", "", str(process))[-_MOST_DIGITS:] if hosts[number] >= 0 else ""
        return int(digits or -1), int(key[1]), _gpu(header, key)

    gpu, processes = choose_process(everything, device["gpu"], described, path, choice)
    activity = everything.where(device["gpu"] == gpu)
    operations = chosen(operations, operations["process"] == hosts[gpu])
    threads = [thread for _, thread in events.threads]
    own_calls = CudaCalls.of(chosen(calls, calls["process"] == hosts[gpu]), texts.__getitem__, threads.__getitem__)
    ranges, kept = _ranges(operations, texts)
    # Without its call, a kernel is launched by its operation.
    operation = linked_rows(operations["id"], activity.columns["id"])
    time = np.where(operation >= 0, taken(operations["start"], operation), activity.columns["start"])
    thread, launch = find_launches(own_calls, activity, taken(operations["thread"], operation), time)
    none = np.full(len(activity), -1, np.int64)
    return ProcessTrace(
        tool="torch.profiler",
        gpu=described(gpu)[-1],
        ranges=ranges,
        activity=activity,
        calls=own_calls,
        thread=thread,
        launch=launch,
        linked=linked_rows(operations["id"][kept], activity.columns["id"]),
        made_in=none,
        made_at=none,
        inputs=operations["inputs"][kept],
        shapes=list(events.inputs),
        driver=_version(header.get("cuda_driver_version")),
        rank=_distributed(header, "rank", -1),
        world_size=_distributed(header, "world_size", 0),
        processes=processes,
        num_elsewhere=len(everything) - len(activity),
        num_unreadable=events.num_unreadable,
        cut_off_after=source.cut_off_after,
        memory=_of(events.memory, "device", described(gpu)[1]),
        functions=_of(events.functions, "process", hosts[gpu]),
        texts=texts,
        syncs=_of(events.syncs, "gpu", gpu),
    ).by_launch()


def _read(path: Path) -> tuple[JsonEvents, _TraceEvents]:
    source, events = JsonEvents(path), _TraceEvents()
    for event in source:
        events.take(event)
    if not len(events.activity.columns["start"]):
        if source.cut_off_after >= 0:
            raise source.is_cut_off(source.cut_off_after)
        raise ReportError(
            f"{path} has no kernels", "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] traces them"
        )
    return source, events


def _of(table: _Table, key: str, number: int) -> dict[str, Ints]:
    """The rows of a device or process, by time."""
    columns = table.arrays()
    rows = np.flatnonzero(columns[key] == number)
    return chosen(columns, rows[np.argsort(columns["time" if "time" in columns else "start"][rows], kind="stable")])


def _hosts(events: _TraceEvents, calls: dict[str, Ints], device: dict[str, Ints]) -> dict[int, int]:
    """For each GPU, as a number, the process that launched most of its kernels; -1 if none did.

    Correlations are unique within a process only. A GPU's process is the one whose calls have most of its correlations
    at an earlier time; among equals, the closest.
    """
    hosts = np.unique(calls["process"]).tolist()
    if not hosts:
        hosts = np.unique(np.frombuffer(events.operations.columns["process"], np.int64)).tolist() or [-1]
    launched, names = {}, list(events.processes)
    gpus = [names[gpu][0] for gpu in np.unique(device["gpu"]).tolist()]
    is_merged = any(not isinstance(number, int) or number > MOST_DEVICES for number in gpus)
    for gpu in np.unique(device["gpu"]).tolist():
        there = device["gpu"] == gpu
        fits = [_launched_by(calls, host, device["correlation"][there], device["start"][there]) for host in hosts]
        alike = [fit for fit in fits if fit[0] >= _ALIKE * max(fits)[0]] if is_merged else [max(fits)]
        launched[gpu] = max(alike, key=lambda fit: (_likeness(names[gpu], names[fit[-1]]), fit))[-1]
    return launched


#: Ranks of a job launch alike. In merged traces, whose GPUs are not numbered from 0, processes that fit so well are
#: distinguished by their numbers.
_ALIKE = 0.9


def _likeness(gpu: object, host: object) -> int:
    """How close the process of a GPU's events is to a process: by value, or by the beginning of its text."""
    own = gpu[0] if isinstance(gpu, tuple) else gpu
    if isinstance(own, int) and isinstance(host, int):
        return -abs(own - host)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(str(own), str(host), strict=False)))


def _launched_by(calls: dict[str, Ints], host: int, correlation: Ints, start: Ints) -> tuple[int, float, int]:
    """The number of kernels that a process may have launched, minus their delay, and the process."""
    of_host = calls["process"] == host
    row = linked_rows(calls["correlation"][of_host], correlation)
    delay = start - taken(calls["start"][of_host], row)
    earlier = (row >= 0) & (delay >= 0)
    return int(earlier.sum()), -float(delay[earlier].mean()) if earlier.any() else 0.0, host


def _ranges(operations: dict[str, Ints], texts: list[str]) -> tuple[Ranges, Ints]:
    local = _local_modules(operations, texts)
    numbers: dict[str, int] = {}
    row_of = {}
    for text in np.unique(operations["text"]).tolist():
        row_of[text] = numbers.setdefault(local.get(texts[text], texts[text]), len(numbers))
    meanings = [meaning(text) for text in numbers]
    rows = np.array([row_of[text] for text in operations["text"].tolist()], np.int32)
    says = np.array([m.kind != IGNORED for m in meanings] or [False])[rows] if len(rows) else rows.astype(bool)
    kept = np.flatnonzero(says)
    thread, start, end, sequence, flops = (
        operations[name][kept] for name in ("thread", "start", "end", "sequence", "flops")
    )
    counted = flops if flops.any() else None
    return Ranges(meanings, rows[kept], thread, start, end, sequence, flops=counted).with_functions(), kept


def _local_modules(operations: dict[str, Ints], texts: list[str]) -> dict[str, str]:
    """Modules as torch names them, such as "nn.Module: Linear_17", and what each is within the module around it.

    torch numbers the modules of a class. Counted within their parents, as in "Linear.1", the layers of a model are
    alike.
    """
    is_module = np.array([text.startswith(MODULE) for text in texts] or [False])
    rows = np.flatnonzero(is_module[operations["text"]]) if len(operations["text"]) else operations["text"]
    lanes = np.unique(operations["thread"][rows], return_inverse=True)[1]
    parents = Intervals(lanes, operations["start"][rows], operations["end"][rows]).parents()
    text = operations["text"][rows]
    above = np.where(parents >= 0, text[parents], -1) if len(rows) else text
    children: dict[tuple[int, str], list[str]] = {}
    seen: set[str] = set()
    for parent, number in zip(above.tolist(), text.tolist(), strict=True):
        name = texts[number]
        if name not in seen:
            seen.add(name)
            children.setdefault((parent, name.rpartition("_")[0]), []).append(name)
    return {
        name: f"{kind}.{index}" if len(names) > 1 else kind
        for (_, kind), names in children.items()
        for index, name in enumerate(names)
    }


def _gpu(header: dict[str, object], key: object) -> str:
    """The name of the GPU. ``key`` holds the kernels' process, which is the GPU's number, and their device."""
    properties = header.get("deviceProperties")
    devices = [device for device in properties if isinstance(device, dict)] if isinstance(properties, list) else []
    number = key[1] if isinstance(key, tuple) else -1
    named = [device for device in devices if device.get("id") == number] or devices
    return str(named[0].get("name", "")) if named else ""


def _distributed(header: dict[str, object], key: str, nothing: int) -> int:
    info = header.get("distributedInfo")
    value = info.get(key) if isinstance(info, dict) else None
    return value if isinstance(value, int) else nothing


def _version(number: object) -> str:
    """13020 is 13.2."""
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else ""


def _times(event: dict[str, object]) -> tuple[int, int]:
    """Start and end in nanoseconds."""
    start, duration = event["ts"], event.get("dur", 0)
    if not isinstance(start, int | float) or not isinstance(duration, int | float) or duration < 0:
        raise TypeError
    at = round(start * 1000)
    return at, at + round(duration * 1000)


def _text(event: dict[str, object]) -> str:
    name = event["name"]
    if not isinstance(name, str):
        raise TypeError
    return name


def _whole(more: dict[str, object], *names: str, nothing: int = 0) -> int:
    for name in names:
        value = more.get(name)
        if isinstance(value, int):
            return value
    return nothing


def _collective(more: dict[str, object]) -> str:
    """A collective's operation and group, as torch 2.2 and later write them at NCCL's kernels; else empty."""
    name, group, size = (more.get(key) for key in ("Collective name", "Process Group Description", "Group size"))
    if not isinstance(name, str):
        return ""
    group = group if isinstance(group, str) and group else more.get("Process Group Name")
    ranks = f" of {size} ranks" if isinstance(size, int) else ""
    return f"{name}, {group}{ranks}" if isinstance(group, str) else name


def _buffer_bytes(more: dict[str, object]) -> int:
    """The whole buffer of a collective, of which a rank sends or receives a part; -1 if it is not named."""
    size = _DTYPE_BYTES.get(str(more.get("dtype")).partition("_")[0], 0)
    elements = max(_whole(more, name, nothing=-1) for name in ("In msg nelems", "Out msg nelems")) if size else -1
    return elements * size if elements >= 0 else -1


def _sides(sides: object) -> str:
    return ",".join(map(str, sides)) if isinstance(sides, list) and len(sides) == 3 else ""
