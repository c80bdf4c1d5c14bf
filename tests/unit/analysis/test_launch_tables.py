from array import array
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.analysis.recording import Recording
from fakedist.cost_model.estimated import recorded_models
from fakedist.cost_model.host_times import host_threads
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.directory import TABLES_NAME
from fakedist.rundir.encoding import RECORDS, decode, encode
from fakedist.rundir.launch_records import HostClockRecord, LaunchesRecord, MachineScoreRecord
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.table_rows import TABLES
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


def test_a_journal_of_an_earlier_version_says_nothing_of_threads() -> None:
    earlier = encode(record(ROWS))
    del earlier["thread"]
    launches = decode(earlier, RECORDS)
    assert isinstance(launches, LaunchesRecord)
    table = launch_table(launches)
    assert table["thread"].isna().all()
    assert host_threads(table).tolist() == [0] * len(ROWS)


def test_the_clocks_own_score_counts_before_that_at_the_end_of_the_run() -> None:
    clock = HostClockRecord(2, array("d", [9.0] * len(ROWS)).tobytes(), 1, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0, linear_us=7.0)
    recording = Recording(machine=MachineScoreRecord(12.0, 2.0, 1.0, 0.0))
    assert machine_us_of(recording, clock) == 7.0
    earlier = encode(clock)
    del earlier["linear_us"], earlier["collector_us"]
    assert machine_us_of(recording, decode(earlier, RECORDS)) == 12.0
    assert machine_us_of(Recording(), None) is None


@pytest.mark.parametrize(("at_end_us", "are_said"), [(12.0, False), (15.0, True)])
def test_scores_of_one_machine_that_are_far_apart_are_said(at_end_us: float, *, are_said: bool) -> None:
    clock = HostClockRecord(2, array("d", [9.0] * len(ROWS)).tobytes(), 1, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0, linear_us=7.0)
    machine = MachineScoreRecord(at_end_us, 2.0, 1.0, 0.0)
    recording = Recording(machine=machine, host_clock=clock, gpu=GpuRecord(model=GPUS["h100-80g"]))
    _, said = recorded_models(recording, launch_table(record(ROWS), clock), None)
    assert [note.code for note in said] == (["machine_scores_differ"] if are_said else [])


def machine_us_of(recording: Recording, clock: object) -> float | None:
    """The machine's score that the host of a recorded step is scaled by."""
    assert clock is None or isinstance(clock, HostClockRecord)
    recording = replace(recording, host_clock=clock, gpu=GpuRecord(model=GPUS["h100-80g"]))
    models, _ = recorded_models(recording, launch_table(record(ROWS), clock), None)
    assert models is not None
    return models.host.time.machine_us


def test_both_tables_have_the_schemas_columns_with_rows_and_without(tmp_path: Path) -> None:
    for rows in (record(ROWS), None):
        for name, table in (("launches", launch_table(rows)), ("work", work_table(rows))):
            assert list(table.columns) == TABLES[name].names
            write_table(tmp_path, name, dict(table.items()))
            back = pd.read_parquet(tmp_path / TABLES_NAME / f"{name}.parquet")
            pd.testing.assert_frame_equal(back, table, check_dtype=False, check_categorical=False)


def test_a_step_that_went_on_has_no_launches(tmp_path: Path) -> None:
    made = HandMade()
    made.step(2)
    made.others.append(record(ROWS, step=2))
    made.record("step_went_on", step=2)
    assert made.read(tmp_path).launches is None
