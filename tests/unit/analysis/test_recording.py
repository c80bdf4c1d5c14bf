"""A recording's fields say what it keeps of a journal."""

from array import array
from pathlib import Path

import pytest

from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.memory_tables import fold_layers
from fakedist.analysis.recording import JournalReading, Recording, trained_first
from fakedist.results.building import make_tables
from fakedist.rundir.launch_records import LaunchKeysRecord
from fakedist.rundir.memory_records import MarksRecord, SaveRecord
from fakedist.rundir.records import GpuRecord, ScopesRecord, StepRecord
from fakedist.rundir.rows import PlacingRow, ScopeRow
from tests.unit.analysis.recorded import MIB, HandMade


def column(code: str, *values: int) -> bytes:
    return array(code, values).tobytes()


def test_a_recording_keeps_the_last_record_or_all_or_their_rows_or_their_columns() -> None:
    reading = JournalReading()
    scopes = [ScopeRow(number, 1, "forward", 0, recompute=False) for number in range(3)]
    save = SaveRecord("torch.save", "train.py:3 (main)", 0, 1, 2, written_bytes=10, asynchronous=False)
    for record in (
        GpuRecord("first"),
        StepRecord(1, 0, 10),
        ScopesRecord(scopes[:2]),
        MarksRecord(*(column(code, 1) for code in "qQBiqq")),
        GpuRecord("last"),
        save,
        StepRecord(2, 10, 20),
        ScopesRecord(scopes[2:]),
        MarksRecord(*(column(code, 2, 3) for code in "qQBiqq")),
    ):
        reading.take(record)
    reading.join()
    recording = reading.recording
    assert recording.gpu == GpuRecord("last")
    assert [step.step for step in recording.steps] == [1, 2]
    assert recording.saves == [save]
    assert recording.scopes == scopes
    assert list(recording.marks) == ["op", "address", "category", "layer", "start", "size"]
    assert all(values.tolist() == [1, 2, 3] for values in recording.marks.values())


def test_the_keys_of_launches_that_earlier_versions_wrote_are_passed_over() -> None:
    JournalReading().take(LaunchKeysRecord(1, column("Q", 7)))


TEACHER_FIRST = ["", "(Teacher)", "blocks", "(Teacher).(Softmax)", "(Student)", "(Student).blocks"]


def distilled(tmp_path: Path, trained_by: str, layer: int) -> Recording:
    """A teacher runs, then a student. One block for each layer, of as many MiB as its number, and a mark on one."""
    hand = HandMade()
    teacher = hand.layer("(Teacher)", "Teacher")
    hand.layer("blocks", parent=teacher)
    hand.layer("(Teacher).(Softmax)", "Softmax", parent=teacher)
    student = hand.layer("(Student)", "Student")
    hand.layer("(Student).blocks", parent=student)
    hand.record("placings", rows=[(0, (5, 1))])
    for each in range(1, 6):
        hand.op(layer=each)
        hand.alloc(each * 64 * MIB, each * MIB)
    if trained_by:
        hand.mark(layer * 64 * MIB, trained_by, layer, layer * MIB)
    hand.record("oom", device=0, requested_bytes=1, op=0, layer="(Student).blocks", line="", message="")
    recording = hand.read(tmp_path / "run")
    trained_first(recording)
    return recording


@pytest.mark.parametrize("trained_by", ["optimizer_state", "gradient"])
def test_the_model_that_is_trained_comes_first_and_has_the_short_names(tmp_path: Path, trained_by: str) -> None:
    recording = distilled(tmp_path, trained_by, 5)
    names = ["", "(Student)", "blocks", "(Teacher)", "(Teacher).blocks", "(Teacher).(Softmax)"]
    assert [row.name for row in recording.layers] == names
    assert [row.layer for row in recording.layers] == list(range(6))
    assert [row.parent for row in recording.layers] == [-1, 0, 1, 0, 3, 3]
    assert recording.failed_request is not None
    assert recording.failed_request.layer == "blocks"
    assert recording.placings == [PlacingRow(0, (2, 3))]


def test_every_block_stays_with_its_layer(tmp_path: Path) -> None:
    recording = distilled(tmp_path, "optimizer_state", 5)
    blocks = build_blocks(recording)
    table = make_tables(recording, blocks, event_places(recording))["layers"].set_index("name")
    held = {name: size // MIB for name, size in table["peak_own_bytes"].items()}
    assert held == {"": 0, "(Student)": 4, "blocks": 5, "(Teacher)": 1, "(Teacher).blocks": 2, "(Teacher).(Softmax)": 3}
    folds = [fold.name for fold in fold_layers(table.reset_index())]
    assert folds == ["", "(Student)", "blocks", "(Teacher)", "(Teacher).blocks", "(Teacher).(Softmax)"]


@pytest.mark.parametrize(("trained_by", "layer"), [("", 0), ("parameter", 5), ("gradient", 2)])
def test_else_models_come_in_the_order_in_which_they_ran(tmp_path: Path, trained_by: str, layer: int) -> None:
    assert [row.name for row in distilled(tmp_path, trained_by, layer).layers] == TEACHER_FIRST


def test_a_part_that_ran_before_its_model_comes_after_it(tmp_path: Path) -> None:
    """Its number is lower than its parent's, which memory with children relies on."""
    hand = HandMade()
    part = hand.layer("backbone", "Backbone", parent=3)
    hand.layer("backbone.0", parent=part)
    hand.layer("(Model)", "Model")
    hand.layer("head", parent=3)
    for each in (2, 4):
        hand.op(layer=each)
        hand.alloc(each * 64 * MIB, each * MIB)
    recording = hand.read(tmp_path / "run")
    trained_first(recording)
    assert [row.name for row in recording.layers] == ["", "(Model)", "backbone", "backbone.0", "head"]
    assert [row.parent for row in recording.layers] == [-1, 0, 1, 2, 1]
    table = make_tables(recording, build_blocks(recording), event_places(recording))["layers"].set_index("name")
    assert [table["peak_total_bytes"][name] // MIB for name in ("(Model)", "backbone", "head")] == [6, 2, 4]


def test_of_two_trained_models_the_one_with_the_short_names_keeps_them(tmp_path: Path) -> None:
    hand = HandMade()
    for name in ("(Critic)", "(Probe)", "(Model)"):
        root = hand.layer(name)
        hand.layer("head" if name == "(Model)" else f"{name}.head", parent=root)
        hand.op(layer=root)
        hand.alloc(root * 64 * MIB, MIB)
        if name != "(Probe)":
            hand.mark(root * 64 * MIB, "gradient", root, MIB)
    recording = hand.read(tmp_path / "run")
    trained_first(recording)
    names = ["", "(Model)", "head", "(Critic)", "(Critic).head", "(Probe)", "(Probe).head"]
    assert [row.name for row in recording.layers] == names
