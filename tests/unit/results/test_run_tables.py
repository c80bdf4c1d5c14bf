"""Tables of a run that are kept while a report is made."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fakedist.results.run_tables import KeptTables, MadeTables


class _Counted(MadeTables):
    def __init__(self) -> None:
        super().__init__({"steps": pd.DataFrame({"step": [1, 2], "phase": ["forward", "backward"]})})
        self.asked: list[str] = []

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        self.asked.append(f"{name} {columns}")
        return super().table(name, columns)


def test_kept_tables_are_read_once_and_each_caller_may_change_its_own() -> None:
    tables = _Counted()
    kept = KeptTables(tables)
    first = kept.table("steps")
    first.loc[0, "step"] = 99
    first.insert(0, "more", 0)
    assert kept.table("steps").equals(MadeTables.table(tables, "steps"))
    assert tables.asked == ["steps None"]


def test_columns_of_a_kept_table_are_read_apart_as_their_strings_differ() -> None:
    tables = _Counted()
    kept = KeptTables(tables)
    assert not isinstance(kept.table("steps")["phase"].dtype, pd.CategoricalDtype)
    for _ in range(2):
        assert isinstance(kept.table("steps", ["phase"])["phase"].dtype, pd.CategoricalDtype)
    assert len(tables.asked) == 2
    assert (kept.has("steps"), kept.has("layers"), kept.num_rows("steps")) == (True, False, 2)
