"""Tables made of rows, with the schema's columns and types, and the rows of tables as records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pandas as pd

from fakedist.rundir.table_rows import TABLES

Row = TypeVar("Row")


def table_of(name: str, rows: Iterable[object] = ()) -> pd.DataFrame:
    """The table of this name with these rows, each with a value for every column in order."""
    table = TABLES[name]
    return pd.DataFrame(list(rows), columns=table.names).astype(table.dtypes)


def rows_of(kind: type[Row], table: pd.DataFrame) -> list[Row]:
    """The rows of a table as records. Unknown values become None, because JSON has no NaN."""
    return [
        kind(**{str(name): None if value != value else value for name, value in row.items()})
        for row in table.to_dict("records")
    ]
