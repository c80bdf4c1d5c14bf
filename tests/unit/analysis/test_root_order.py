from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.building import make_tables
from fakedist.analysis.layer_table import fold_layers
from fakedist.analysis.recording import Recording
from fakedist.analysis.root_order import trained_first
from fakedist.run.rows import PlacingRow
from tests.unit.analysis.recorded import MIB, HandMade

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
    assert held == {
        "": 0,
        "(Student)": 4,
        "blocks": 5,
        "(Teacher)": 1,
        "(Teacher).blocks": 2,
        "(Teacher).(Softmax)": 3,
    }
    folds = [fold.name for fold in fold_layers(table.reset_index())]
    assert folds == ["", "(Student)", "blocks", "(Teacher)", "(Teacher).blocks", "(Teacher).(Softmax)"]


@pytest.mark.parametrize(("trained_by", "layer"), [("", 0), ("parameter", 5), ("gradient", 2)])
def test_else_models_come_in_the_order_in_which_they_ran(tmp_path: Path, trained_by: str, layer: int) -> None:
    assert [row.name for row in distilled(tmp_path, trained_by, layer).layers] == TEACHER_FIRST
