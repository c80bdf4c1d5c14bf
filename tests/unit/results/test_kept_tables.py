from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fakedist.results import run
from fakedist.results.run import RunTables

STEPS = pd.DataFrame({"step": [1, 2], "phase": ["forward", "backward"]})


class _Stored:
    """The tables of a run directory; ``asked`` is what was read from it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def read(self, directory: Path, name: str, columns: list[str] | None) -> _Stored:
        self.asked.append(f"{name} {columns}")
        return self

    def to_pandas(self, *, strings_to_categorical: bool) -> pd.DataFrame:
        return STEPS.astype({"phase": "category"}) if strings_to_categorical else STEPS


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> _Stored:
    made = _Stored()
    monkeypatch.setattr(run, "read_table", made.read)
    return made


def test_kept_tables_are_read_once_and_each_caller_may_change_its_own(stored: _Stored) -> None:
    kept = RunTables(Path("run")).keeping()
    first = kept.table("steps")
    first.loc[0, "step"] = 99
    first.insert(0, "more", 0)
    assert kept.table("steps").equals(STEPS)
    assert stored.asked == ["steps None"]


def test_columns_of_a_kept_table_are_read_apart_as_their_strings_differ(stored: _Stored) -> None:
    kept = RunTables(Path("run")).keeping()
    assert not isinstance(kept.table("steps")["phase"].dtype, pd.CategoricalDtype)
    for _ in range(2):
        assert isinstance(kept.table("steps", ["phase"])["phase"].dtype, pd.CategoricalDtype)
    assert len(stored.asked) == 2


def test_tables_in_memory_come_before_those_of_the_directory(stored: _Stored) -> None:
    tables = RunTables(Path("run")).with_tables({"kernels": STEPS})
    assert (tables.num_rows("kernels"), tables.has("layers"), tables.has("none")) == (2, True, False)
    assert isinstance(tables.table("kernels", ["phase"])["phase"].dtype, pd.CategoricalDtype)
    assert not stored.asked
