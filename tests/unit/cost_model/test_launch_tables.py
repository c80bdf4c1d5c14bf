from pathlib import Path

import pandas as pd

from fakedist.cost_model.launches import launch_table, work_table
from fakedist.rundir.directory import TABLES_NAME
from fakedist.rundir.schema import LAUNCHES, WORK
from fakedist.rundir.tables import write_table
from tests.unit.analysis.recorded import HandMade
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, UNKNOWN, launch, record

ROWS = [
    launch(PRODUCT, op=7, layer=3, grid="8,4,1", block="384,1,1"),
    launch(what="stream_records", event=9, stream=1 << 40),
    launch(COPY, phase="backward", recompute=True, graph=2, device=1, num_operations=5),
    launch(PRODUCT),
    launch(UNKNOWN),
]


def test_launches_and_the_work_that_they_share_come_back_from_the_journal(tmp_path: Path) -> None:
    made = HandMade()
    made.others.append(record(ROWS))
    launches = made.read(tmp_path).launches
    table = launch_table(launches)
    measured = ["measured_us", "host_us", "dispatch_us"]  # on a GPU, and by a host clock
    assert table[measured].isna().all(axis=None)
    found = table.drop(columns=measured).to_dict("records")
    places = {PRODUCT: 0, COPY: 1, UNKNOWN: 2, None: -1}
    assert found == [row | {"work": places[row["work"]], "step": 2} for row in ROWS]
    product, copy, unknown = work_table(launches).to_dict("records")
    assert (product, copy) == (PRODUCT._asdict(), COPY._asdict())
    assert unknown["flops"] != unknown["flops"]


def test_both_tables_have_the_schemas_columns_with_rows_and_without(tmp_path: Path) -> None:
    for rows in (record(ROWS), None):
        for name, table, schema in (("launches", launch_table(rows), LAUNCHES), ("work", work_table(rows), WORK)):
            assert list(table.columns) == [column.name for column in schema.columns]
            write_table(tmp_path, name, dict(table.items()))
            back = pd.read_parquet(tmp_path / TABLES_NAME / f"{name}.parquet")
            pd.testing.assert_frame_equal(back, table, check_dtype=False, check_categorical=False)


def test_a_step_that_went_on_has_no_launches(tmp_path: Path) -> None:
    made = HandMade()
    made.step(2)
    made.others.append(record(ROWS, step=2))
    made.record("step_went_on", step=2)
    assert made.read(tmp_path).launches is None
