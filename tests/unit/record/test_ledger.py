from collections.abc import Sequence

import pytest
import torch

from fakedist.record.ledger import Ledger
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import CallLinesRecord, CallsRecord, CallTermsRecord, GroupsRecord
from fakedist.rundir.rows import CallRow, CallTerms, GroupRow
from tests.support.on_device import on_device


class Kept:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.marked: list[tuple[int, int]] = []
        self.at = (7, 3)
        self.ledger = Ledger(
            self.records.append,
            lambda: self.at,
            lambda address, size: self.marked.append((address, size)),
            lambda *gather: None,
        )

    def calls(self) -> list[CallRow]:
        return [row for record in self.records if isinstance(record, CallsRecord) for row in record.rows]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_call_is_one_row(kept: Kept) -> None:
    kept.ledger.write("all_gather", 2, [torch.ones(2).half()], [torch.ones(3), torch.ones(4)], is_async=True)
    kept.ledger.write("recv", 0, [], [torch.ones(2, dtype=torch.int64)], peer=5)
    kept.ledger.write("barrier", 0, [], [])
    kept.ledger.flush()
    assert kept.calls() == [
        (0, "all_gather", 2, 4, 28, "float16", True, 0, 7, 3, -1, 0, 0),
        (1, "recv", 0, 0, 16, "int64", False, 0, 7, 3, 5, 0, 0),
        (2, "barrier", 0, 0, 0, "", False, 0, 7, 3, -1, 0, 0),
    ]
    assert kept.marked == []  # CPU tensors are not device memory


def test_a_call_has_the_scripts_lines_which_are_recorded_once(kept: Kept) -> None:
    def twice() -> None:
        for _ in range(2):
            kept.ledger.write("barrier", 0, [], [])

    twice()
    kept.ledger.write("all_reduce", 0, [], [], terms=CallTerms("SUM"))
    kept.ledger.flush()
    lines = [record.lines for record in kept.records if isinstance(record, CallLinesRecord)]
    assert ["twice" in made[0] for made in lines] == [True, False]
    terms = [row for record in kept.records if isinstance(record, CallTermsRecord) for row in record.rows]
    assert [(row.reduction, row.lines) for row in terms] == [("", 0), ("", 0), ("SUM", 1)]


def test_the_blocks_of_a_calls_tensors_are_marked_where_they_begin(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    bucket, gathered = on_device(100), on_device(400)
    kept.ledger.write("all_reduce", 0, [bucket[25:75]], [bucket[25:75]])
    kept.ledger.write("all_gather", 0, [bucket[50:]], [gathered[100:200]])
    assert set(kept.marked) == {(bucket.data_ptr(), 200), (gathered.data_ptr(), 400)}
    kept.ledger.flush()
    assert [row.stream for row in kept.calls()] == [5, 5]


def test_rows_reach_the_journal_in_batches(kept: Kept) -> None:
    for number in range(4095):
        kept.at = (number // 2, number)  # placed where they happen
        kept.ledger.write("barrier", 0, [], [])
    assert kept.calls() == []
    kept.ledger.write("barrier", 0, [], [])
    assert len(kept.calls()) == 4096
    assert [(row.op, row.scope) for row in kept.calls()[:3]] == [(0, 0), (0, 1), (1, 2)]
    kept.ledger.flush()
    assert [type(record) for record in kept.records if not isinstance(record, CallLinesRecord)] == [
        CallsRecord,
        CallTermsRecord,
    ]
    kept.ledger.write("barrier", 0, [], [])
    kept.ledger.flush()
    assert [row.sequence for row in kept.calls()] == list(range(4097))


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        (range(8), (tuple(range(8)), 0)),
        (range(65_536), ((0, 65_536), 1)),
        (list(range(5, 1024, 16)), ((5, 1029), 16)),
        ([0, 2, 1, *range(3, 20)], ((0, 2, 1, *range(3, 20)), 0)),
        ([*range(16), 99], ((*range(16), 99), 0)),
        ([20 - rank for rank in range(10)], ((20, 10), -1)),
    ],
    ids=["few", "world", "strided", "unordered", "gap", "backwards"],
)
def test_a_group_is_written_at_once_with_its_ranks(
    kept: Kept, ranks: Sequence[int], written: tuple[tuple[int, ...], int]
) -> None:
    assert kept.ledger.add_group("0", "default_pg", ranks, 3, "nccl") == 0
    row = GroupRow(0, "0", "default_pg", *written, 3, "nccl")
    assert kept.records == [GroupsRecord([row])]
    assert list(row.members) == list(ranks)
    assert kept.ledger.add_group("1", "", [0], 0, "gloo") == 1
