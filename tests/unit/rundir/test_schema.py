import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import pyarrow.parquet as pq
import pytest

from fakedist.analysis.typed_tables import table_of
from fakedist.errors import RunDirectoryError
from fakedist.rundir.directory import Manifest
from fakedist.rundir.schema import Column, ColumnMark, Each, Int32, RowOf, Table
from fakedist.rundir.summary import Summary
from fakedist.rundir.table_rows import TABLES
from fakedist.rundir.tables import read_table, write_table
from tools import schema_page

ROOT = Path(__file__).parents[3]
REFERENCE = Path(__file__).with_name("reference_tables.json")


def test_the_reference_is_made_from_the_schema() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "run-directory").glob("*.md")}
    assert pages == schema_page.pages(), "python -m tools.schema_page docs/run-directory"


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


def described() -> dict[str, dict[str, str]]:
    """The columns of every table: type, words, and what else is checked."""
    tables = {}
    for name, table in TABLES.items():
        columns = tables[name + (" (newer)" if table.is_newer else "")] = {}
        for column in table.columns:
            parts, of = [column.type], column.row_of
            parts += ["one of " + "|".join(column.words)] if column.words else []
            if of is not None:
                end, earlier = (" or its end" if of.may_end else ""), (", earlier" if of.is_earlier else "")
                parts.append(f"row of {of.table} from {of.least}{end}{earlier}")
            columns[column.name] = "; ".join([*parts, *(mark.name.lower() for mark in column.marks)])
    return tables


def test_tables_are_what_they_were() -> None:
    """Runs with these columns are still read. ``python -m tests.unit.rundir.test_schema`` writes the reference."""
    before, now = json.loads(REFERENCE.read_text()), described()
    assert now == before
    assert [list(columns) for columns in now.values()] == [list(columns) for columns in before.values()]


class Plain:
    """A row."""

    name: Annotated[str, "Its name, one of {words}.", ("a", "b")]
    step: Int32
    parts: Annotated[list[Int32], "Its parts.", RowOf("blocks", least=-1)]
    sums: Annotated[float, "The sum of {}.", Each("{}_us", ("work", "wait"))]


class Longer(Plain):
    """A row with more.

    Attributes:
        step: Its ``step``; None without one.
        later: What came later.
    """

    later: Annotated[float, ColumnMark.NEWER]


def test_a_class_declares_a_table_with_the_columns_of_its_bases() -> None:
    table = Table(Longer)
    assert table.row == "A row with more."
    assert table.columns == (
        Column("name", "string", "Its name, one of a, b.", ("a", "b")),
        Column("step", "int32", "Its `step`; NaN without one."),
        Column("parts", "list<int32>", "Its parts.", row_of=RowOf("blocks", least=-1)),
        Column("work_us", "double", "The sum of work."),
        Column("wait_us", "double", "The sum of wait."),
        Column("later", "double", "What came later.", marks=(ColumnMark.NEWER,)),
    )
    assert table.dtypes == dict.fromkeys(table.names, "float64") | {
        "name": "object",
        "step": "int32",
        "parts": "object",
    }


def test_every_table_can_be_made_without_rows_and_written(tmp_path: Path) -> None:
    for name, table in TABLES.items():
        write_table(tmp_path, name, dict(table_of(name).items()))
        assert read_table(tmp_path, name).column_names == table.names


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


if __name__ == "__main__":
    REFERENCE.write_text(json.dumps(described(), indent=1) + "\n")
