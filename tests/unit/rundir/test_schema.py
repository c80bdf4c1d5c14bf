import dataclasses
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fakedist.errors import RunDirectoryError
from fakedist.rundir import schema_page
from fakedist.rundir.manifest import Manifest
from fakedist.rundir.schema import TABLES
from fakedist.rundir.summary import Summary
from fakedist.rundir.tables import read_table, write_table

ROOT = Path(__file__).parents[3]


def test_the_reference_is_made_from_the_schema() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "run-directory").glob("*.md")}
    assert pages == schema_page.pages(), "python -m fakedist.rundir.schema_page docs/run-directory"


def test_the_page_says_which_question_each_table_answers() -> None:
    page = (ROOT / "docs" / "run-directory.md").read_text()
    answers = page.partition("| question | tables |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", answers)) == sorted(TABLES)


def test_the_keys_of_the_json_object_are_frozen() -> None:
    wanted = """schema_version world_size rank device gpu torch exit fits capacity_bytes peak_allocated_bytes
        peak_reserved_bytes peak_step peak_phase by_phase by_category layers largest_blocks collectives steps
        kernels time out_of_memory advice invented_values left_during_init estimated_outside notes run_directory
        reserved remedy router_load host_memory named_phases engine engine_sleeps asleep_bytes"""
    assert sorted([*schema_page.meanings_of(Summary), "run_directory"]) == sorted(wanted.split())


def test_every_field_of_the_json_object_is_described() -> None:
    for kind in schema_page.records(Manifest):
        assert set(schema_page.meanings_of(kind)) == {f.name for f in dataclasses.fields(kind)}


def test_a_table_comes_back_with_the_schemas_columns_and_types(tmp_path: Path) -> None:
    write_table(tmp_path, "unanswered", {"num_calls": [3], "function": ["cudaFoo"]})
    table = read_table(tmp_path, "unanswered")
    assert table.column_names == ["function", "num_calls"]
    assert str(table.schema.field("num_calls").type) == "int64"
    assert table.to_pylist() == [{"function": "cudaFoo", "num_calls": 3}]


def test_a_column_that_the_schema_does_not_know_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no column surprise"):
        write_table(tmp_path, "unanswered", {"function": [], "num_calls": [], "surprise": []})


def test_columns_that_came_later_are_empty_in_older_tables(tmp_path: Path) -> None:
    columns = {column.name: [""] if column.type == "string" else [0] for column in TABLES["steps"].columns}
    write_table(tmp_path, "steps", columns | {"name": ["rollout"]})
    path = tmp_path / "tables" / "steps.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["name"]), path)
    assert read_table(tmp_path, "steps").column("name").to_pylist() == [""]


def test_a_missing_or_damaged_table_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has no table unanswered") as caught:
        read_table(tmp_path, "unanswered")
    assert caught.value.hint.startswith("an older fakedist recorded the run, or the directory is damaged")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "unanswered.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_table(tmp_path, "unanswered")
