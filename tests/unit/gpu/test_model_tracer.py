"""The tracer of the virtual GPU's step, with a log that launches are put into by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakedist.gpu.launch_log import Launch, LaunchKind, LaunchLog
from fakedist.gpu.model_tracer import ModelTracer
from fakedist.rundir.launch_records import RangeRow
from fakedist.rundir.rows import Location
from fakedist.rundir.schema import PHASES

FORWARD, BACKWARD = Location(3, "forward", 5, recompute=False), Location(3, "backward", 6, recompute=True)
aten = torch.ops.aten


class Log(LaunchLog):
    def __init__(self) -> None:
        self.tag_address = 0
        self._names: dict[int, str] = {}
        self._launches: list[Launch] = []
        self._tag = self._call = -1
        functions = {name[1:]: lambda number, name=name: setattr(self, name, number) for name in ("_tag", "_call")}
        vars(self).update(tag=functions["tag"], tag_call=functions["call"])

    def begin(self) -> None:
        self._launches = []

    def end(self) -> Any:
        return self._launches

    def num_launches(self) -> int:
        return len(self._launches)

    def last_grid(self) -> tuple[int, ...]:
        return (1, 1, 1)

    def collective(self, stream: int) -> None:
        self.add("", LaunchKind.COLLECTIVE, stream)

    def read(self, num_bytes: int, stream: int) -> None:
        self.add("", LaunchKind.HOST_READS, stream).bytes = num_bytes

    def name(self, launch: Launch) -> str:
        return self._names[int(launch.name_address)]

    def add(self, name: str, kind: LaunchKind = LaunchKind.KERNEL, stream: int = 0) -> Launch:
        """This thread launches something."""
        number = len(self._names)
        self._names[number] = name
        launch = Launch(kind=kind, tag=self._tag, call=self._call, stream=stream, name_address=number)
        launch.grid[:], launch.block[:] = (1, 1, 1), (1, 1, 1)
        self._launches.append(launch)
        return launch


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def tracer(log: Log) -> ModelTracer:
    return ModelTracer(log=log)


def product(tracer: ModelTracer, log: Log, op: int, location: Location = FORWARD) -> None:
    a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    tag = tracer.operation(op, "aten.mm.default", location)
    log.add("cutlass_gemm")
    tracer.done(tag, aten.mm.default, (a, b), {}, torch.empty(64, 16, device="meta"))


def test_launches_have_the_operation_or_the_place_in_which_they_were_made(tracer: ModelTracer, log: Log) -> None:
    tracer.begin(3)
    product(tracer, log, 7)
    log.add("after the operation")
    tracer.location(BACKWARD)
    log.add("by an extension")
    tracer.graph(9, "compiled graph", FORWARD)
    log.add("of a graph")
    tracer.graph(-1, "", BACKWARD)
    product(tracer, log, 10, BACKWARD)
    tracer.end()
    (record,) = tracer.taken()()
    by_kernel = {work.name: (work.operation, work.flops) for work in record.work_rows}
    assert by_kernel["cutlass_gemm"] == ("aten.mm.default", 2.0 * 64 * 32 * 16)
    assert by_kernel["of a graph"][0] == "compiled graph"
    assert record.step == 3
    assert [*memoryview(record.op).cast("q")] == [7, -1, -1, 9, 10]
    assert [*memoryview(record.layer).cast("i")] == [5, 5, 6, 5, 6]
    assert [PHASES[phase] for phase in record.phase] == ["forward", "forward", "backward", "forward", "backward"]
    assert [*record.recompute] == [0, 0, 1, 0, 1]
    assert [*memoryview(record.num_operations).cast("I")] == [1, 0, 0, 0, 1]


def test_a_collective_and_a_read_of_the_host_are_rows_of_their_own(
    tracer: ModelTracer, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    tracer.begin(3)
    with tracer.collective(2, 8, "nccl:all_reduce", FORWARD):
        log.add("copy of it")
    scalar = torch.empty((), device="meta")
    tracer.done(tracer.operation(9, "item", BACKWARD), aten._local_scalar_dense.default, (scalar,), {}, 1.0)
    log.add("later")
    tracer.end()
    (record,) = tracer.taken()()
    columns = [memoryview(column).cast("q") for column in (record.op, record.stream, record.call)]
    assert [*zip(*columns, strict=True)] == [(8, 5, 2), (9, 5, -1), (-1, 0, -1)]


def test_a_step_that_is_cut_short_keeps_what_it_launched_before_it_might_have_ended(
    tracer: ModelTracer, log: Log
) -> None:
    tracer.begin(3)
    whole = tracer.range_begins("all")
    product(tracer, log, 7)
    tracer.may_end()
    product(tracer, log, 8)
    tracer.range_ended(whole)
    tracer.end()
    tracer.cut_short()
    (record,) = tracer.taken()()
    assert [*memoryview(record.op).cast("q")] == [7]
    assert record.ranges == [RangeRow("all", 0, 0, 0, 1)]


def test_records_of_a_step_can_be_made_when_others_have_begun(tracer: ModelTracer, log: Log) -> None:
    tracer.begin(3)
    tracer.range_ended(tracer.range_begins("of step 3"))
    product(tracer, log, 7)
    tracer.end()
    third = tracer.taken()
    tracer.begin(4)
    product(tracer, log, 8, BACKWARD)
    tracer.end()
    (record,) = third()
    assert (record.step, [*memoryview(record.op).cast("q")]) == (3, [7])
    assert [row.name for row in record.ranges] == ["of step 3"]
    assert [(work.operation, work.flops) for work in record.work_rows] == [("aten.mm.default", 2.0 * 64 * 32 * 16)]
    assert tracer.timed is not None
    assert (tracer.timed.step, len(tracer.timed.launches)) == (3, 1)


def test_what_was_captured_is_known_in_a_later_step(tracer: ModelTracer, log: Log) -> None:
    tracer.capture_begins()
    product(tracer, log, 2, BACKWARD)
    (captured,) = log.end()
    tracer.capture_ended()
    product(tracer, log, 3)
    tracer.begin(4)
    log.end().append(captured)
    tracer.end()
    (record,) = tracer.taken()()
    assert [(work.name, work.operation, work.flops) for work in record.work_rows] == [
        ("cutlass_gemm", "aten.mm.default", 2.0 * 64 * 32 * 16)
    ]
    assert [*memoryview(record.op).cast("q")] == [2]
