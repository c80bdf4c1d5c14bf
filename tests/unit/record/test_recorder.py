"""A whole recording, of a training on tensors that say they are on a device: what its parts write together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import fakedist
from fakedist.errors import RecordingError, StopRun
from fakedist.record.marker import Cells
from fakedist.record.numbering import PythonNumbering
from fakedist.record.recorder import Recorder, active
from fakedist.rundir.encoding import Record, columns_of
from fakedist.rundir.memory_records import EventsRecord, FailedRequestRecord, MarksRecord, StatisticsRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import (
    LayersRecord,
    NamedPhaseRecord,
    NoteRecord,
    OperationNamesRecord,
    OperationsRecord,
    OutcomeRecord,
    RegionsRecord,
    ScopesRecord,
    StepRecord,
)
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import CATEGORIES
from tests.support.on_device import MadeUpCuda

WORKSPACE, FREED = 1 << 40, 1 << 41
R = TypeVar("R")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(self.first(x * self.scale)))


@dataclass
class Recorded:
    """The records of a run, and the numbers that the allocator was given."""

    records: list[Record] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    phases: list[tuple[str, int, int]] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def layers(self) -> dict[int, str]:
        return {row.layer: row.name for record in self.of(LayersRecord) for row in record.rows}

    def marks(self) -> list[dict[str, Any]]:
        rows = []
        for record in self.of(MarksRecord):
            codes: Any = columns_of(MarksRecord).items()
            columns = {name: memoryview(getattr(record, name)).cast(code[-1]) for name, code in codes}
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return rows

    def marked(self) -> dict[str, set[tuple[str, int]]]:
        """Layers and bytes by category."""
        layers, found = self.layers(), defaultdict(set)
        for row in self.marks():
            found[CATEGORIES[row["category"]]].add((layers.get(row["layer"], ""), row["size"]))
        return found

    def operations(self) -> list[str]:
        """Names of the operations that ran, by number."""
        names = {row.number: row.name for record in self.of(OperationNamesRecord) for row in record.rows}
        return [names[kind] for record in self.of(OperationsRecord) for kind in memoryview(record.operation).cast("I")]


class MadeUpDevice:
    """A device without an engine, with the most in use each time that it is asked, and 10 changes each time."""

    def __init__(self, most: list[int]) -> None:
        self._most, self._changes = iter(most), iter(range(10, 100, 10))

    def in_use(self) -> tuple[int, int, int, int, int]:
        most = next(self._most)
        return most, 0, most - 1, most - 2, most - 3

    def kept(self) -> tuple[dict[str, int], list[tuple[int, int]]]:
        return {}, []

    def num_changes(self) -> int:
        return next(self._changes)

    def engine(self, *, is_awake: bool) -> None:
        """It has none."""

    def most_of_engine(self) -> tuple[int, int]:
        return 0, 0


@pytest.fixture(scope="module")
def recorded() -> Iterator[Recorded]:
    """Two steps of a training with recomputation, momentum and a running average of the model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda, made = MadeUpCuda(monkeypatch), Recorded()

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            if func is torch.ops.aten.addmm.default:
                cuda.alloc("alloc", WORKSPACE, 4096, cuda.numbers[-1])
            return func(*args, **kwargs)

        recorder = Recorder(
            made.records.append,
            2,
            run,
            lambda *told: made.phases.append(told),
            device=MadeUpDevice([100, 30, 70, 50, 20, 90, 10, 10]),
        )
        with recorder:
            assert active() is recorder
            with pytest.raises(RecordingError, match="already running"), Recorder(made.records.append, 2, None):
                pass
            model, average = Net(), Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

            def train() -> None:
                for step in range(9):
                    cuda.alloc("segment_alloc", FREED + step, 64, -1)
                    with fakedist.phase("outer"):
                        loss = model(torch.ones(3, 4)).sum()
                        with fakedist.phase("inner") if step == 0 else nullcontext():
                            loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

            with pytest.raises(StopRun):
                train()
            assert recorder.stopped
            torch.cuda.memory._record_memory_history(enabled=None)  # the script may not end ours
            cuda.fail(0, 100, 1000, 50)
            recorder.close(Ending(Outcome.STOPPED, 0, "text"), "train.py:9 (main)")
            written = len(made.records)
            recorder.close(Ending(Outcome.FINISHED, 0))
            assert len(made.records) == written
        assert active() is None
        made.numbers = cuda.numbers
        assert isinstance(average, Net)
        yield made


def test_a_named_phase_has_the_most_in_use_also_of_phases_within(recorded: Recorded) -> None:
    inner, outer, second, _ = recorded.of(NamedPhaseRecord)
    assert (inner.name, inner.step, inner.peak_used_bytes) == ("inner", 1, 70)
    assert (outer.name, outer.step, outer.peak_used_bytes) == ("outer", 0, 70), "not the 100 from before it"
    assert (outer.backed_bytes, outer.outside_bytes, outer.others_bytes) == (49, 48, 47), "as it ended"
    assert (second.name, second.step, second.peak_used_bytes) == ("outer", 1, 90), "step 2 begins within it"
    changes = [(phase.first_change, phase.end_change) for phase in (inner, outer, second)]
    assert changes == [(21, 31), (11, 41), (51, 61)], "the next ones as it begins and as it ends"
    names = recorded.operations()
    assert "aten.addmm.default" in names[outer.first_op : inner.first_op]
    assert "aten.addmm.default" not in names[: outer.first_op]
    assert inner.first_op < inner.end_op == outer.end_op < second.first_op
    assert active() is None
    with fakedist.phase("outside of a run, it does nothing"):
        pass


