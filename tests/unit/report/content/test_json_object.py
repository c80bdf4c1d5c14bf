"""The object of ``--json``: its keys, and figures that add up."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.report.content.run import run_object
from fakedist.results.building import build_tables
from fakedist.rundir import summary
from fakedist.rundir.outcome import Ending
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.table_rows import TABLES
from tests.unit.analysis.recorded import MIB, wrote_nothing
from tests.unit.report.handmade import ended_well, out_of_memory


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


KEYS = [*fields(summary.Summary), "findings", "run_directory"]


@pytest.mark.parametrize("make", [ended_well, out_of_memory])
@pytest.mark.parametrize("all_layers", [False, True])
def test_keys_are_the_schemas_and_figures_add_up(
    tmp_path: Path, make: Callable[[Path], Path], all_layers: bool
) -> None:
    found = run_object(make(tmp_path / "run"), all_layers=all_layers)
    assert list(found) == KEYS
    assert list(found["by_category"]) == list(CATEGORIES)
    assert sum(found["by_category"].values()) == found["peak_allocated_bytes"]
    assert sum(layer["peak_own_bytes"] for layer in found["layers"]) == found["peak_allocated_bytes"]
    assert max(row["peak_allocated_bytes"] for row in found["by_phase"]) == found["peak_allocated_bytes"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_objects_inside_have_the_keys_that_the_schema_says(tmp_path: Path) -> None:
    found = run_object(out_of_memory(tmp_path / "oom"))
    assert list(found["by_phase"][0]) == fields(summary.PhasePeak)
    assert list(found["layers"][0]) == fields(summary.LayerMemory)
    assert list(found["steps"][0]) == fields(summary.StepPeak)
    assert list(found["out_of_memory"]) == fields(summary.OutOfMemory)
    assert list(found["exit"]) == fields(Ending)
    assert list(found["largest_blocks"][0]) == TABLES["largest"].names
    talking = run_object(ended_well(tmp_path / "well"))
    assert list(talking["collectives"][0]) == fields(summary.CollectiveTotal)


def test_repeated_layers_are_folded_and_their_bytes_summed(tmp_path: Path) -> None:
    run = ended_well(tmp_path / "run")
    folded = {layer["name"]: layer for layer in run_object(run)["layers"]}
    assert list(folded) == ["(Transformer)", "embed", "layers", "layers.0-2", "layers.0-2.mlp"]
    expected: dict[str, Any] = {
        "name": "layers.0-2.mlp",
        "class_name": "Linear",
        "num_repeats": 3,
        "peak_bytes": {"parameter": 48 * MIB, "gradient": 32 * MIB, "activation": 24 * MIB},
        "peak_own_bytes": 104 * MIB,
        "peak_total_bytes": 104 * MIB,
        "least_peak_bytes": 24 * MIB,
        "median_peak_bytes": 24 * MIB,
        "largest_peak_bytes": 56 * MIB,  # of the only one with its gradient
        "most_bytes": {"parameter": 16 * MIB, "gradient": 32 * MIB, "activation": 8 * MIB},
        "most_total_bytes": 56 * MIB,
    }
    assert folded["layers.0-2.mlp"] == expected
    apart = {layer["name"]: layer["num_repeats"] for layer in run_object(run, all_layers=True)["layers"]}
    assert apart["layers.1.mlp"] == 1
    assert "layers.0-2.mlp" not in apart


def test_the_run_directory_is_absolute_and_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunDirectoryError, match=r"no run\.json"):
        run_object(tmp_path)
    ended_well(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert run_object(Path("run"))["run_directory"] == str((tmp_path / "run").resolve())


def test_a_rank_that_wrote_nothing_has_every_key(tmp_path: Path) -> None:
    build_tables(wrote_nothing(tmp_path))
    found = run_object(tmp_path)
    assert list(found) == KEYS
    assert found["largest_blocks"] == found["collectives"] == found["steps"] == found["layers"] == []
