"""Records become builtins and come back as they were; what does not fit a record is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.encoding import Columns, Record, columns_of, decode, encode, record_kind
from fakedist.rundir.memory_records import EventsRecord, GeneratedRecord, MarksRecord
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import (
    RECORDS,
    CallsRecord,
    CallTermsRecord,
    GpuRecord,
    GroupsRecord,
    NcclRecord,
    NoteRecord,
    OperationsRecord,
    OutcomeRecord,
    TrainingFacts,
)
from fakedist.rundir.rows import CallRow, CallTerms, FrameRow, GroupRow, HolderRow, LineRow
from fakedist.rundir.step_time import KernelSource, Peaks
from fakedist.rundir.tape import TAPE_RECORDS, Awaited, Guess, SentRecord
from fakedist.rundir.trace_records import (
    HostCalls,
    HostRanges,
    HostRecord,
    HostWaits,
    KernelsRecord,
    ProfilerRecord,
    TracedActivity,
    TracedCalls,
    TracedOperations,
    TracedWaits,
)

CALL = CallRow(0, "all_reduce", 0, 8, 8, "float32", True, 7, 3, 1, -1, 0, 0)
AWAITED = Awaited("broadcast", 0, ((0, 1), 0), -1, None, 1)
RECORDED = [
    GpuRecord("NVIDIA H100", 80 << 30, "9.0", peaks=Peaks({"bf16": 1e15}, 3e12), model=GPUS["b200"]),
    NcclRecord("2.27.3", {"NCCL_ALGO": "ring"}),
    OutcomeRecord(Outcome.OUT_OF_MEMORY, 4, "CUDA out of memory", training=TrainingFacts(True, 3, False)),
    OutcomeRecord(Outcome.FINISHED, None),
    OperationsRecord(5, bytes(8), bytes(8)),
    CallsRecord([CALL, CALL._replace(sequence=1, asynchronous=False)]),
    CallsRecord([]),
    GroupsRecord([GroupRow(0, "0", "default_pg", (0, 1_024), 8, 1, "nccl"), GroupRow(1, "1", "tp", (3, 5), 0, 0, "")]),
    GeneratedRecord(0, "cabc.py", [LineRow(3, 0)], [HolderRow(-1, 4, 0)]),
    EventsRecord(0, [FrameRow("train.py", 3, "main")], [(0,), ()], b"\x00", *(bytes(8) for _ in range(5)), bytes(4)),
    KernelsRecord(
        KernelSource("simulated", "cupti", 2, "", 0.5), ["", "gemm"], **dict.fromkeys(columns_of(KernelsRecord), b"")
    ),
    ProfilerRecord(
        "NVIDIA H100",
        "measured",
        ["aten::mm"],
        Columns(TracedOperations).made(),
        Columns(TracedCalls).made(),
        Columns(TracedActivity).made(),
        Columns(TracedWaits).made(),
        True,
    ),
    HostRecord(4, True, ["train"], Columns(HostWaits).made(), Columns(HostCalls).made(), Columns(HostRanges).made()),
]
ON_TAPE = [
    AWAITED,
    Guess(AWAITED, "broadcast", "train.py:3 (main)", "zeros", is_object=False),
    SentRecord(0, -1, "scatter", 1, 0, [("float32", (2,), b"\0" * 8), ("int8", (), None)], [b"pickled", None]),
]


@pytest.mark.parametrize("record", [*RECORDED, *ON_TAPE], ids=lambda record: str(record.kind))
def test_a_record_comes_back_from_builtins_and_its_rows_with_their_names(record: Record) -> None:
    body = pickle.dumps(encode(record), protocol=4)
    assert b"fakedist" not in body  # no class is named: the reader refuses any
    found = decode(pickle.loads(body), TAPE_RECORDS if record in ON_TAPE else RECORDS)
    assert found == record
    if isinstance(found, CallsRecord):
        assert {row.operation for row in found.rows} <= {"all_reduce"}


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        ({"kind": "surprise"}, "no such kind"),
        ({"kind": "note"}, "it has no note"),
        ({"kind": "bound", "group": "tp"}, "group is 'tp', not an integer"),
        ({"kind": "outcome", "outcome": "bored", "code": 0}, "outcome is 'bored', not one of"),
        ({"kind": "calls", "rows": [(*CALL, 0)]}, "rows holds a row that does not have 13 values"),
        ({"kind": "calls", "rows": [tuple(CALL)[1:], tuple(CALL)]}, "rows holds a row that does not have 13 values"),
        ({"kind": "calls", "rows": [(*tuple(CALL)[:-1], "peer")]}, "rows holds a value that is not of type int"),
        ({"kind": "calls", "rows": ["all_reduce"]}, "rows is not a list of rows"),
        ({"kind": "calls", "rows": 7}, "rows is not a list of rows"),
        ({"kind": "ops", "first": 0, "operation": bytes(3), "scope": bytes(4)}, "operation is not a column"),
        ({"kind": "ops", "first": 0, "operation": bytes(8), "scope": bytes(4)}, "its columns differ in length"),
        ({"kind": "ops", "first": 0, "operation": bytes(4), "scope": [1]}, "scope is not a column"),
    ],
)
def test_what_is_no_such_record_is_refused(plain: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(plain, RECORDS)


def test_columns_grow_by_a_value_each() -> None:
    columns = Columns(MarksRecord)
    for number in range(3):
        columns.add(op=number, address=1 << 63, category=255, layer=-1, start=0, size=number)
    marks = columns.made()
    assert len(columns) == 3
    assert memoryview(marks.address).cast("Q").tolist() == [1 << 63] * 3
    assert memoryview(marks.size).cast("q").tolist() == [0, 1, 2]


def test_every_record_has_a_kind_of_its_own() -> None:
    assert [record.kind for record in RECORDS.values()] == list(RECORDS)
    assert NoteRecord in RECORDS.values()
    assert len(RECORDS) > 20
    with pytest.raises(AssertionError, match="two records of kind note"):
        record_kind("note")(NoteRecord)


def test_rows_of_an_earlier_version_lack_their_last_values() -> None:
    terms = CallTerms("SUM", batch=2)
    earlier = {"kind": "call_terms", "rows": [tuple(terms)[:8]]}
    assert decode(earlier, RECORDS) == CallTermsRecord([terms])
