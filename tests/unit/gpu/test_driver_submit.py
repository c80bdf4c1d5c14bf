"""The driver's handling of work given to a stream: captured, logged, its bytes moved, each at the right time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
from fakedist.gpu.launch_log import LaunchKind, LaunchLog

log = LaunchLog()
side, stream, event = make("cudaStreamCreate"), make("cudaStreamCreate"), make("cudaEventCreate")
small = make("cudaMalloc", c_size_t(MIB))
pinned = make("cudaMallocHost", c_size_t(64))
pageable = (c_char * 64)()
host = ctypes.addressof(pageable)
names = {stream: "stream", side: "side", 0: "default", side | 1: "a branch"}
sizes = [c_uint(number) for number in (2, 3, 4, 5, 6, 7)]

def kernel(on=stream):
    driver.cuLaunchKernel(c_void_p(64), *sizes, c_uint(0), c_void_p(on), NULL, NULL)

def copy(to, source, on=stream):
    driver.cudaMemcpyAsync(c_void_p(to), c_void_p(source), c_size_t(64), 4, c_void_p(on))

def fill(to, value=0):
    driver.cudaMemsetAsync(c_void_p(to), value, c_size_t(32), c_void_p(stream))

def record(on=stream):
    driver.cudaEventRecord(c_void_p(event), c_void_p(on))

def wait(on):
    driver.cudaStreamWaitEvent(c_void_p(on), c_void_p(event), 0)

def logged(*actions):
    log.begin()
    for action in actions:
        action()
    return [
        [LaunchKind(each.kind).name, names[each.stream], each.direction or each.bytes or each.event, each.pinned]
        for each in log.end()
    ]

def capture(*actions):
    "A graph of what the actions launch, and the status of the capture's end."
    driver.cudaStreamBeginCapture(c_void_p(stream), 2)
    for action in actions:
        action()
    graph = c_void_p()
    status = driver.cudaStreamEndCapture(c_void_p(stream), byref(graph))
    return status, graph.value

def replay(graph):
    driver.cudaGraphLaunch(c_void_p(graph), c_void_p(side))

before = gpu.counters()["launches"]
kernel()
found["launches"] = gpu.counters()["launches"] - before
found["nothing is logged"] = len(log.end())

found["kernel"] = logged(kernel)
log.begin(); kernel(); (launch,) = log.end()
found["grid and block"] = list(launch.grid) + list(launch.block)
log.begin(); log.tag(5); log.tag_call(6); kernel(); log.collective(stream); log.read(8, stream)
found["tags"] = [[LaunchKind(each.kind).name, each.tag, each.call] for each in log.end()]
log.tag(-1); log.tag_call(-1)

found["copies"] = logged(
    lambda: copy(small, host), lambda: copy(small, pinned), lambda: copy(host, small), lambda: copy(small, small + 64),
    lambda: copy(host, pinned),
)
found["copies to and from nowhere"] = [
    driver.cudaMemcpyAsync(c_void_p(to), c_void_p(source), c_size_t(size), 4, c_void_p(stream))
    for to, source, size in ((0, small, 64), (small, 0, 64), (0, 0, 0))
]
found["fills"] = logged(lambda: fill(small), lambda: fill(host))
found["waits"] = logged(
    record, lambda: wait(side), lambda: driver.cudaEventSynchronize(c_void_p(event)),
    lambda: driver.cudaStreamSynchronize(c_void_p(side)), lambda: driver.cudaDeviceSynchronize(),
    lambda: driver.cudaMemcpy(c_void_p(small), c_void_p(host), c_size_t(64), 4),
)

number = found["waits"][0][2]
found["waits"] = [[kind, on, "the event" if "COPY" not in kind and about == number else about, *rest]
                  for kind, on, about, *rest in found["waits"]]

ctypes.memset(host, 1, 64), ctypes.memset(pinned, 2, 64)
status, graph = capture(
    kernel, lambda: copy(small, host), lambda: copy(small + 64, pinned), lambda: fill(small + 128, 3),
    record, lambda: wait(side), lambda: kernel(side),
)
found["while it is captured"] = [ctypes.string_at(small + at, 1)[0] for at in (0, 64, 128)]
found["capture"] = [status, logged(lambda: capture(kernel, lambda: copy(small, host), record))]
for memory in (host, pinned):
    ctypes.memset(memory, 4, 64)
fill(small + 128, 0)
before = gpu.counters()["launches"]
replayed, again = (logged(lambda: replay(graph)) for _ in range(2))
events = [[about for kind, _, about, _ in rows if "STREAM" in kind] for rows in (replayed, again)]
found["events of replays"] = [len(set(each)) for each in events] + [len({*events[0], *events[1]})]
found["replayed"] = [[kind, on, "the event" if "STREAM" in kind else about, pinned]
                     for kind, on, about, pinned in replayed]
found["replayed kernels"] = gpu.counters()["launches"] - before
found["after replay"] = [ctypes.string_at(small + at, 1)[0] for at in (0, 64, 128)]
log.begin(); replay(graph); replay(graph)
found["graph numbers"] = len({each.graph for each in log.end()})
found["a graph in a graph"] = logged(lambda: replay(capture(lambda: driver.cudaGraphLaunch(
    c_void_p(graph), c_void_p(stream)))[1]))

calls = []
function = ctypes.CFUNCTYPE(None, c_void_p)(lambda data: calls.append(1))
def call():
    driver.cudaLaunchHostFunc(c_void_p(stream), function, NULL)
call()
found["calls"] = [len(calls)]
status, graph = capture(call)
found["calls"].append(len(calls))
replay(graph), replay(graph)
found["calls"].append(len(calls))

status, graph = capture(
    lambda: found.update({"wait in a capture": driver.cudaStreamSynchronize(c_void_p(stream))}),
    lambda: found.update({"in an invalid capture": logged(kernel, call)}),
)
found["invalid"] = [status, graph, len(calls)]
"""


TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3
INVALID_VALUE, UNSUPPORTED, INVALIDATED = 1, 900, 901
_REPLAYED = [["KERNEL", "side", 0, 0], ["COPY", "side", 1, 0], ["COPY", "side", 1, 1], ["FILL", "side", 32, 0]]
EXPECTED = {
    "launches": 1,
    "nothing is logged": 0,
    "kernel": [["KERNEL", "stream", 0, 0]],
    "grid and block": [2, 3, 4, 5, 6, 7],
    "tags": [["KERNEL", 5, 6], ["COLLECTIVE", 5, 6], ["HOST_READS", 5, 6]],
    # Those that touch a device.
    "copies": [["COPY", "stream", *how] for how in ((TO_DEVICE, 0), (TO_DEVICE, 1), (TO_HOST, 0), (WITHIN, 0))],
    "copies to and from nowhere": [INVALID_VALUE, INVALID_VALUE, 0],
    "fills": [["FILL", "stream", 32, 0]],
    "waits": [
        ["STREAM_RECORDS", "stream", "the event", 0],
        ["STREAM_WAITS", "side", "the event", 0],
        ["HOST_WAITS", "default", "the event", 0],
        ["HOST_WAITS", "side", 0, 0],
        ["HOST_WAITS_FOR_DEVICE", "default", 0, 0],
        ["COPY", "default", 1, 0],
        ["HOST_WAITS", "default", 0, 0],
    ],
    # Captured work is not logged, and moves its bytes at once.
    "capture": [0, []],
    "while it is captured": [1, 2, 3],
    "replayed": [
        *_REPLAYED,
        ["STREAM_RECORDS", "side", "the event", 0],
        ["STREAM_WAITS", "a branch", "the event", 0],
        ["KERNEL", "a branch", 0, 0],
    ],
    "events of replays": [1, 1, 2],
    "replayed kernels": 4,
    "after replay": [1, 4, 3],  # pageable memory may be gone, so it is not read again
    "graph numbers": 2,
    "a graph in a graph": [["LIBRARY", "side", 0, 0]],
    "calls": [1, 1, 3],  # a function of the host runs at once, or with its graph
    # An invalid capture keeps nothing.
    "wait in a capture": UNSUPPORTED,
    "in an invalid capture": [["KERNEL", "stream", 0, 0]],
    "invalid": [INVALIDATED, None, 3],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT)


@pytest.mark.parametrize("what", EXPECTED)
def test_the_driver_answers(found: dict[str, Any], what: str) -> None:
    assert found[what] == EXPECTED[what]
