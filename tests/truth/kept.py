"""Kept tables of recorded ranks, in ``tests/data/steps``: one file for each, and one of hosts and commands.

Rows of a table begin with the row of the catalogue and the rank, one row group for each row of the catalogue. Numbers
that count up are kept as what they add to the last one, events as how long ago they were the newest, and the host's
time of a launch to 0.1 us.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fakedist.rundir.plain import from_plain
from fakedist.rundir.step_time import HostTime
from tests.truth.catalogue import Made
from tests.truth.jobs import ROOT

KEPT = ROOT / "tests" / "data" / "steps"
TABLES = ("launches", "work", "calls", "groups")
_COUNTING = {"launches": ("op", "call"), "calls": ("sequence", "op")}
_DECIMALS = 1


@dataclass(frozen=True)
class Rank:
    """Where the host's time of a rank's launches comes from, and how they were recorded; None where it is not kept."""

    host: HostTime | None
    made: Made | None


def tables_of(row: str, kept: Path = KEPT) -> dict[int, dict[str, pd.DataFrame]]:
    """The tables of each recorded rank of a row."""
    found: dict[int, dict[str, pd.DataFrame]] = {}
    for name in TABLES:
        table = _row_group(kept / f"{name}.parquet", row).to_pandas()
        for rank, of_rank in table.groupby("rank", sort=False):
            own = of_rank.drop(columns=["row", "rank"]).reset_index(drop=True)
            found.setdefault(int(str(rank)), {})[name] = _decoded(name, own)
    return found


def _row_group(path: Path, row: str) -> pa.Table:
    file = pq.ParquetFile(path)
    groups = [number for number, name in enumerate(_rows_of(file)) if name == row]
    return file.read_row_groups(groups)


def _rows_of(file: pq.ParquetFile) -> list[str]:
    """The row of the catalogue of each row group."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    return [group.column(0).statistics.min for group in groups]


def ranks_of(row: str, kept: Path = KEPT) -> dict[int, Rank]:
    """Each recorded rank of a row, besides its tables; empty if the row is not recorded."""
    found = _load(kept).get(row, {})
    return {
        int(rank): Rank(
            from_plain(HostTime, of_rank["host"]) if of_rank["host"] else None,
            from_plain(Made, of_rank["made"]) if of_rank["made"] else None,
        )
        for rank, of_rank in found.items()
    }


def keep(row: str, rank: int, tables: dict[str, pd.DataFrame], of_rank: Rank, kept: Path = KEPT) -> None:
    """Keep a rank, in the place of what was kept of it."""
    kept.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        made = pa.Table.from_pandas(_encoded(name, table.assign(row=row, rank=rank)), preserve_index=False)
        _write(kept / f"{name}.parquet", row, rank, made.select(["row", "rank", *table.columns]))
    ranks = _load(kept)
    plain = {"host": of_rank.host and asdict(of_rank.host), "made": of_rank.made and asdict(of_rank.made)}
    ranks.setdefault(row, {})[str(rank)] = plain
    (kept / "ranks.json").write_text(json.dumps(ranks, indent=1, sort_keys=True) + "\n")


def _load(kept: Path) -> dict[str, dict[str, Any]]:
    path = kept / "ranks.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(path: Path, row: str, rank: int, made: pa.Table) -> None:
    """Replace the rows of a rank in a table's file. The other row groups are copied as they are."""
    groups, schema = {row: made}, made.schema
    if path.exists():
        file = pq.ParquetFile(path)
        schema = pa.unify_schemas([file.schema_arrow, schema], promote_options="permissive")
        groups = {name: file.read_row_group(number) for number, name in enumerate(_rows_of(file))}
        others = groups.get(row, made.slice(0, 0))
        others = others.filter(pc.not_equal(others["rank"], rank))
        groups[row] = pa.concat_tables([others, made], promote_options="permissive")
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "write_statistics": ["row"]}
    with pq.ParquetWriter(path.with_suffix(".new"), schema, **options) as writer:
        for name in sorted(groups):
            # A column that a recording lacks is null there: recordings of other versions have other columns.
            whole = pa.concat_tables([schema.empty_table(), groups[name]], promote_options="permissive")
            writer.write_table(whole.cast(schema), row_group_size=1 << 30)
    path.with_suffix(".new").replace(path)


def _encoded(name: str, table: pd.DataFrame) -> pd.DataFrame:
    for column in _COUNTING.get(name, ()):
        numbers = table[column].astype("Int64").where(table[column] >= 0)
        table[column] = numbers.sub(numbers.ffill().shift().fillna(0))
    if name == "launches":
        event = table["event"].to_numpy().astype(np.int64)
        is_record = (table["what"] == "stream_records").to_numpy()
        newest = np.maximum.accumulate(np.where(is_record, event, 0))
        since = np.where(event == 0, 0, newest + 1 - event)
        since[is_record] = np.diff(event[is_record], prepend=0)
        table["event"] = since
        table["dispatch_us"] = table["dispatch_us"].round(_DECIMALS)
    return table


def _decoded(name: str, table: pd.DataFrame) -> pd.DataFrame:
    for column in _COUNTING.get(name, ()):
        table[column] = table[column].astype("Int64").cumsum().fillna(-1).astype(np.int64)
    if name == "launches":
        of_event = table["event"].to_numpy()
        is_record = (table["what"] == "stream_records").to_numpy()
        newest = np.cumsum(np.where(is_record, of_event, 0))
        table["event"] = np.where(is_record, newest, np.where(of_event == 0, 0, newest + 1 - of_event)).astype(
            np.uint64
        )
        for name in {"allocator", "host_work"} & set(table):  # null in recordings of a version that did not have it
            table[name] = table[name].astype(object).fillna("")
    return table
