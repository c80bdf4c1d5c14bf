"""Damages a file by its format: other values, something left out, or other bytes."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.hostile.fuzzing import TEXTS, VALUES, changed, damaged_bytes

COLUMN = st.one_of(
    st.integers(-3, 1 << 31).map(lambda number: pa.scalar(number, pa.int32() if number < 1 << 31 else pa.int64())),
    st.sampled_from([-(1 << 63), (1 << 63) - 1, 0, -1]).map(lambda number: pa.scalar(number, pa.int64())),
    st.sampled_from([float("nan"), float("inf"), -1e300, 0.5]).map(pa.scalar),
    TEXTS.map(lambda text: pa.scalar(text.encode(errors="replace").decode())),
    st.sampled_from([pa.scalar(None, pa.int64()), pa.scalar(True), pa.scalar([7], pa.list_(pa.int32()))]),
)


def damage_table(path: Path, data: st.DataObject) -> None:
    """Change a column: other values of its type, or of another; or leave out rows or a column."""
    table = pq.read_table(path)
    name = data.draw(st.sampled_from(table.column_names))
    place, how = table.schema.get_field_index(name), data.draw(st.integers(1, 4))
    if how == 1:
        table = table.remove_column(place)
    elif how == 2:
        table = table.slice(0, data.draw(st.integers(0, table.num_rows)))
    else:
        value = data.draw(COLUMN)
        values = pa.array([value.as_py()] * table.num_rows, value.type)
        if how == 3:
            with suppress(pa.ArrowException):
                values = values.cast(table.schema.field(place).type)
        table = table.set_column(place, name, values)
    pq.write_table(table, path, store_schema=False)


CELL = st.one_of(
    st.none(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.binary(max_size=9), st.text(max_size=9)
)


_VALUES_OF_TOML = st.one_of(
    st.sampled_from(["nan", "inf", "-1", "10e400", "9" * 30, "[]", "{}", "[" * 3000, "1979-05-27", '"\\u001b[2J"']),
    VALUES.map(lambda value: json.dumps(value)),
)


def damage(path: Path, data: st.DataObject) -> None:
    """Change what a good file means, if its name ends like that of a known format, or its bytes."""
    change = {
        ".json": damage_json,
        ".jsonl": damage_lines,
        ".gz": damage_compressed,
        ".toml": damage_toml,
        ".parquet": damage_table,
        ".sqlite": damage_database,
    }.get(path.suffix)
    if change is not None and data.draw(st.integers(0, 3)):
        change(path, data)
    else:
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))


def damage_json(path: Path, data: st.DataObject) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(data.draw(changed(json.loads(path.read_text())))))


def damage_lines(path: Path, data: st.DataObject) -> None:
    """Change values of a line of a file with a JSON object in each."""
    lines = path.read_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(data.draw(changed(json.loads(lines[at]))))
    path.write_text("".join(f"{line}\n" for line in lines))


def damage_compressed(path: Path, data: st.DataObject) -> None:
    """Change values of a compressed JSON file."""
    path.write_bytes(
        gzip.compress(json.dumps(data.draw(changed(json.loads(gzip.decompress(path.read_bytes()))))).encode())
    )


def damage_toml(path: Path, data: st.DataObject) -> None:
    """Change the value of a line, or the line."""
    lines = path.read_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    key, equals, _ = lines[at].partition(" = ")
    lines[at] = f"{key} = {data.draw(_VALUES_OF_TOML)}" if equals else data.draw(TEXTS)
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))


def damage_database(path: Path, data: st.DataObject) -> None:
    """Change a column of an SQLite database."""
    with sqlite3.connect(path) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = data.draw(st.sampled_from(names))
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
        value = data.draw(CELL)
        with suppress(UnicodeEncodeError):
            connection.execute(f'UPDATE "{table}" SET "{data.draw(st.sampled_from(columns))}" = ?', (value,))
    connection.close()
