"""Many at once, and much of it: nothing hangs, figures are right, and the memory of readers is bounded."""

from __future__ import annotations

import json
import os
import shutil
from array import array
from pathlib import Path

import pytest

from fakedist.rundir.directory import JOURNAL_NAME, JournalWriter, load_manifest
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.schema import ACTIONS
from tests.load.loading import FAKEDIST, TRAIN, figures_of, needs_time, profile, ran, started
from tests.unit.analysis.recorded import BASE, HandMade, new_run

pytestmark = [needs_time, pytest.mark.timeout(7200)]


def test_twenty_profiles_at_once_that_build_the_driver(tmp_path: Path) -> None:
    """One of them builds, and the others wait: twenty compilers at once would not fit into memory."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "tmp").mkdir()
    environment = {"FAKEDIST_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    running = [started(profile("-o", f"run{rank}", ranks=f"{rank}"), tmp_path, environment) for rank in range(20)]
    ended = [each.ended() for each in running]
    assert [each.code for each in ended] == [0] * 20, [each.err[-500:] for each in ended if each.code]
    summaries = [load_manifest(tmp_path / f"run{rank}").summary for rank in range(20)]
    assert len({each.peak_allocated_bytes for each in summaries if each is not None}) == 1
    assert list((tmp_path / "tmp").glob("fakedist-*")) == []
    assert list((tmp_path / "cache").rglob("fakedist-build-*")) == []


def test_ten_million_events_of_the_allocator(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = ran(profile("-o", "run", steps=2, allocations=1_700_000), tmp_path)
    assert ended.code == 0, ended.err
    assert ended.peak_bytes < 4 << 30
    summary = load_manifest(tmp_path / "run").summary
    assert summary is not None
    assert summary.peak_allocated_bytes < 1 << 20
    assert figures_of(tmp_path / "run", tmp_path)


def test_a_journal_of_two_gigabytes(tmp_path: Path) -> None:
    """Allocations and frees of one block, over and over, as an endless loop of a script records them."""
    if shutil.disk_usage(tmp_path).free < 10 << 30:
        pytest.skip("it needs 10 GB of disk")
    made = HandMade()
    op = made.op()
    run = made.write(new_run(tmp_path / "run"))
    actions = [ACTIONS.index(name) for name in ("alloc", "free_requested", "free_completed")]
    values = {"op": [op] * 3, "action": actions, "address": [BASE] * 3, "size": [512] * 3, "stack": [-1] * 3}
    columns = {
        name: array(code, values.get(name, [0] * 3)).tobytes() * (1 << 17)
        for name, code in columns_of(EventsRecord).items()
    }
    record = EventsRecord(0, [], [], **columns, pools=[])
    (run / JOURNAL_NAME).rename(run / "begins")
    journal = JournalWriter(run / JOURNAL_NAME)
    try:
        os.truncate(run / JOURNAL_NAME, 0)
        with (run / JOURNAL_NAME).open("ab") as file:
            file.write((run / "begins").read_bytes())
        (run / "begins").unlink()
        while (run / JOURNAL_NAME).stat().st_size < 2 << 30:
            journal.append(record)
    finally:
        journal.close()
    size = (run / JOURNAL_NAME).stat().st_size
    report = [*FAKEDIST, "report", "run", "--json"]
    limited = ran(["prlimit", f"--as={4 << 30}", *report], tmp_path)
    assert "too little memory" in limited.tells_one_error()
    shown = ran(report, tmp_path)
    assert shown.code == 0, shown.err
    assert shown.peak_bytes < 6 * size
    assert json.loads(shown.out)["peak_allocated_bytes"] == 512
