from pathlib import Path

import pandas as pd
import pytest

from fakedist.results.run import RunTables
from fakedist.rundir.directory import TABLES_NAME
from fakedist.rundir.tables import write_table

PHASES = pd.DataFrame({"step": [1, 2], "phase": ["forward", "backward"]}).assign(
    peak_allocated_bytes=7, peak_reserved_bytes=8, end_allocated_bytes=9
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the table ``phases``."""
    write_table(tmp_path, "phases", dict(PHASES.items()))
    return tmp_path


def test_kept_tables_are_read_once_and_each_caller_may_change_its_own(run: Path) -> None:
    kept = RunTables(run).keeping()
    first = kept.table("phases")
    first.loc[0, "step"] = 99
    first.insert(0, "more", 0)
    kept.table("phases", ["phase"])  # read apart, as its strings differ
    (run / TABLES_NAME / "phases.parquet").unlink()
    assert not isinstance(kept.table("phases")["phase"].dtype, pd.CategoricalDtype)
    assert kept.table("phases")["step"].tolist() == [1, 2]
    assert isinstance(kept.table("phases", ["phase"])["phase"].dtype, pd.CategoricalDtype)


def test_tables_in_memory_come_before_those_of_the_directory(run: Path) -> None:
    tables = RunTables(run).with_tables({"phases": PHASES[:1]})
    assert (tables.num_rows("phases"), tables.has("layers"), tables.has("none")) == (1, True, False)
    assert tables.table("phases", ["phase"])["phase"].tolist() == ["forward"]
    assert isinstance(tables.table("phases", ["phase"])["phase"].dtype, pd.CategoricalDtype)