def test_each_piece_of_memory_has_its_category_and_layer(recorded: Recorded) -> None:
    marked = recorded.marked()
    own = {("first", 64), ("first", 16), ("second", 32), ("second", 8)}
    assert marked == {
        "parameter": own | {("(Net)", 16)},  # a buffer too
        "gradient": own,
        "optimizer_state": own,
        "other": {("copy of the parameters (average)", size) for _, size in own},
        "workspace": {("", 4096)},
    }


def test_each_product_has_its_own_workspace(recorded: Recorded) -> None:
    products = [number for number, name in enumerate(recorded.operations()) if name == "aten.addmm.default"]
    assert len(products) == 4
    assert [row["op"] for row in recorded.marks() if row["address"] == WORKSPACE] == products


def test_the_allocator_has_the_number_of_each_operation_before_it_runs(recorded: Recorded) -> None:
    numbers = recorded.numbers
    assert numbers == sorted(set(numbers))
    assert numbers[0] == -1
    assert numbers[-1] == len(recorded.operations()) - 1
    first, second = recorded.of(EventsRecord)
    products = [number for number, name in enumerate(recorded.operations()) if name == "aten.addmm.default"]
    assert [*memoryview(first.op).cast("q")] == [-1, *products[:2], -1]
    assert [*memoryview(second.op).cast("q")] == [*products[2:], -1]
    assert first.frames == [FrameRow("train.py", 7, "main")]  # without ours
    assert (first.stacks, second.frames, second.stacks) == ([(0,)], [], [])
    begin, again = (record.first for record in recorded.of(OperationsRecord))
    assert begin == 0
    assert products[1] < again < products[2]


def test_steps_scopes_and_saved_activations_are_written_step_by_step(recorded: Recorded) -> None:
    steps = recorded.of(StepRecord)
    assert [(step.step, step.samples, step.sample_shape) for step in steps] == [(1, 3, "4"), (2, 3, "4")]
    layers = recorded.layers()
    scopes = [(row.step, row.phase, layers[row.layer]) for record in recorded.of(ScopesRecord) for row in record.rows]
    in_step = [
        *(("forward", name) for name in ("(Net)", "first", "second", "")),
        *(("backward", name) for name in ("second", "first")),
        *((phase, "") for phase in ("other", "optimizer")),
    ]
    # In torch 2.10 views are operations, one before the first layer's backward.
    scopes = [scope for scope in scopes if scope[1:] != ("backward", "")]
    assert scopes == [(0, "init", ""), *((step, *scope) for step in (1, 2) for scope in in_step)]
    names = recorded.operations()
    rows = [row for record in recorded.of(RegionsRecord) for row in record.rows]
    regions = [[name for name in names[row.first : row.last + 1] if name != "aten.t.default"] for row in rows]
    forward = ["mul.Tensor", "addmm.default", "addmm.default", "sum.default", "ones_like.default"]
    assert regions == [[f"aten.{name}" for name in forward]] * 2


def test_a_failed_request_the_statistics_and_the_end_are_written(recorded: Recorded) -> None:
    (failed,) = recorded.of(FailedRequestRecord)
    assert (failed.requested_bytes, failed.layer, failed.op) == (100, "", len(recorded.operations()) - 1)
    assert failed.line.startswith(__file__)
    assert failed.message == "50 bytes of the device were free"
    (statistics,) = recorded.of(StatisticsRecord)
    assert statistics == StatisticsRecord(0, 2 << 20, 2 << 20, 1 << 20, 1 << 20, 3, peaks_were_reset=False)
    assert [record.note.code for record in recorded.of(NoteRecord)] == ["history_requests_ignored"]
    (outcome,) = recorded.of(OutcomeRecord)
    assert (outcome.outcome, outcome.code, outcome.line) == (Outcome.STOPPED, 0, "train.py:9 (main)")
    assert outcome.training is not None
    assert (outcome.last_phase, outcome.last_step, outcome.training.optimizer_steps) == ("other", 2, 2)
    assert set(recorded.phases) <= {
        (phase, step, 2 << 20) for phase in ("init", "forward", "backward", "optimizer", "other") for step in range(3)
    }


def test_numbers_go_on_where_the_last_ones_were_taken() -> None:
    cells = Cells(op=5)
    numbering = PythonNumbering(cells)
    assert [numbering.number(kind, 7) for kind in (2, 3)] == [5, 6]
    numbering.gemm(6, (1, 2))
    taken = numbering.take()
    assert (taken.first, [*memoryview(taken.operation).cast("I")], [*memoryview(taken.scope).cast("I")]) == (
        5, [2, 3], [7, 7],
    )  # fmt: skip
    assert (numbering.take_gemms(), numbering.take_gemms()) == ({6: (1, 2)}, {})
    numbering.number(4, 8)
    assert (numbering.take().first, cells.op) == (7, 8)
